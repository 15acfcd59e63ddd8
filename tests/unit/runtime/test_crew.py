import errno
import os
import signal

import pytest

from gossipdp.runtime.crew import (
    GRACE_S,
    PATIENCE_S,
    Crew,
    Ending,
    Failure,
    WorkerProcess,
    describe,
    exit_reason,
)
from gossipdp.runtime.restarts import Restarts


class Scripted(WorkerProcess):
    """A worker without a process, which ends when the test says."""

    def __init__(self, rank: int, sent: list[tuple[int, int]]) -> None:
        self.rank = rank
        self.pid = rank
        self.how: Ending | None = None
        self.sent = sent

    def ending(self) -> Ending | None:
        return self.how


class Setting:
    """Three workers, a clock, and what was sent to whom."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        begun: bool = False,
        max_restarts: int = 0,
        others_elsewhere: bool = False,
    ) -> None:
        self.now = 0.0
        self.sent: list[tuple[int, int]] = []
        self.told: list[tuple[int, bool]] = []
        monkeypatch.setattr("os.kill", lambda pid, number: self.sent.append((pid, number)))
        monkeypatch.setattr("os.killpg", lambda pid, number: self.sent.append((-pid, number)))
        self.workers = [Scripted(rank, self.sent) for rank in (1, 2, 3)]
        self.begun = begun
        self.restarted: list[tuple[int, bool, float]] = []
        self.num_start_failures = 0
        self.crew = Crew(
            lambda: self.begun,
            on_failure=lambda failure, go_on: self.told.append((failure.rank, go_on)),
            restarts=Restarts(max_restarts),
            start_again=self.start_again,
            others_elsewhere=others_elsewhere,
            clock=lambda: self.now,
        )
        for worker in self.workers:
            self.crew.add(worker)

    def start_again(self, rank: int, anew: bool) -> Scripted:
        self.restarted.append((rank, anew, self.now))
        if self.num_start_failures:
            self.num_start_failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.workers[rank - 1] = Scripted(rank, self.sent)
        return self.workers[rank - 1]

    def watch(self, now: float) -> bool:
        self.now = now
        return self.crew.watch()

    def signalled(self, number: int) -> set[int]:
        return {pid for pid, sent in self.sent if sent == number}


CRASH = Ending(True, "ended with exit code 1", "ValueError: no")


def test_all_ending_well_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    for worker in setting.workers:
        assert setting.watch(1)
        worker.how = Ending(False)
    assert not setting.watch(2)
    assert setting.crew.failures == []
    assert setting.sent == []


def test_a_failure_before_the_run_began_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.workers[0].how = CRASH
    assert setting.watch(1)
    assert setting.signalled(signal.SIGTERM) == set()
    setting.workers[1].how = CRASH  # in the grace: for the same reason
    setting.watch(1 + GRACE_S / 2)
    setting.watch(1 + GRACE_S)
    assert setting.signalled(signal.SIGTERM) == {3}
    setting.watch(1 + GRACE_S + PATIENCE_S)
    assert 3 in setting.signalled(signal.SIGKILL)
    setting.workers[2].how = Ending(True, "died of signal 9 (SIGKILL)")
    assert not setting.watch(5)
    assert [failure.rank for failure in setting.crew.failures] == [1, 2]
    assert setting.told == [(1, False), (2, False)]


def test_after_the_run_began_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, begun=True)
    setting.workers[0].how = CRASH
    assert setting.watch(1)
    assert setting.watch(100)
    assert setting.sent == [(-1, signal.SIGKILL)]  # what the failed one left behind
    assert setting.told == [(1, True)]


def test_ending_twice_kills_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.crew.end(signal.SIGINT)
    assert setting.sent == [(rank, signal.SIGINT) for rank in (1, 2, 3)]
    setting.crew.end(signal.SIGINT)
    assert setting.signalled(signal.SIGKILL) == {1, 2, 3, -1, -2, -3}


def test_identical_failures_are_described_once() -> None:
    other = Ending(True, exit_reason(-9))
    text = describe([Failure(2, CRASH), Failure(0, other), Failure(1, CRASH)])
    assert text == (
        "workers 1, 2 ended with exit code 1:\nValueError: no\n\n"
        "worker 0 died of signal 9 (SIGKILL)"
    )
    assert describe([Failure(0, other), Failure(3, other)]).startswith(
        "workers 0, 3 died of signal 9"
    )


def test_the_one_that_died_is_started_again_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=2)
    setting.workers[1].how = CRASH
    assert setting.watch(10)
    assert setting.crew.next_restart_in_s() == pytest.approx(0.1)
    setting.watch(10.09)
    assert setting.restarted == []
    setting.watch(10.1)
    assert setting.restarted == [(2, False, 10.1)]
    assert setting.crew.next_restart_in_s() is None
    for worker in setting.workers:
        worker.how = Ending(False)
    assert not setting.watch(20)
    assert setting.crew.failures == []
    assert setting.told == [(2, True)]
    assert len(setting.restarted) == 1


def test_without_a_restart_left_it_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=1)
    for now in (10.0, 20.0):
        setting.workers[1].how = CRASH
        setting.watch(now)
        setting.watch(now + 1)
    assert [rank for rank, *_ in setting.restarted] == [2]
    assert [failure.rank for failure in setting.crew.failures] == [2]
    assert setting.crew.running.keys() == {1, 3}


def test_before_the_run_began_nobody_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, max_restarts=9)
    setting.workers[0].how = CRASH
    setting.watch(1)
    setting.watch(1 + GRACE_S)
    assert setting.signalled(signal.SIGTERM) == {2, 3}
    assert setting.restarted == []


def test_when_none_is_left_all_meet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=6)
    setting.workers[0].how = CRASH
    setting.watch(10)
    for worker in setting.workers:
        worker.how = CRASH
    setting.watch(10.05)
    setting.begun = False
    setting.watch(10.1)
    assert setting.restarted == [(1, True, 10.1), (2, True, 10.1), (3, True, 10.1)]
    # ... and until they have, a failure ends the others once more.
    setting.workers[0].how = CRASH
    setting.watch(11)
    setting.watch(12)
    assert setting.signalled(signal.SIGTERM) == {2, 3}


def test_the_dead_do_not_come_back_to_a_run_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=6)
    setting.workers[0].how = CRASH
    setting.workers[1].how = setting.workers[2].how = Ending(False)
    assert not setting.watch(10)
    assert setting.restarted == []
    assert [failure.restart_in_s for failure in setting.crew.failures] == [None]


def test_too_few_to_meet_anew_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=2)
    for worker in setting.workers:
        worker.how = CRASH
    assert not setting.watch(10)
    assert {failure.rank for failure in setting.crew.failures} == {1, 2, 3}


def test_with_workers_elsewhere_the_last_one_here_joins_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=6, others_elsewhere=True)
    for worker in setting.workers:
        worker.how = CRASH
    assert setting.watch(10)
    setting.watch(10.2)
    assert setting.restarted == [(rank, False, 10.2) for rank in (1, 2, 3)]


def test_who_waits_for_a_restart_when_all_end_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=6)
    setting.workers[0].how = CRASH
    setting.watch(10)
    setting.crew.end(signal.SIGINT)
    setting.workers[1].how = setting.workers[2].how = Ending(True, "was told to")
    assert not setting.watch(20)
    assert setting.restarted == []


def test_a_worker_that_cannot_be_started_again_ends_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=3)
    setting.num_start_failures = 2
    setting.workers[0].how = CRASH
    for now in (1.0, 1.15, 1.4, 2.0):
        assert setting.watch(now)
    # Each attempt is one of the restarts, later than the one before.
    assert setting.restarted == [(1, False, 1.15), (1, False, 1.4), (1, False, 2.0)]
    assert setting.crew.running.keys() == {1, 2, 3}
    assert setting.signalled(signal.SIGTERM) | setting.signalled(signal.SIGKILL) == {-1}
    assert setting.crew.failures == []


def test_one_that_can_never_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch, begun=True, max_restarts=1)
    setting.num_start_failures = 9
    setting.workers[0].how = CRASH
    for now in (1.0, 2.0, 3.0):
        assert setting.watch(now)
    assert setting.crew.running.keys() == {2, 3}
    (failure,) = setting.crew.failures
    assert failure.ending.reason == (
        "could not be started (OSError: [Errno 24] Too many open files)"
    )
