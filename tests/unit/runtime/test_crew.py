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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begun: bool = False) -> None:
        self.now = 0.0
        self.sent: list[tuple[int, int]] = []
        self.told: list[tuple[int, bool]] = []
        monkeypatch.setattr("os.kill", lambda pid, number: self.sent.append((pid, number)))
        monkeypatch.setattr("os.killpg", lambda pid, number: self.sent.append((-pid, number)))
        self.workers = [Scripted(rank, self.sent) for rank in (1, 2, 3)]
        self.crew = Crew(
            self.workers,
            lambda: begun,
            on_failure=lambda failure, go_on: self.told.append((failure.rank, go_on)),
            clock=lambda: self.now,
        )

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
    setting.workers[2].how = Ending(True, "was killed by signal 9 (SIGKILL)")
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
        "worker 0 was killed by signal 9 (SIGKILL)"
    )
