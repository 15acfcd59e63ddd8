import json
import logging
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from torch.distributed import HashStore
from waiting import wait_until

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher import rendezvous
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.rendezvous import Rendezvous, RendezvousResult, Settings
from gossipdp.launcher.store import connect, ready_key
from gossipdp.links.tls import TlsFiles

SETTINGS = Settings(
    tensors=(("embedding.weight", (10, 4)), ("output.bias", (4,))),
    method="a2cid2",
    graph="ring-3",
    comm_rate="1.0",
    wire_format="float32",
)


def environment(rank: int, num_workers: int = 3, **values: object) -> Environment:
    return Environment(rank=rank, world_size=num_workers, store_host="store", **values)


def meet(
    environments: list[Environment],
    settings: dict[int, Settings] | None = None,
    number: int = 0,
    store: HashStore | None = None,
    timeout_s: float = 20,
) -> list[RendezvousResult | Exception]:
    """All workers meet, each in a thread; what each got."""
    shared = HashStore() if store is None else store

    def one(environment: Environment) -> RendezvousResult | Exception:
        part = Rendezvous(environment, shared, timeout_s=timeout_s, number=number)
        own = (settings or {}).get(environment.rank, SETTINGS)
        try:
            return part.meet(("127.0.0.1", 100 + environment.rank), own)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(environments)) as pool:
        return list(pool.map(one, environments))


def test_the_networks_of_all_shards_are_of_one_run() -> None:
    store, found = HashStore(), set()
    for shard in range(2):
        both = [environment(rank, 2, shard=shard, num_shards=2) for rank in range(2)]
        first, second = meet(both, store=store)
        assert isinstance(first, RendezvousResult)
        assert second == first
        found.add(first.run_id.removesuffix(f"-shard-{shard}-of-2"))
    (run_id,) = found
    assert re.fullmatch("default-[0-9a-f]{8}", run_id)


def test_all_learn_all_addresses_one_run_id_and_one_secret() -> None:
    meetings = meet([environment(rank) for rank in range(3)])
    first = meetings[0]
    assert isinstance(first, RendezvousResult)
    assert first.addresses == {rank: ("127.0.0.1", 100 + rank) for rank in range(3)}
    assert len(first.secret) == 32
    assert meetings == [first] * 3


@pytest.mark.parametrize(
    ("host", "given", "warns"),
    [
        ("store", {}, True),
        ("127.0.0.1", {}, False),
        ("store", {"secret": b"a secret of this test"}, False),
        ("store", {"tls": TlsFiles(Path("cert"), Path("key"), Path("ca"))}, False),
    ],
)
def test_a_secret_that_strangers_may_read_is_warned_of(
    host: str, given: dict, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    environments = [replace(environment(rank, 2, **given), store_host=host) for rank in range(2)]
    with caplog.at_level(logging.WARNING, "gossipdp"):
        first, _ = meet(environments)
    assert isinstance(first, RendezvousResult)
    assert ("everyone who reaches the store at" in caplog.text) == warns
    assert not first.secret or first.secret.decode() not in caplog.text + repr(first)


def test_a_given_secret_and_run_id_are_kept_and_not_published() -> None:
    store = HashStore()
    given = {"secret": b"hush", "run_id": "mine", "unique_run_id": True}
    meetings = meet([environment(rank, **given) for rank in range(3)], store=store)
    assert [(meeting.secret, meeting.run_id) for meeting in meetings] == [(b"hush", "mine")] * 3
    assert b"hush" not in store.get("gossipdp/mine/0/0/reference")


def test_runs_without_an_id_of_their_own_still_differ() -> None:
    first, second = (meet([environment(0, 1)])[0] for _ in range(2))
    assert first.run_id != second.run_id
    assert first.run_id.startswith("default-")


def test_a_second_meeting_in_the_same_processes_sees_no_old_addresses() -> None:
    store = HashStore()
    given = {"run_id": "mine", "unique_run_id": True}
    environments = [environment(rank, **given) for rank in range(3)]
    first = meet(environments, store=store)
    second = meet(environments, store=store, number=1)
    assert [meeting.run_id for meeting in (first[0], second[0])] == ["mine", "mine-0-1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "gossip"}, "method is 'gossip' here and 'a2cid2' on worker 0"),
        ({"graph": "star"}, "graph is 'star' here and 'ring-3' on worker 0"),
        ({"comm_rate": "2.0"}, "comm_rate is '2.0' here and '1.0' on worker 0"),
        ({"wire_format": "bfloat16"}, "wire_format is 'bfloat16' here and 'float32'"),
        (
            {"tensors": (("embedding.weight", (10, 4)), ("output.bias", (5,)))},
            r"first in tensor 1: output.bias of shape \(5,\) here and output.bias of shape \(4,\)",
        ),
        (
            {"tensors": (("embedding.weight", (10, 4)),)},
            r"first in tensor 1: none here and output.bias of shape \(4,\) on worker 0",
        ),
    ],
)
def test_a_difference_ends_the_start_for_all(change: dict, message: str) -> None:
    odd = msgspec.structs.replace(SETTINGS, **change)
    zeroth, refused, other = meet([environment(rank) for rank in range(3)], {1: odd})
    assert isinstance(refused, RefusedError)
    assert refused.args[0].startswith("worker 1 cannot join: ")
    with pytest.raises(RefusedError, match=message):
        raise refused
    for met in (zeroth, other):
        assert isinstance(met, RendezvousError)
        assert str(met) == str(refused)


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        ((b"a", b"b"), "the secret differs from worker 0's"),
        ((b"a", None), "GOSSIPDP_SECRET is not set here and set on worker 0"),
        ((None, b"b"), "GOSSIPDP_SECRET is set here and not set on worker 0"),
    ],
)
def test_another_secret_is_refused(secrets: tuple, message: str) -> None:
    _, refused = meet([environment(rank, 2, secret=secrets[rank]) for rank in range(2)])
    assert isinstance(refused, RefusedError)
    assert message in str(refused)


def test_with_tls_no_secret_is_made_or_told() -> None:
    tls = TlsFiles(Path("cert"), Path("key"), Path("ca"))
    store = HashStore()
    first, second = meet([environment(rank, 2, tls=tls) for rank in range(2)], store=store)
    assert isinstance(first, RendezvousResult)
    assert isinstance(second, RendezvousResult)
    assert first.secret == second.secret == b""
    assert json.loads(store.get("gossipdp/default/0/0/reference"))["secret"] is None
    _, refused = meet([environment(0, 2, tls=tls), environment(1, 2)])
    assert "TLS is not used here and used on worker 0" in str(refused)


def test_another_world_size_is_refused() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(meet, [environment(0, 2)], store=store)
        (refused,) = pool.submit(meet, [environment(1, 3)], store=store).result()
        (first,) = waiting.result()
    assert isinstance(refused, RefusedError)
    assert "WORLD_SIZE is 3 here and 2 on worker 0" in str(refused)
    # The worker that waits for the refused one ends too, and knows why.
    assert isinstance(first, RendezvousError)
    assert str(first) == str(refused)


class Sleeper:
    """A clock that only sleeping moves."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def alone(
    environment: Environment,
    store: object,
    timeout_s: float = 60,
) -> Rendezvous:
    sleeper = Sleeper()
    return Rendezvous(
        environment, store, timeout_s=timeout_s, clock=sleeper.clock, sleep=sleeper.sleep
    )


def test_who_never_arrives_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    store.set("gossipdp/default/0/0/arrivals/2", "1")
    with pytest.raises(
        RendezvousError, match=r"workers 1, 3 did not arrive within 60 s; present: 0, 2; check"
    ):
        alone(environment(0, 4), store).meet(("127.0.0.1", 1), SETTINGS)
    assert "waiting for workers 1, 3 to arrive, at most 60 s" in caplog.messages
    with pytest.raises(RendezvousError, match=r"worker 0 did not arrive within 60 s; present: 1;"):
        alone(environment(1, 2), HashStore()).meet(("127.0.0.1", 1), SETTINGS)


def test_two_workers_of_one_rank_are_refused() -> None:
    store = HashStore()
    meet([environment(0, 1)], store=store)
    with pytest.raises(RefusedError, match="another worker already has RANK 0"):
        alone(environment(0, 1), store).meet(("127.0.0.1", 1), SETTINGS)


def test_a_store_that_goes_away_is_one_clear_error() -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Broken pipe\nException raised from ...")

    with pytest.raises(RendezvousError, match=r"lost the store at store:0 .*\(Broken pipe\)"):
        alone(environment(1), Gone()).meet(("127.0.0.1", 1), SETTINGS)


def test_one_worker_needs_no_store() -> None:
    part = Rendezvous.open(Environment(), timeout_s=1)
    meeting = part.meet(("127.0.0.1", 9), SETTINGS)
    assert meeting.addresses == {0: ("127.0.0.1", 9)}
    part.mark_ready()


def test_ready_is_marked_under_the_launchers_key() -> None:
    store = HashStore()
    alone(environment(1), store).mark_ready()
    assert store.check([ready_key("gossipdp/default/0/", 1)])


def test_what_is_not_ours_in_the_store_is_one_clear_error() -> None:
    store = HashStore()
    store.set("gossipdp/default/0/0/reference", "[1, 2")
    (first,) = meet([environment(1, 2)], store=store)
    assert isinstance(first, RendezvousError)
    assert "holds something else under this run's keys" in str(first)


STRANGERS = {
    "a text of a terminal's": ("worker/0", json.dumps({"host": "\x1b[2Jno" + 9000 * "!"})),
    "an address that is a name": ("worker/0", json.dumps({"host": "evil.example", "port": 1})),
    "an impossible port": ("worker/0", json.dumps({"host": "10.0.0.1", "port": 70000})),
    "too much": ("worker/0", json.dumps({"host": "10.0.0.1", "port": 1, "x": "y" * 140_000})),
    "no UTF-8": ("worker/0", b"\xff\xfe"),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_what_a_stranger_writes_is_one_short_line_without_control_characters(what: str) -> None:
    key, value = STRANGERS[what]
    store = HashStore()
    store.set(f"gossipdp/default/0/0/{key}", value)
    store.set("gossipdp/default/0/0/reference", reference(store))
    with pytest.raises(RendezvousError) as raised:
        alone(environment(1, 2), store).meet(("127.0.0.1", 1), SETTINGS)
    text = str(raised.value)
    assert len(text) < 1000
    assert text.isprintable()


def reference(store: HashStore) -> str:
    """What worker 0 of such a run publishes."""
    shown = HashStore()
    meet([environment(0, 1)], store=shown)
    found = json.loads(shown.get("gossipdp/default/0/0/reference"))
    return json.dumps({**found, "terms": {**found["terms"], "WORLD_SIZE": "2"}})


@pytest.mark.parametrize("run_id", ["a\x1b[2J", "a" * 201])
def test_no_run_has_such_an_id(run_id: str) -> None:
    store = HashStore()
    found = json.loads(reference(store)) | {"run_id": run_id}
    store.set("gossipdp/default/0/0/reference", json.dumps(found))
    with pytest.raises(RendezvousError, match="holds something else under this run's keys"):
        alone(environment(1, 2), store).meet(("127.0.0.1", 1), SETTINGS)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="the secret has 4 bytes; give at least 16"):
        alone(environment(0, 1), None).meet(("127.0.0.1", 1), SETTINGS, b"hush")


def test_worker_0_ends_the_store_that_it_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CLOSE_AFTER_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = replace(environment(0, 1), store_host="127.0.0.1", store_port=port)
    hosts = Rendezvous(told, connect(told, 30), timeout_s=30)
    hosts.meet(("127.0.0.1", 1), SETTINGS)
    assert listens(port)
    hosts.mark_ready()
    wait_until(lambda: not listens(port), "the store's port is closed")
    hosts.close()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
