"""What the training thread may know of the gossip thread's work."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from gossipdp.gossip import thread as threads
from gossipdp.gossip.thread import GossipThread

LONG_S = 30.0


@pytest.mark.parametrize(
    ("wake_at_step", "behind"),
    [(math.inf, 0), (7.5, 0), (5.0, 0), (4.9, 1), (4.0, 1), (2.3, 3), (-1.0, 6)],
)
def test_steps_since_a_tick_came_due_are_counted(wake_at_step: float, behind: int) -> None:
    woken: list[int] = []
    loop = SimpleNamespace(
        protocol=SimpleNamespace(rank=0),
        clock=lambda: 0.0,
        transport=SimpleNamespace(wake=lambda: woken.append(1)),
    )
    thread = GossipThread(loop)  # never started, so no step is ever looked at
    thread._wake_at_step = wake_at_step
    for _ in range(5):
        thread.step(samples=1)
    assert thread.steps_behind == behind
    assert len(woken) == sum(step >= wake_at_step for step in range(1, 6))


def test_calls_are_answered_even_if_closing_fails() -> None:
    def fail(*_: object) -> None:
        raise OSError("no such device")

    loop = SimpleNamespace(
        protocol=SimpleNamespace(rank=0, clock=SimpleNamespace(timed_from_step=math.inf)),
        clock=lambda: 0.0,
        transport=SimpleNamespace(wake=lambda: None),
        its_thread=nullcontext,
        turn=fail,
        close=fail,
    )
    thread = GossipThread(loop)
    future: Future[None] = Future()
    thread._calls.append((lambda: None, future))
    thread._empty_queues = lambda: None
    with pytest.raises(OSError, match="no such device"):
        thread._run()
    with pytest.raises(OSError, match="no such device"):
        future.result(0)


class Loop:
    """As much of a loop as the thread needs; it sleeps until it is woken, and counts its sleeps."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = lambda: 0.0
        self.stepped: list[int] = []
        self.is_asleep, self.has_stepped = threading.Event(), threading.Event()
        self._woken = threading.Event()
        self.protocol = SimpleNamespace(rank=0, step=self._step, clock=self)
        self.transport = SimpleNamespace(wake=self._woken.set)
        self.its_thread = nullcontext
        self.perform = self.close = lambda *_: None

    @property
    def timed_from_step(self) -> float:
        """When to be woken: by the next step."""
        return len(self.stepped) + 1.0

    def _step(self, samples: int, ended_s: float) -> list[object]:
        self.stepped.append(samples)
        self.has_stepped.set()
        return []

    def turn(self, longest_s: float) -> None:
        if longest_s > 0.0:
            self.is_asleep.set()
            assert self._woken.wait(LONG_S), "it sleeps through a step"
        self._woken.clear()


def test_a_step_between_the_last_look_and_the_sleep_is_seen() -> None:
    """The thread asks for the time of its next tick; at that moment a step ends."""

    class Interrupted(Loop):
        @property
        def timed_from_step(self) -> float:
            if not self.stepped and not thread._steps:
                thread.step(samples=7)
            return math.inf

    turns: list[float] = []

    def turn(longest_s: float) -> None:
        turns.append(longest_s)
        thread._stopping = len(turns) == 2

    loop = Interrupted()
    loop.turn = turn  # type: ignore[method-assign]
    thread = GossipThread(loop)
    thread._turn_until_closed()
    assert turns[0] == 0.0
    assert loop.stepped == [7]


def test_a_thread_that_falls_asleep_under_a_step_is_woken_by_it() -> None:
    """The step is under way, and not queued yet, when the thread publishes its wish and sleeps."""
    loop = Loop()
    thread = GossipThread(loop)

    def falls_asleep() -> float:
        if not thread._thread.is_alive():
            thread.start()
            assert loop.is_asleep.wait(LONG_S)
        return 0.0

    loop.clock = falls_asleep
    thread.step(samples=7)
    assert loop.has_stepped.wait(LONG_S)
    thread.close()
    assert loop.stepped == [7]


def test_a_call_that_the_end_of_the_thread_overtakes_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop()
    thread = GossipThread(loop)

    def fail(longest_s: float) -> None:
        raise OSError("no such device")

    def ends_first() -> Future[object]:
        loop.turn = fail  # type: ignore[method-assign]
        thread.start()
        thread._thread.join(LONG_S)
        return Future()

    monkeypatch.setattr(threads, "Future", ends_first)
    with pytest.raises(OSError, match="no such device"):
        thread.call(lambda: None).result(LONG_S)
