"""Who is ended, who goes on and who is started again: by the clock of the test."""

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping

import pytest

from gossipdp.launcher.environment import Environment
from gossipdp.launcher.joining import JoinInfo
from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.reports import Report, report_variables, send_report
from gossipdp.launcher.supervisor import (
    GRACE_S,
    MAX_DELAY_S,
    PATIENCE_S,
    UNKILLABLE_S,
    Ending,
    Failure,
    Supervisor,
    WorkerProcess,
    describe,
    exit_reason,
)


class Scripted(WorkerProcess):
    """A worker without a process, which ends when the test says; its process id is its rank + 1."""

    def __init__(self, local_rank: int, variables: Mapping[str, str]) -> None:
        super().__init__()
        self.pid, self.variables = local_rank + 1, variables
        self.how: Ending | None = None

    def waits_for(self) -> list[object]:
        return []

    def poll(self) -> Ending | None:
        return self.how

    def report(self, report: Report) -> None:
        assert send_report(report, report_variables(self.reports.sender))


class Setting:
    """Three workers, a clock, and what was sent to whom."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        begun: bool = False,
        max_restarts: int = 0,
        plan: LaunchPlan | None = None,
    ) -> None:
        self.now = 0.0
        self.sent: list[tuple[int, int]] = []
        self.told: list[tuple[int, bool]] = []
        self.restarted: list[tuple[int, float]] = []
        self.num_start_failures = 0
        monkeypatch.setattr("os.kill", lambda pid, number: self.sent.append((pid, number)))
        monkeypatch.setattr("os.killpg", lambda pid, number: self.sent.append((-pid, number)))
        self.plan = plan or LaunchPlan(
            3, 3, 0, store=("127.0.0.1", 9), run_id="run", secret="s" * 16
        )
        self.supervisor = Supervisor(
            self.plan,
            self.start,
            max_restarts=max_restarts,
            on_failure=lambda failure, go_on: self.told.append((failure.rank, go_on)),
            clock=lambda: self.now,
        )
        self.workers: dict[int, Scripted] = {}
        self.made: list[Scripted] = []
        for local_rank in range(3):
            self.supervisor._start(local_rank, self.plan.worker_variables(local_rank))
        self.restarted.clear()
        if begun:
            self.begin()

    def start(self, variables: Mapping[str, str]) -> Scripted:
        local_rank = int(variables["LOCAL_RANK"])
        self.restarted.append((local_rank, self.now))
        if self.num_start_failures:
            self.num_start_failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.workers[local_rank] = Scripted(local_rank, variables)
        self.made.append(self.workers[local_rank])
        return self.workers[local_rank]

    def begin(self) -> None:
        addresses = {rank: ("127.0.0.1", 1000 + rank) for rank in range(3)}
        for worker in self.workers.values():
            worker.report(Report(begins=True, addresses=addresses))

    def step(self, now: float) -> bool:
        self.now = now
        return self.supervisor.step(0)

    def signalled(self, number: int) -> set[int]:
        return {pid for pid, sent in self.sent if sent == number}

    def close(self) -> None:
        for worker in self.made:
            worker.close()


Make = Callable[..., Setting]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(begun=False, ...)``: a setting, whose channels are closed at the end."""
    made: list[Setting] = []

    def setting(**options: object) -> Setting:
        made.append(Setting(monkeypatch, **options))
        return made[-1]

    yield setting
    for each in made:
        each.close()


CRASH = Ending("ended with exit code 1", "ValueError: no")


def test_all_ending_well_is_no_failure(make: Make) -> None:
    setting = make()
    for worker in setting.workers.values():
        assert setting.step(1)
        worker.how = Ending()
    assert not setting.step(2)
    assert setting.supervisor.failures == []
    assert setting.sent == []


def test_a_failure_before_the_run_began_ends_the_others(make: Make) -> None:
    setting = make(max_restarts=9)
    setting.workers[0].how = CRASH
    assert setting.step(1)
    assert setting.signalled(signal.SIGTERM) == set()
    setting.workers[1].how = CRASH  # in the grace: for the same reason
    setting.step(1 + GRACE_S / 2)
    setting.step(1 + GRACE_S)
    assert setting.signalled(signal.SIGTERM) == {3}
    setting.step(1 + GRACE_S + PATIENCE_S)
    assert 3 in setting.signalled(signal.SIGKILL)
    setting.workers[2].how = Ending("died of signal 9 (SIGKILL)")
    assert not setting.step(5)
    assert [failure.rank for failure in setting.supervisor.failures] == [0, 1]
    assert setting.told == [(0, False), (1, False)]
    assert setting.restarted == []


def test_after_the_run_began_the_others_go_on(make: Make) -> None:
    setting = make(begun=True)
    setting.workers[0].how = CRASH
    assert setting.step(1)
    assert setting.step(100)
    assert setting.sent == [(-1, signal.SIGKILL)]  # what the failed one left behind
    assert setting.told == [(0, True)]


def test_ending_twice_kills_at_once(make: Make) -> None:
    setting = make()
    setting.supervisor.end(signal.SIGINT)
    assert setting.sent == [(pid, signal.SIGINT) for pid in (1, 2, 3)]
    setting.supervisor.end(signal.SIGINT)
    assert setting.signalled(signal.SIGKILL) == {1, 2, 3, -1, -2, -3}


def test_a_process_that_cannot_be_killed_is_given_up(make: Make) -> None:
    setting = make()
    setting.supervisor.end(signal.SIGTERM)
    assert setting.step(PATIENCE_S + 1)
    assert not setting.step(PATIENCE_S + UNKILLABLE_S)


def test_identical_failures_are_described_once() -> None:
    other = Ending(exit_reason(-9))
    text = describe([Failure(2, CRASH), Failure(0, other), Failure(1, CRASH)])
    assert text == (
        "workers 1, 2 ended with exit code 1:\nValueError: no\n\n"
        "worker 0 died of signal 9 (SIGKILL)"
    )
    assert describe([Failure(0, other), Failure(-2, other)]).startswith("workers +1, 0 died of")


def test_the_one_that_died_is_started_again_and_no_other(make: Make) -> None:
    setting = make(begun=True, max_restarts=2)
    setting.workers[1].how = CRASH
    assert setting.step(10)
    setting.step(10.09)
    assert setting.restarted == []
    setting.step(10.1)
    assert setting.restarted == [(1, 10.1)]
    again = Environment.read(setting.workers[1].variables)
    assert (again.rank, again.num_restarts, again.run_id) == (1, 1, "run")
    assert again.join == (("127.0.0.1", 1002), ("127.0.0.1", 1000))
    for worker in setting.workers.values():
        worker.how = Ending()
    assert not setting.step(20)
    assert setting.supervisor.failures == []
    assert setting.told == [(1, True)]
    assert len(setting.restarted) == 1


def test_without_a_restart_left_it_is_a_failure(make: Make) -> None:
    setting = make(begun=True, max_restarts=1)
    for now in (10.0, 20.0):
        setting.workers[1].how = CRASH
        setting.step(now)
        setting.step(now + 1)
    assert [rank for rank, _ in setting.restarted] == [1]
    assert [failure.rank for failure in setting.supervisor.failures] == [1]
    assert setting.supervisor.running.keys() == {0, 2}


@pytest.mark.parametrize("others", [Ending(), CRASH])
def test_the_dead_do_not_come_back_to_a_run_that_is_over(make: Make, others: Ending) -> None:
    setting = make(begun=True, max_restarts=6)
    setting.workers[0].how = CRASH
    setting.workers[1].how = setting.workers[2].how = others
    assert not setting.step(10)
    assert setting.restarted == []
    failed = [failure.rank for failure in setting.supervisor.failures]
    assert failed == ([0] if others == Ending() else [0, 1, 2])


def test_with_workers_elsewhere_the_last_one_here_joins_them(make: Make) -> None:
    plan = LaunchPlan(3, 6, 3, store=("127.0.0.1", 9), secret="s" * 16)
    setting = make(max_restarts=6, plan=plan)
    addresses = {rank: ("127.0.0.1", 1000 + rank) for rank in range(6)}
    for worker in setting.workers.values():
        worker.report(Report(begins=True, addresses=addresses, run_id="theirs"))
    for worker in setting.workers.values():
        worker.how = CRASH
    assert setting.step(10)
    setting.step(10.2)
    assert setting.restarted == [(rank, 10.2) for rank in range(3)]
    again = Environment.read(setting.workers[0].variables)
    assert (again.rank, again.run_id, again.is_joining) == (3, "theirs", True)


def test_a_joiner_keeps_the_rank_that_it_was_given(make: Make) -> None:
    plan = LaunchPlan(3, secret="s" * 16, join_infos=[JoinInfo("run", join=(("10.0.0.1", 4),))])
    setting = make(max_restarts=6, plan=plan)
    assert Environment.read(setting.workers[0].variables).needs_rank
    for rank, worker in setting.workers.items():
        worker.report(Report(begins=True, rank=7 + rank))
    setting.workers[1].how = CRASH
    setting.step(10)
    setting.step(10.2)
    assert setting.told == [(8, True)]
    again = Environment.read(setting.workers[1].variables)
    assert (again.rank, again.join) == (8, (("10.0.0.1", 4),))


def test_who_waits_for_a_restart_when_all_end_stays_away(make: Make) -> None:
    setting = make(begun=True, max_restarts=6)
    setting.workers[0].how = CRASH
    setting.step(10)
    setting.supervisor.end(signal.SIGINT)
    setting.workers[1].how = setting.workers[2].how = Ending("was told to")
    assert not setting.step(20)
    assert setting.restarted == []


def test_a_worker_that_cannot_be_started_again_ends_no_other(make: Make) -> None:
    setting = make(begun=True, max_restarts=3)
    setting.num_start_failures = 2
    setting.workers[0].how = CRASH
    for now in (1.0, 1.15, 1.4, 2.0):
        assert setting.step(now)
    # Each attempt is one of the restarts, later than the one before.
    assert setting.restarted == [(0, 1.15), (0, 1.4), (0, 2.0)]
    assert setting.supervisor.running.keys() == {0, 1, 2}
    assert setting.signalled(signal.SIGTERM) | setting.signalled(signal.SIGKILL) == {-1}
    assert setting.supervisor.failures == []


def test_a_limit_of_descriptors_that_is_lowered_ends_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """poll(2) takes no more descriptors than the limit says."""

    def wait(things: list[object], timeout_s: float) -> list[object]:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    setting = make(begun=True, max_restarts=3)
    monkeypatch.setattr("multiprocessing.connection.wait", wait)
    setting.workers[0].how = CRASH
    assert setting.step(1.0)
    assert setting.step(1.2)
    assert setting.restarted == [(0, 1.2)]
    assert setting.supervisor.running.keys() == {0, 1, 2}


def test_one_that_can_never_be_started_is_a_failure(make: Make) -> None:
    setting = make(begun=True, max_restarts=1)
    setting.num_start_failures = 9
    setting.workers[0].how = CRASH
    for now in (1.0, 2.0, 3.0):
        assert setting.step(now)
    assert setting.supervisor.running.keys() == {1, 2}
    (failure,) = setting.supervisor.failures
    assert failure.ending.reason == (
        "could not be started (OSError: [Errno 24] Too many open files)"
    )


def test_the_delay_doubles_up_to_its_cap_and_each_worker_has_its_own(make: Make) -> None:
    setting = make(begun=True, max_restarts=99)

    def delay(local_rank: int) -> float:
        """Of the next restart, after a life of one second."""
        setting.workers[local_rank].how = CRASH
        died_at = setting.now + 1.0
        setting.step(died_at)
        before, now = len(setting.restarted), died_at
        while len(setting.restarted) == before:
            now += 0.05
            setting.step(now)
        return now - died_at

    delays = [delay(0) for _ in range(10)]
    assert delays == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *3 * [MAX_DELAY_S]], abs=0.06
    )
    assert delay(1) == pytest.approx(0.1, abs=0.06)
    assert Environment.read(setting.workers[0].variables).num_restarts == 10


def test_the_budget_is_common_to_all_workers(make: Make) -> None:
    setting = make(begun=True, max_restarts=2)
    for worker in setting.workers.values():
        worker.how = CRASH
        setting.step(1.0)
        setting.step(2.0)
    assert [rank for rank, _ in setting.restarted] == [0, 1]
    assert [failure.rank for failure in setting.supervisor.failures] == [2]
