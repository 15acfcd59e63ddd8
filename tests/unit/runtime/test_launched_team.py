import dataclasses
import socket
import time
from collections.abc import Iterator

import pytest

from gossipdp.runtime.environment import Environment
from gossipdp.runtime.farewell import alive_key
from gossipdp.runtime.launched_team import LaunchedTeam
from gossipdp.runtime.store import HostedStore, connect, ready_key


def launched(rank: int, port: int, *, agent_store: bool) -> Environment:
    """Of two workers that torchrun started on one host, or srun where nobody hosts the store."""
    return Environment(
        rank=rank,
        num_workers=2,
        local_rank=rank,
        num_local_workers=2,
        store_host="127.0.0.1",
        store_port=port,
        agent_store=agent_store,
        run_id="none",
    )


@pytest.fixture
def agent() -> Iterator[HostedStore]:
    """The store of torchrun itself."""
    with HostedStore() as store:
        store.open()
        yield store


def until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_worker_is_told_what_the_launcher_said() -> None:
    told = launched(1, 29500, agent_store=True)
    team = LaunchedTeam(told, "secret", None)
    assert team.rank(0) == 1
    worker = Environment.read(team.variables(0))
    assert (worker.rank, worker.num_workers) == (1, 2)
    assert (worker.local_rank, worker.num_local_workers) == (1, 2)
    assert worker.key_prefix == told.key_prefix
    assert (worker.agent_store, worker.unique_run_id, worker.secret) == (True, False, b"secret")


def test_the_only_worker_of_a_run_may_begin_anew() -> None:
    told = dataclasses.replace(launched(0, 29500, agent_store=True), num_workers=1)
    team = LaunchedTeam(told, None, None)
    assert not team.others_elsewhere
    before = Environment.read(team.variables(0)).key_prefix
    team.begin_anew()
    assert Environment.read(team.variables(0)).key_prefix != before
    assert LaunchedTeam(launched(0, 29500, agent_store=True), None, None).others_elsewhere


def test_where_no_launcher_hosts_the_store_rank_0_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environments = [launched(rank, port, agent_store=False) for rank in range(2)]
    teams = [LaunchedTeam(environment, None, None) for environment in environments]
    try:
        for team in teams:
            team.open()
        # To the worker of rank 0, too, another hosts it.
        worker = Environment.read(teams[0].variables(0))
        assert worker.agent_store
        assert not teams[1].has_begun(set())
        store = connect(worker, 30)
        for rank in range(2):
            store.set(ready_key(worker.key_prefix, rank), "1")
        until(lambda: all(team.has_begun({0}) for team in teams))
        assert [team.check() for team in teams] == [None, None]
    finally:
        for team in reversed(teams):
            team.close()


def test_a_failure_before_the_beginning_is_told_to_the_others(agent: HostedStore) -> None:
    teams = [
        LaunchedTeam(launched(rank, agent.port, agent_store=True), None, None) for rank in (0, 1)
    ]
    for team in teams:
        team.open()
    teams[1].tell_failed("worker 1 ended with exit code 1")
    until(lambda: teams[0].check() == "worker 1 ended with exit code 1")
    assert not teams[0].has_begun({0})
    for team in teams:
        team.close()


def test_who_has_begun_shows_life_and_tells_of_its_end(agent: HostedStore) -> None:
    teams = [
        LaunchedTeam(launched(rank, agent.port, agent_store=True), None, None) for rank in (0, 1)
    ]
    prefix = launched(0, 0, agent_store=True).key_prefix
    store = connect(launched(1, agent.port, agent_store=True), 30)
    for rank, team in enumerate(teams):
        team.open()
        store.set(ready_key(prefix, rank), "1")
    until(lambda: all(store.add(alive_key(prefix, rank), 0) > 0 for rank in (0, 1)))
    for team in teams:
        team.close()
    assert teams[1].tell_ended(wait=False) == []
    assert teams[0].tell_ended(wait=True) == []


def test_where_torchrun_did_not_start_it_nobody_is_told() -> None:
    team = LaunchedTeam(launched(1, 29500, agent_store=False), None, None)
    assert team.tell_ended(wait=True) == []
