"""Workers that are ended, go on or are started again, by the clock of the test."""

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gossipdp.launcher import supervisor as supervision
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.faults import FaultInjector, FaultPlan
from gossipdp.launcher.launch_plan import JoinInfo, LaunchPlan
from gossipdp.launcher.processes import Ending, SupervisedWorker, WorkerProcess, exit_reason
from gossipdp.launcher.reports import Report, report_variables, send_report
from gossipdp.launcher.store import HostedStore
from gossipdp.launcher.supervisor import FIRST_DELAY_S, GRACE_S, PATIENCE_S, Failure, Supervisor

CRASH, KILLED = Ending("ended with exit code 1", "ValueError: no"), Ending(exit_reason(-9))


class Scripted(WorkerProcess):
    """A worker without a process, which ends when the test says, or is killed."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__()
        self.pid, self.variables = 2**30 + int(variables["LOCAL_RANK"]), variables  # of no process
        self.how: Ending | None = None
        self.signals: list[int] = []
        self.is_killed = False

    def poll(self) -> Ending | None:
        return self.how

    def send(self, number: int) -> None:
        self.signals.append(number)

    def kill_group(self) -> None:
        self.is_killed = True

    def report(self, **report: Any) -> None:
        assert send_report(Report(**report), report_variables(self.reports.sender))

    @property
    def environment(self) -> Environment:
        return Environment.read(self.variables)


def plan_of(num_workers: int, **options: Any) -> LaunchPlan:
    options = {"world_size": num_workers, "first_rank": 0, "run_id": "run"} | options
    return LaunchPlan(num_workers, store=("127.0.0.1", 9), secret="s" * 16, **options)


class Setting:
    """Three workers of a supervisor, and a clock."""

    def __init__(self, *, begun: bool = False, faults: str = "", **options: Any) -> None:
        self.now = 0.0
        options |= {"clock": lambda: self.now}
        if faults:
            options["faults"] = FaultInjector(FaultPlan.parse(faults), 3, clock=options["clock"])
        self.noted: list[Failure] = []
        self.failures: list[tuple[int, bool]] = []
        self.restarted: list[tuple[int, float]] = []
        self.sentences: list[str] = []
        self.num_start_failures = 0
        self.plan = options.pop("plan", None) or plan_of(3)
        options |= {"on_failure": self.note_failure, "on_sentence": self.sentences.append}
        self.supervisor = Supervisor(self.plan, self.start, **options)
        self.workers: dict[int, Scripted] = {}
        self.made: list[Scripted] = []
        self.supervisor.start()
        self.restarted.clear()
        if begun:
            self.report(begins=True, addresses=self.addresses(3))

    def note_failure(self, failure: Failure) -> None:
        self.failures.append((failure.rank, self.supervisor.begun))
        self.noted.append(failure)

    @staticmethod
    def addresses(num_workers: int) -> dict[int, tuple[str, int]]:
        return {rank: ("127.0.0.1", 1000 + rank) for rank in range(num_workers)}

    def start(self, variables: Mapping[str, str]) -> Scripted:
        local_rank = int(variables["LOCAL_RANK"])
        self.restarted.append((local_rank, self.now))
        if self.num_start_failures:
            self.num_start_failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.workers[local_rank] = Scripted(variables)
        self.made.append(self.workers[local_rank])
        return self.workers[local_rank]

    def report(self, *at: float, **report: Any) -> None:
        for worker in self.workers.values():
            worker.report(**report)
        self.step(*at)

    def die(self, *ranks: int, how: Ending = CRASH, at: Sequence[float] = ()) -> bool:
        for rank in ranks:
            self.workers[rank].how = how
        return self.step(*at)

    def end_well(self, *ranks: int, at: Sequence[float] = ()) -> bool:
        """Let these workers end with the average of the run, and look at these times."""
        for rank in ranks:
            self.workers[rank].report(consolidated=True)
        return self.die(*ranks, how=Ending(), at=at)

    def step(self, *times: float) -> bool:
        """Look at these times; return whether the run goes on."""
        goes_on = True
        for self.now in times:
            goes_on = self.supervisor.step(0)
        return goes_on

    def signalled(self, number: int) -> set[int]:
        return {rank for rank, each in self.workers.items() if number in each.signals}

    @property
    def failed(self) -> list[int]:
        return [failure.rank for failure in self.supervisor.failures]

    @property
    def running(self) -> set[int]:
        return {worker.rank for worker in self.supervisor.running}


Make = Callable[..., Setting]


@pytest.fixture(autouse=True)
def without_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostedStore, "open_in_background", lambda *_: None)  # would import torch


@pytest.fixture
def make() -> Iterator[Make]:
    """``make(begun=False, ...)``: a setting, whose channels are closed at the end."""
    made: list[Setting] = []

    def setting(**options: Any) -> Setting:
        made.append(Setting(**options))
        return made[-1]

    yield setting
    for each in made:
        each.supervisor.close()
        for worker in each.made:
            worker.close()


def test_a_failure_before_the_run_began_ends_the_others(make):
    setting = make(max_restarts=9)
    setting.report(0, says="the models differ")
    assert setting.die(0, at=[1])
    assert setting.signalled(signal.SIGTERM) == set()
    setting.die(1, at=[1 + GRACE_S / 2, 1 + GRACE_S])  # in the grace: for the same reason
    assert setting.signalled(signal.SIGTERM) == {2}
    setting.step(0.99 + GRACE_S + PATIENCE_S)
    assert not setting.workers[2].is_killed
    setting.step(1 + GRACE_S + PATIENCE_S)
    assert setting.workers[2].is_killed
    assert setting.signalled(signal.SIGKILL) == {2}
    assert not setting.die(2, how=KILLED, at=[5])
    assert (setting.failed, setting.failures) == ([0, 1], [(0, False), (1, False)])
    assert setting.restarted == []
    assert setting.sentences.count("the models differ") == 1, "all workers have said it"


def test_a_restart_may_come_while_restarts_are_left(make):
    setting = make(begun=True, max_restarts=2)
    setting.step(1)
    assert (setting.supervisor.may_restart, setting.supervisor.all_train) == (True, False)
    setting.report(2, trains=True)
    assert (setting.supervisor.may_restart, setting.supervisor.all_train) == (True, True)
    setting.die(0, at=[3, 3 + FIRST_DELAY_S])
    assert not setting.supervisor.all_train  # its next life does not yet
    setting.report(4, trains=True)
    assert (setting.supervisor.may_restart, setting.supervisor.all_train) == (True, True)
    setting.die(0, at=[5])
    assert setting.supervisor.may_restart  # the last one is due
    setting.step(6)
    setting.report(7, trains=True)
    assert (setting.supervisor.may_restart, setting.supervisor.all_train) == (False, True)


@pytest.mark.parametrize("others_elsewhere", [False, True])
def test_one_worker_alone_has_nobody_to_join_after_a_restart(others_elsewhere):
    plan = plan_of(1, world_size=1 + others_elsewhere)
    assert Supervisor(plan, Scripted, max_restarts=9).may_restart == others_elsewhere


def test_no_restart_comes_while_workers_are_ended(make):
    setting = make(begun=True, max_restarts=2)
    setting.die(0, at=[1])
    setting.supervisor.end()
    assert setting.step(1.05, 2), "the others save"
    assert (setting.supervisor.may_restart, setting.restarted) == (False, [])


def test_after_the_run_began_the_others_go_on(make):
    setting = make(begun=True)
    assert setting.die(0, at=[1, 100])
    # Whatever the failed one left behind is killed.
    assert [worker.is_killed for worker in setting.made] == [True, False, False]
    assert not any(worker.signals for worker in setting.made)
    assert setting.failures == [(0, True)]
    assert not setting.die(1, 2, how=Ending(), at=[101])
    assert setting.failed == [0]


MISSED = f"worker 0 {CRASH.reason}: the run is complete without it"
WAITS = "the run is complete; waiting for worker 2 to end, unless Ctrl+C ends it"


def test_who_waits_for_a_restart_is_not_started_once_the_run_is_complete(make):
    setting = make(begun=True, max_restarts=5)
    setting.die(0, at=[1])
    assert setting.supervisor.may_restart
    assert setting.end_well(1, at=[1.05, 2, 11])  # worker 2 trains
    assert not setting.supervisor.may_restart
    assert setting.sentences == [MISSED]
    assert setting.step(11.1, 30)
    assert not setting.end_well(2, at=[31])
    assert (setting.restarted, setting.sentences, setting.failed) == ([], [MISSED, WAITS], [])


def test_who_is_back_when_the_run_is_complete_is_ended(make):
    setting = make(begun=True, max_restarts=5)
    setting.die(0, at=[1, 2])
    setting.end_well(1, 2, at=[3, 3.1])
    assert setting.workers[0].signals == [signal.SIGTERM]
    assert not setting.die(0, how=Ending(exit_reason(-signal.SIGTERM)), at=[4])
    assert setting.sentences[1:] == ["worker 0 is ended: the run is complete without it"]


@pytest.mark.parametrize(
    ("left", "has_it", "missed", "failed"),
    [(5, False, [MISSED], []), (0, False, [], [0]), (5, True, [], [0])],
)
def test_who_misses_the_end_is_no_failure_if_it_could_restart(make, left, has_it, missed, failed):
    setting = make(begun=True, max_restarts=left)
    setting.workers[0].report(consolidated=has_it)
    setting.end_well(1, 2, at=[0.5])
    assert not setting.die(0, at=[1])
    assert (setting.sentences, setting.failed, setting.restarted) == (missed, failed, [])


@pytest.mark.parametrize("some_end_well", [True, False])
def test_a_kill_of_our_own_is_a_failure_only_if_nobody_ends_well(make, some_end_well):
    setting = make(begun=True, faults="kill 1")
    setting.report(1, trains=True)
    setting.die(1, how=KILLED, at=[2])
    assert setting.failures == [(1, True)]
    assert not setting.die(0, 2, how=Ending() if some_end_well else CRASH, at=[3])
    assert [each.rank for each in setting.noted if each.is_injected] == [1]
    setting.supervisor.close()
    assert setting.failed == ([] if some_end_well else [1, 0, 2])


def test_a_stopped_worker_goes_on_before_it_is_ended(make):
    setting = make(begun=True, faults="stop 60s 1")
    setting.report(1, trains=True)
    setting.supervisor.end()
    setting.step(1.4)
    assert setting.workers[1].signals == [signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM]


def test_an_early_end_by_itself_does_not_complete_the_run(make):
    setting = make(begun=True, max_restarts=5)
    setting.workers[1].how = Ending()
    assert setting.die(0, at=[1, 2])
    assert setting.sentences == ["worker 0 is started again (restarts left: 4)"]


def test_who_writes_a_last_checkpoint_is_waited_for(make):
    setting = make(begun=True)
    setting.supervisor.end()
    setting.die(1, 2, how=KILLED)
    for second in range(0, 600, 20):  # it advances
        setting.workers[0].report(saves=True)
        assert setting.step(second, second + 19)
    assert not setting.workers[0].is_killed
    setting.workers[0].report(saved=(7, "ck"), unsaved="no room", saves=False)
    setting.step(600)
    assert not setting.workers[0].is_killed
    setting.step(600 + PATIENCE_S)
    assert setting.workers[0].is_killed
    assert setting.supervisor.saved == {0: (7, "ck")}
    assert setting.supervisor.unsaved == {0: "no room"}


def test_a_save_that_stands_still_is_not_waited_for(make):
    setting = make(begun=True)
    setting.workers[0].report(saves=True)
    setting.step(0)
    setting.supervisor.end(signal.SIGINT)
    sent = [worker.signals[-1] for worker in setting.workers.values()]
    assert sent == [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]
    assert "Ctrl+C now kills" in setting.sentences[0]
    setting.step(PATIENCE_S + 29)
    assert not setting.workers[0].is_killed
    assert setting.step(PATIENCE_S + 31), "its end is waited for"
    assert setting.workers[0].is_killed
    setting.die(0, how=KILLED, at=[PATIENCE_S + 32])
    assert 0 not in setting.running


def test_who_has_saved_since_the_end_has_only_the_time_to_end(make):
    """Of a replica only the first process says so, and another may still save."""
    for setting in (make(begun=True), replicas(make)):
        setting.report(0, begins=True, saves=True)
        setting.supervisor.end()
        setting.report(2, saved=(7, "ck"), saves=False)
        setting.step(1.9 + PATIENCE_S)
        assert not setting.workers[0].is_killed
        setting.step(2 + PATIENCE_S)
        assert setting.workers[0].is_killed == (len(setting.workers) == 3)
        setting.step(60)
        assert all(worker.is_killed for worker in setting.made)


def test_a_script_that_saves_by_itself_has_nearly_as_long_as_a_save_of_ours(make):
    """It handles SIGTERM, and reports nothing. A cluster kills the launcher after 30 s."""
    setting = make(begun=True)
    setting.step(0)
    setting.supervisor.end()
    setting.step(PATIENCE_S - 0.1)
    assert setting.sentences == []
    setting.die(2, how=Ending(), at=[PATIENCE_S, 29.9 - PATIENCE_S])
    who = "worker 0 and worker 1"
    assert setting.sentences == [f"waiting at most 27 s for {who} to end; Ctrl+C kills them"]
    assert not setting.workers[0].is_killed
    setting.step(30 - PATIENCE_S)
    assert setting.workers[0].is_killed


def test_no_save_is_promised_once_the_run_is_complete(make):
    setting = make(begun=True)
    setting.report(0, saves=True)
    setting.end_well(1, 2, at=[0])
    setting.supervisor.end(signal.SIGINT)
    setting.step(PATIENCE_S)
    assert setting.sentences == ["waiting at most 30 s for worker 0 to end; Ctrl+C kills it"]


def test_a_process_that_cannot_be_killed_is_given_up(make):
    setting = make()
    setting.supervisor.end()
    assert setting.step(PATIENCE_S + 1, PATIENCE_S + 0.9 + supervision.UNKILLABLE_S)
    assert not setting.step(PATIENCE_S + 1 + supervision.UNKILLABLE_S)


def test_identical_failures_are_described_once_and_the_first_life_first():
    lost = Ending("ended with exit code 1", "RendezvousError: no worker to join")
    assert supervision.describe([Failure(1, (KILLED, lost))]) == (
        "worker 1 died of signal 9 (SIGKILL); started again, it ended with exit code 1:\n"
        "RendezvousError: no worker to join"
    )
    assert supervision.describe([Failure(1, (CRASH, KILLED, lost))]).endswith("\nValueError: no")
    text = supervision.describe([Failure(2, (CRASH,)), Failure(0, (KILLED,)), Failure(1, (CRASH,))])
    assert text == (
        "workers 1, 2 ended with exit code 1:\nValueError: no\n\n"
        "worker 0 died of signal 9 (SIGKILL)"
    )
    both = [Failure(0, (KILLED,)), Failure(-2, (KILLED,))]
    assert supervision.describe(both).startswith("workers +1, 0 died of")


def test_the_one_that_died_is_started_again_and_no_other(make):
    setting = make(begun=True, max_restarts=2)
    assert setting.die(1, at=[10, 10.09])
    assert setting.restarted == []
    setting.step(10.1)
    assert setting.restarted == [(1, 10.1)]
    again = setting.workers[1].environment
    assert (again.rank, again.num_restarts, again.run_id) == (1, 1, "run")
    assert again.join == (("127.0.0.1", 1002), ("127.0.0.1", 1000))
    assert not setting.die(0, 1, 2, how=Ending(), at=[20])
    assert (setting.failed, setting.failures) == ([], [(1, True)])
    assert len(setting.restarted) == 1


def test_with_workers_elsewhere_the_last_one_here_joins_them(make):
    setting = make(max_restarts=6, plan=plan_of(3, world_size=6, first_rank=3, run_id=None))
    setting.report(begins=True, addresses=setting.addresses(6), run_id="theirs")
    assert setting.die(0, 1, 2, at=[10, 10.2])
    assert setting.restarted == [(rank, 10.2) for rank in range(3)]
    again = setting.workers[0].environment
    assert (again.rank, again.run_id, again.is_joining) == (3, "theirs", True)


def test_a_worker_that_cannot_be_started_again_ends_no_other(make):
    setting = make(begun=True, max_restarts=3)
    setting.num_start_failures = 2
    assert setting.die(0, at=[1.0, 1.15, 1.4, 2.0])
    # Each attempt is one of the restarts, later than the one before.
    assert setting.restarted == [(0, 1.15), (0, 1.4), (0, 2.0)]
    assert setting.running == {0, 1, 2}
    assert not any(worker.signals for worker in setting.made)
    assert setting.failed == []
    setting = make(begun=True, max_restarts=1)
    setting.num_start_failures = 9
    assert setting.die(0, at=[1.0, 2.0, 3.0])
    assert setting.running == {1, 2}
    (failure,) = setting.supervisor.failures
    assert failure.ending.reason.startswith("could not be started (OSError: [Errno 24] Too many")


def test_a_limit_of_descriptors_that_is_lowered_ends_no_worker(make, monkeypatch):
    """poll(2) takes no more descriptors than the limit says."""
    setting, slept = make(begun=True, max_restarts=3), list[float]()
    refused = Mock(side_effect=OSError(errno.EINVAL, os.strerror(errno.EINVAL)))
    monkeypatch.setattr("multiprocessing.connection.wait", refused)
    monkeypatch.setattr(supervision, "time", SimpleNamespace(sleep=slept.append))
    assert setting.die(0, at=[1.0, 1.2])
    assert (setting.restarted, setting.running) == ([(0, 1.2)], {0, 1, 2})
    assert [setting.supervisor.step(0.02), setting.supervisor.step(60.0)] == [True, True]
    assert slept[-2:] == [0.02, supervision.POLL_S], "it takes no core meanwhile"


def test_the_delay_doubles_with_each_life_without_a_step_up_to_its_cap(make):
    setting = make(begun=True, max_restarts=99)

    def delay(local_rank: int) -> float:
        """Return the delay of the next restart, after a life of one second."""
        setting.die(local_rank)
        died_at = now = setting.now + 1.0
        setting.step(died_at)
        before = len(setting.restarted)
        while len(setting.restarted) == before:
            now += 0.05
            setting.step(now)
        return now - died_at

    expected = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *3 * [supervision.MAX_DELAY_S]]
    assert [delay(0) for _ in range(10)] == pytest.approx(expected, abs=0.06)
    assert delay(1) == pytest.approx(0.1, abs=0.06)  # each worker has its own
    assert setting.workers[0].environment.num_restarts == 10
    setting.workers[0].report(trains=True)
    assert [delay(0), delay(0)] == pytest.approx([0.1, 0.2], abs=0.06)
    setting.workers[0].report(trains=True)
    setting.num_start_failures = 1
    assert delay(0) == pytest.approx(0.1, abs=0.06)
    failed_at = setting.now  # nor has a start that failed made a step
    setting.step(failed_at + 0.15, failed_at + 0.25)
    assert setting.restarted[-1] == (0, failed_at + 0.25)


@pytest.mark.parametrize("killed", [(0, 1), (1, 0)])
def test_who_joins_reads_the_newest_addresses_at_any_time(make, killed):
    """The second one that was killed finds the next life of the first, though 2 is of no help."""
    setting = make(begun=True, max_restarts=2)
    for rank in killed:
        setting.die(rank, at=[setting.now + 1, setting.now + 1 + FIRST_DELAY_S])
    first, second = (setting.workers[rank] for rank in killed)
    newest = ("127.0.0.1", 2000)
    assert newest not in second.environment.addresses_to_join()
    first.report(begins=True, addresses={killed[0]: newest, 2: ("127.0.0.1", 1002)})
    setting.step(setting.now + 1)
    own, others = ("127.0.0.1", 1000 + killed[1]), second.environment.addresses_to_join()
    assert newest in others
    assert own not in others
    assert newest not in first.environment.addresses_to_join()


def saving(make: Make, max_restarts: int, checkpoints: tuple[str, bool] | None) -> Setting:
    """Return three workers of one host that have begun, and have said where they save."""
    setting = make(begun=True, max_restarts=max_restarts, plan=LaunchPlan.on_hosts(3))
    setting.report(checkpoints=checkpoints)
    return setting


def test_when_the_last_that_trains_dies_all_are_started_again(make):
    setting = saving(make, 3, ("ck", True))
    before = setting.workers[0].environment
    setting.die(0, at=[1, 2])
    joining = setting.workers[0]
    setting.die(1, 2, at=[3])
    assert joining.is_killed, "nobody is left whom it could join"
    joining.how = KILLED
    setting.step(4)
    assert setting.restarted == [(0, 2), (0, 4), (1, 4), (2, 4)]
    again = [setting.workers[rank].environment for rank in range(3)]
    assert [(each.rank, each.restart_count, each.is_joining) for each in again] == [
        (rank, 1, False) for rank in range(3)
    ]
    assert again[0] == replace(before, restart_count=1, store_port=again[0].store_port)
    assert again[0].store_port != before.store_port
    setting.workers[0].report(begins=True)
    setting.die(1, at=[5])  # before all have begun again: all are started again
    setting.die(0, 2, how=KILLED, at=[6])
    assert [each.environment.restart_count for each in setting.workers.values()] == [2, 2, 2]
    said = "no worker is left: all are started again (restarts left: "
    assert setting.sentences[1:] == [f"{said}1)", f"{said}0)"], "two deaths were one restart"
    assert ([rank for rank, _ in setting.failures], setting.failed) == ([0, 1, 2, 1], [])
    setting.die(0, at=[7, 7 + GRACE_S])
    assert (setting.failed, setting.signalled(signal.SIGTERM)) == ([0], {1, 2})


def test_without_restarts_the_one_that_joins_is_left_alone(make):
    """It may have all that it needs to go on."""
    setting = saving(make, 1, ("ck", True))
    setting.die(0, at=[1, 2])
    assert setting.die(1, 2, at=[3, 4])
    assert not setting.workers[0].is_killed


def test_one_that_ends_before_it_takes_part_does_not_end_the_run(make):
    """It was started again, and told that it is not needed any more."""
    setting = saving(make, 9, ("ck", True))
    setting.die(0, at=[1, 2])
    setting.die(0, how=Ending(), at=[3])
    setting.die(1, 2, at=[4, 5])
    assert setting.restarted == [(0, 2), (0, 5), (1, 5), (2, 5)]


@pytest.mark.parametrize("lives", [True, False])
def test_a_worker_that_has_joined_the_run_is_one_to_join(make, lives):
    setting = saving(make, 3, ("ck", True))
    setting.workers[0].report(addresses=setting.addresses(4))
    setting.step(1)
    setting.workers[1].report(addresses=setting.addresses(4 if lives else 3))
    setting.step(2)
    setting.die(0, 1, 2, at=[3, 4])
    assert setting.restarted == [(rank, 4) for rank in range(3)]
    again = [setting.workers[rank].environment for rank in range(3)]
    assert [each.is_joining for each in again] == [lives] * 3
    assert (("127.0.0.1", 1003) in again[0].join) == lives


def test_who_is_held_back_does_not_shorten_the_wait(make, monkeypatch):
    waits_s: list[float] = []
    setting = saving(make, 9, ("ck", True))
    setting.die(0, at=[1, 2])
    setting.workers[0].report(begins=True)
    setting.step(3)
    setting.die(0, 1, 2, at=[4, 4 + 1.5 * FIRST_DELAY_S])  # 0 has twice the delay
    monkeypatch.setattr("multiprocessing.connection.wait", lambda _, s: waits_s.append(s))
    setting.supervisor.step(1.0)
    assert waits_s == [pytest.approx(FIRST_DELAY_S / 2)]


@pytest.mark.parametrize("numbers", [2 * [signal.SIGTERM], [signal.SIGHUP, signal.SIGINT]])
def test_a_signal_that_ends_the_workers_too_makes_no_failure(make, monkeypatch, numbers):
    """It comes to the process, and to its group; but a Ctrl+C after it kills."""
    setting = make()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in set(numbers)}

    def wait(*_: object) -> None:
        for worker in setting.workers.values():
            worker.how = Ending(exit_reason(-numbers[0]))
            worker.report(saves=True)
        if not setting.supervisor.ending:
            for number in numbers:
                signal.raise_signal(number)

    monkeypatch.setattr("multiprocessing.connection.wait", wait)
    try:
        assert setting.supervisor.run() == numbers[0]
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_DFL}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert setting.signalled(signal.SIGTERM) == {0, 1, 2}
    assert setting.signalled(signal.SIGKILL) == ({0, 1, 2} if signal.SIGINT in numbers else set())
    assert setting.failures == []


def test_an_error_ends_a_run_whose_workers_all_wait_for_their_next_life(make):
    setting = make(max_restarts=3, plan=LaunchPlan.on_hosts(3))

    def look() -> None:
        if setting.failures:
            setting.now += 1.0  # they are due
            raise TimeoutError
        setting.report(begins=True, checkpoints=("ck", True))
        setting.die(0, 1, 2)

    with pytest.raises(TimeoutError):
        setting.supervisor.run(look)
    assert (setting.failed, setting.restarted) == ([0, 1, 2], [(rank, 0.0) for rank in range(3)])


@pytest.mark.parametrize(
    ("checkpoints", "others"),
    [(None, Ending()), (None, CRASH), (("ck", False), CRASH), (("ck", True), Ending())],
)
def test_the_dead_do_not_come_back_to_a_run_that_is_over(
    make, tmp_path, monkeypatch, checkpoints, others
):
    """It is over if one ended well, or if it does not resume by itself."""
    monkeypatch.chdir(tmp_path)
    files = [Path("ck") / f"worker-{rank}" / "step-00000004.safetensors" for rank in range(2)]
    for at_s, path in enumerate(files):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (at_s, at_s))
    setting = saving(make, 9, checkpoints)
    setting.die(0)
    assert not setting.die(1, 2, how=others, at=[10])
    assert (setting.restarted, setting.sentences) == ([], [])
    assert setting.failed == ([0] if others == Ending() else [0, 1, 2])
    lost = "no checkpoint was saved" if checkpoints is None else f"after {files[1]} is lost"
    assert (lost in setting.supervisor.loss) == (others == CRASH)


@pytest.mark.parametrize("joins", [True, False])
def test_while_nobody_trains_nobody_is_started_again(make, joins):
    """The last one that trained dies when another joins, and may have given it its state."""
    setting = make(begun=True, max_restarts=9)
    setting.die(0, at=[1, 2])
    setting.die(1, 2, at=[3, 4])
    assert setting.restarted == [(0, 2)]
    setting.workers[0].report(begins=True) if joins else setting.die(0)
    assert setting.step(5) == joins
    assert setting.restarted == [(0, 2), *([(1, 5), (2, 5)] if joins else [])]


def replicas(make: Make, plan: LaunchPlan | None = None) -> Setting:
    """Return two replicas of two processes; number 2 is the first process of the second one."""
    return make(max_restarts=9, plan=plan or plan_of(2, join_infos=[JoinInfo(), JoinInfo()]))


def test_each_process_of_a_replica_has_its_shard_and_its_replica(make):
    processes = replicas(make).made
    own = [process.variables for process in processes]
    assert [each["RANK"] for each in own] == ["0", "1"] * 2
    assert {each["WORLD_SIZE"] for each in own} == {"2"}
    assert [each["LOCAL_RANK"] for each in own] == ["0", "1", "2", "3"]
    assert {each["LOCAL_WORLD_SIZE"] for each in own} == {"4"}
    # A world of its own for each replica.
    ports = [each["MASTER_PORT"] for each in own]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    environments = [process.environment for process in processes]
    assert [(each.rank, each.shard) for each in environments] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for each in environments:
        assert (each.world_size, each.num_shards, each.local_world_size) == (2, 2, 2)
        assert (each.store_host, each.store_port, each.hosts_store) == ("127.0.0.1", 9, False)


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("signals", [[], [signal.SIGSTOP, signal.SIGCONT], [signal.SIGTERM]])
def test_the_death_of_one_process_ends_the_others_unless_all_were_to_end(make, signals, dead):
    """Who is asked to end has the time to save; who was stopped for a while was not asked."""
    setting = replicas(make)
    replica, processes = setting.supervisor.workers[1], [setting.workers[n] for n in (2, 3)]
    for number in signals:
        replica.send(number)
    assert [process.signals for process in processes] == [signals] * 2
    processes[dead].how = CRASH
    assert replica.poll() is None
    assert processes[1 - dead].is_killed == (signal.SIGTERM not in signals)
    processes[1 - dead].how = KILLED
    reason = f"lost its process {dead}, which ended with exit code 1"
    assert replica.poll() == Ending(reason, CRASH.details)
    replica.kill_group()
    assert all(process.is_killed for process in processes), "with what they left behind"


def test_a_replica_begins_when_all_of_its_processes_do(make):
    setting = replicas(make)
    replica, first, second = setting.supervisor.workers[0], setting.workers[0], setting.workers[1]
    first.report(begins=True, trains=True, saves=True, says="do this")
    second.report(saves=False, says="do this")  # the first one says when none saves any more
    setting.step(1)
    assert (replica.takes_part, replica.trains, replica.saves) == (False, True, True)
    assert setting.sentences == ["do this"]
    second.report(begins=True, unsaved="no room", says="do that")
    setting.step(2)
    assert replica.takes_part
    assert setting.sentences == ["do this", "do that"], "each once"
    assert setting.supervisor.unsaved == {0: "no room"}


def start_again(setting: Setting) -> list[Environment]:
    """Let the second replica die and start again; return what its processes know then."""
    setting.die(2, 3, how=KILLED, at=[2, 2 + FIRST_DELAY_S])
    return [setting.workers[number].environment for number in (2, 3)]


def test_who_comes_back_joins_the_network_of_its_own_shard(make):
    setting = replicas(make)
    for number, process in setting.workers.items():
        shard = number % 2
        addresses = {rank: ("10.0.0.1", 100 * (shard + 1) + rank) for rank in range(2)}
        secret = f"{shard}" * 16
        process.report(begins=True, addresses=addresses, run_id=f"run-{shard}", secret=secret)
    setting.step(1)
    for shard, environment in enumerate(start_again(setting)):
        assert environment.join == (("10.0.0.1", 100 * (shard + 1)),)
        assert environment.run_id == f"run-{shard}"
        assert environment.secret == f"{shard}".encode() * 16
        assert (environment.rank, environment.shard, environment.num_restarts) == (1, shard, 1)


def test_a_new_replica_joins_the_networks_that_its_user_names(make):
    infos = [JoinInfo(f"run-{shard}", join=(("10.0.0.1", 100 + shard),)) for shard in range(2)]
    setting = replicas(make, LaunchPlan(2, secret="s" * 16, join_infos=infos))
    for number, process in setting.workers.items():
        environment, shard = process.environment, number % 2
        assert (environment.needs_rank, environment.is_joining) == (True, True)
        assert (environment.shard, environment.num_shards) == (shard, 2)
        assert environment.local_rank == number
        assert environment.join == (("10.0.0.1", 100 + shard),)
        assert environment.run_id == f"run-{shard}"
        # The network has no store; the replica's own world has one.
        assert environment.store_host is None
        assert process.variables["MASTER_ADDR"] == "127.0.0.1"
        assert process.variables["RANK"] == str(shard)
        assert process.variables["GOSSIPDP_WORLD_SIZE"] == "0"  # it tells that this is a replica's
        process.report(begins=True, rank=4 + number // 2)
    setting.step(1)
    again = start_again(setting)[1]  # it comes back under the rank that it was given
    assert setting.failures == [(5, True)]
    assert [each.process_id for each in setting.noted] == [setting.made[2].pid]
    assert (again.rank, again.num_restarts, again.join) == (5, 1, (("10.0.0.1", 101),))


def test_where_one_process_cannot_be_started_none_is_left(make):
    setting, worker = replicas(make), SupervisedWorker(0, 0)
    first = Scripted({"LOCAL_RANK": "0"})
    start_process = Mock(side_effect=[first, OSError("no process left")])
    with pytest.raises(OSError, match="no process left"):
        worker.start(setting.plan, start_process, rejoins=False)
    assert first.is_killed
    assert (worker.runs, worker.takes_part) == (False, False)
