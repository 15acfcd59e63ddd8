from collections.abc import Iterator

import pytest

from gossipdp.runtime import store
from gossipdp.runtime.store import arrival_key, ready_key
from gossipdp.runtime.team import HostingTeam, RemoteTeam

PREFIX = "gossipdp/default/0/"  # of several hosts' first meeting


@pytest.fixture
def team() -> Iterator[HostingTeam]:
    """Of two hosts with a worker each; its store is open."""
    made = HostingTeam(1, "127.0.0.1", 0, None, num_nodes=2)
    made.open_here()
    yield made
    made.close()


def all_begin(team: HostingTeam) -> None:
    for rank in range(2):
        team._store.put(ready_key(PREFIX, rank), "1")


def test_a_failure_elsewhere_counts_until_the_run_has_begun(team: HostingTeam) -> None:
    assert team.check() is None
    team._store.put(f"{PREFIX}failed", "worker 1 failed")
    assert team.check() == "worker 1 failed"
    all_begin(team)
    assert team.check() is None


def test_a_store_that_fails_does_not_end_a_run_that_has_begun(
    team: HostingTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_begin(team)
    assert team.has_begun(set())

    def fail(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    for name in ("have_set", "text"):
        monkeypatch.setattr(team._store, name, fail)
    assert team.check() is None
    assert team.has_begun(set())
    assert team.published_addresses() == {}


def test_workers_that_meet_anew_have_not_begun() -> None:
    team = HostingTeam(2, "127.0.0.1", 0, None)
    team.open_here()
    assert team.has_begun({0, 1})
    team.begin_anew()
    assert not team.has_begun({0})
    team.close()


def test_garbage_in_the_store_is_no_address(team: HostingTeam) -> None:
    for rank, text in ((0, '{"host": "127.0.0.2", "port": 7}'), (1, "\udcff")):
        team._store.put(arrival_key(PREFIX, 0, rank), text.encode(errors="replace").decode())
    assert team.published_addresses() == {0: ("127.0.0.2", 7)}


def test_a_failure_after_all_have_begun_ends_nothing_on_another_host(team: HostingTeam) -> None:
    """It may be told before that host's supervisor has seen that all have."""
    host, port = team._address
    remote = RemoteTeam(1, host, port, None, num_nodes=2, node_rank=1)
    all_begin(team)
    team._store.put(f"{PREFIX}failed", "worker 0 failed")
    remote.tell_failed("worker 1 failed")
    remote.open()
    try:
        remote._store._thread.join(60)
        assert remote.check() is None
        assert remote.has_begun(set())
        assert team._store.text(f"{PREFIX}failed") == "worker 0 failed"
    finally:
        remote.close()


def test_the_other_hosts_workers_are_awaited_where_ours_began(team: HostingTeam) -> None:
    host, port = team._address
    remote = RemoteTeam(1, host, port, None, num_nodes=2, node_rank=1)
    remote.open()
    try:
        assert remote._store._is_connected.wait(60)
        assert not remote.has_begun(set())
        all_begin(team)
        assert remote.has_begun({1})
    finally:
        remote.close()


def test_another_host_s_store_may_go_just_when_the_run_begins(
    team: HostingTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "COMES_WITHIN_S", 0.0)
    host, port = team._address
    remote = RemoteTeam(1, host, port, None, num_nodes=2, node_rank=1)
    remote.open()
    try:
        assert remote._store._is_connected.wait(60)
        assert not remote.has_begun({1})  # the other host's worker has not said so
        team.close()
        remote._store._thread.join(30)
        assert not remote.has_begun(set())
        assert remote.has_begun({1})
    finally:
        remote.close()
