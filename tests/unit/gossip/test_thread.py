"""What the training thread may know of the gossip thread's work."""

import math
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from gossipdp.gossip.thread import GossipThread


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
