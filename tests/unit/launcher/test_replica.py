"""Replicas of several processes, to their supervisor one worker each: without real processes."""

from collections.abc import Iterator, Mapping
from typing import cast

import pytest

from gossipdp.launcher.environment import Environment
from gossipdp.launcher.joining import JoinInfo
from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.replica import ReplicaProcess, start_worker
from gossipdp.launcher.reports import Report, report_variables, send_report
from gossipdp.launcher.supervisor import Ending, WorkerProcess

NUM_SHARDS = 2


class Scripted(WorkerProcess):
    """A process that ends when the test says, or is killed."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__()
        self.pid, self.variables = 1, variables
        self.how: Ending | None = None
        self.signals: list[int] = []
        self.is_killed = False

    def waits_for(self) -> list[object]:
        return [self]

    def poll(self) -> Ending | None:
        return Ending("was killed") if self.is_killed and self.how is None else self.how

    def send(self, number: int) -> None:
        self.signals.append(number)

    def kill_group(self) -> None:
        self.is_killed = True

    def report(self, report: Report) -> None:
        assert send_report(report, report_variables(self.reports.sender))


def label(variables: Mapping[str, str]) -> str:
    """Return "replica.shard"; a replica without a rank has "+" and its number on this host."""
    number = int(variables["LOCAL_RANK"]) // NUM_SHARDS
    return f"{variables['GOSSIPDP_REPLICA'] or f'+{number}'}.{variables['RANK']}"


class Made:
    """Two replicas of two processes."""

    def __init__(self) -> None:
        self.plan = LaunchPlan(
            2,
            2,
            0,
            store=("127.0.0.1", 9),
            run_id="run",
            secret="s" * 16,
            join_infos=[JoinInfo() for _ in range(NUM_SHARDS)],
        )
        self.processes: dict[str, Scripted] = {}
        self.all: list[ReplicaProcess] = []

    def _start_process(self, variables: Mapping[str, str]) -> Scripted:
        process = Scripted(variables)
        self.processes[label(variables)] = process
        return process

    def start(self, rank: int, **more: str) -> ReplicaProcess:
        own = self.plan.worker_variables(rank) | more
        worker = start_worker(self.plan.join_infos, self._start_process, own)
        self.all.append(cast(ReplicaProcess, worker))
        return self.all[-1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.setattr(
        "gossipdp.launcher.store.HostedStore.open_in_background", lambda *_: None
    )  # it would import torch
    setting = Made()
    yield setting
    for replica in setting.all:
        replica.close()


def test_each_process_is_told_its_shard_and_its_replica(made: Made) -> None:
    made.start(0)
    made.start(1)
    assert sorted(made.processes) == ["0.0", "0.1", "1.0", "1.1"]
    own = [made.processes[label].variables for label in sorted(made.processes)]
    assert [each["RANK"] for each in own] == ["0", "1"] * 2
    assert {each["WORLD_SIZE"] for each in own} == {"2"}
    assert [each["LOCAL_RANK"] for each in own] == ["0", "1", "2", "3"]
    assert {each["LOCAL_WORLD_SIZE"] for each in own} == {"4"}
    # A world of its own for each replica.
    ports = [each["MASTER_PORT"] for each in own]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    environments = [Environment.read(each) for each in own]
    assert [each.rank for each in environments] == [0, 0, 1, 1]
    assert [each.shard for each in environments] == [0, 1, 0, 1]
    for each in environments:
        assert (each.world_size, each.num_shards, each.local_world_size) == (2, 2, 2)
        assert (each.store_host, each.store_port, each.hosts_store) == ("127.0.0.1", 9, False)


def test_a_replica_ends_when_all_of_its_processes_have(made: Made) -> None:
    replica = made.start(0)
    made.processes["0.1"].how = Ending()
    assert replica.poll() is None
    assert replica.waits_for() == [made.processes["0.0"]]
    made.processes["0.0"].how = Ending()
    assert replica.poll() == Ending()
    assert not any(process.is_killed for process in made.processes.values())


def test_the_death_of_one_process_ends_the_others(made: Made) -> None:
    replica = made.start(1)
    made.processes["1.1"].how = Ending("died of signal 9 (SIGKILL)")
    assert replica.poll() is None
    assert made.processes["1.0"].is_killed
    ending = replica.poll()
    assert ending == Ending("lost its process 1, which died of signal 9 (SIGKILL)")


def test_who_was_asked_to_end_is_not_killed_for_it(made: Made) -> None:
    """The first to end leaves the others the time to save."""
    replica = made.start(0)
    replica.send(15)
    made.processes["0.0"].how = Ending("ended with exit code 143")
    assert replica.poll() is None
    assert not made.processes["0.1"].is_killed
    made.processes["0.1"].how = Ending("ended with exit code 143")
    assert replica.poll() == Ending("lost its process 0, which ended with exit code 143")


def test_a_signal_reaches_those_that_run(made: Made) -> None:
    replica = made.start(0)
    made.processes["0.1"].how = Ending()
    replica.poll()
    replica.send(15)
    assert made.processes["0.0"].signals == [15]
    assert made.processes["0.1"].signals == []


def test_a_replica_begins_when_all_of_its_processes_do(made: Made) -> None:
    replica = made.start(0)
    addresses = {0: ("10.0.0.1", 1), 1: ("10.0.0.2", 1)}
    made.processes["0.0"].report(Report(begins=True, addresses=addresses))
    assert replica.take_reports() == [Report(addresses=addresses)]
    made.processes["0.1"].report(Report(begins=True))
    assert replica.take_reports() == [Report(begins=True)]
    assert replica.take_reports() == []


def test_who_comes_back_joins_the_network_of_its_own_shard(made: Made) -> None:
    made.start(0)
    first = made.start(1)
    for shard in range(NUM_SHARDS):
        addresses = {rank: ("10.0.0.1", 100 * (shard + 1) + rank) for rank in range(2)}
        told = Report(addresses=addresses, run_id=f"run-shard-{shard}", secret=f"{shard}" * 16)
        made.processes[f"1.{shard}"].report(told)
    for report in first.take_reports():
        made.plan.join_infos[0].take(report)  # as their supervisor does
    made.start(1, GOSSIPDP_JOIN="10.0.0.9:9", GOSSIPDP_RESTARTS="1")
    for shard in range(NUM_SHARDS):
        environment = Environment.read(made.processes[f"1.{shard}"].variables)
        assert environment.join == (("10.0.0.1", 100 * (shard + 1)),)
        assert environment.run_id == f"run-shard-{shard}"
        assert environment.secret == f"{shard}".encode() * 16
        assert (environment.rank, environment.shard, environment.num_restarts) == (1, shard, 1)


def test_a_new_replica_joins_the_networks_that_its_user_names(made: Made) -> None:
    made.plan = LaunchPlan(
        2,
        secret="s" * 16,
        join_infos=[
            JoinInfo(f"run-shard-{shard}-of-2", join=(("10.0.0.1", 100 + shard),))
            for shard in range(NUM_SHARDS)
        ],
    )
    replica = made.start(1)
    for shard in range(NUM_SHARDS):
        process = made.processes[f"+1.{shard}"]
        environment = Environment.read(process.variables)
        assert (environment.needs_rank, environment.is_joining) == (True, True)
        assert (environment.shard, environment.num_shards, environment.local_rank) == (
            shard,
            2,
            2 + shard,
        )
        assert environment.join == (("10.0.0.1", 100 + shard),)
        assert environment.run_id == f"run-shard-{shard}-of-2"
        assert environment.secret == b"s" * 16
        # The network has no store; the replica's own world has one.
        assert environment.store_host is None
        assert process.variables["MASTER_ADDR"] == "127.0.0.1"
        assert process.variables["RANK"] == str(shard)
        process.report(Report(begins=True, rank=5))
    assert [report.rank for report in replica.take_reports()] == [5, None]
    # It dies, and comes back under that rank.
    made.start(1, RANK="5", GOSSIPDP_JOIN="10.0.0.9:9", GOSSIPDP_RESTARTS="1")
    again = Environment.read(made.processes["5.1"].variables)
    assert (again.rank, again.num_restarts, again.join) == (5, 1, (("10.0.0.1", 101),))


def test_a_replica_of_one_process_is_that_process() -> None:
    plan = LaunchPlan(1, 1, 0, store=("127.0.0.1", 9), run_id="run", secret="s" * 16)
    process = start_worker(plan.join_infos, Scripted, plan.worker_variables(0))
    assert isinstance(process, Scripted)
    assert process.variables == plan.worker_variables(0)
    process.close()


def test_where_one_process_cannot_be_started_none_is_left(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = made._start_process

    def fails(variables: Mapping[str, str]) -> Scripted:
        if label(variables) == "0.1":
            raise OSError("no process left")
        return start(variables)

    with pytest.raises(OSError, match="no process left"):
        start_worker(made.plan.join_infos, fails, made.plan.worker_variables(0))
    assert made.processes["0.0"].is_killed
