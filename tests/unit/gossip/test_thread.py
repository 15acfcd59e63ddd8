"""What the training thread may know of the gossip thread's work."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from threadpoolctl import threadpool_info

from gossipdp.gossip.thread import Background, GossipThread
from gossipdp.protocol.neighbours import Place


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


def place(rate: float) -> Place:
    return Place({1: rate}, rate, 0.0, 0.5)


def until_there(background: Background[Place], key: object, function: Callable[[], Place]) -> Place:
    deadline_s = time.monotonic() + 30.0
    while (found := background(key, function)) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return found


def test_graphs_are_worked_out_in_a_thread_of_their_own_and_the_newest_counts() -> None:
    """Its caller is never held up, and numpy's library takes one core, not all of them."""
    background, go_on = Background[Place](), threading.Event()
    ran_in: list[str] = []
    blas: list[int] = []

    def first() -> Place:
        ran_in.append(threading.current_thread().name)
        blas.extend(each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas")
        go_on.wait()
        return place(1.0)

    assert background("first", first) is None
    assert background("first", first) is None
    assert background("second", lambda: place(2.0)) is None, "the first still runs"
    go_on.set()
    assert until_there(background, "second", lambda: place(2.0)) == place(2.0)
    assert until_there(background, "first", lambda: place(3.0)) == place(3.0)
    assert ran_in == ["gossipdp background"]
    assert set(blas) == {1}


def test_what_goes_wrong_with_a_graph_is_raised_where_it_was_asked_for() -> None:
    def fail() -> Place:
        raise ValueError("no such graph")

    with pytest.raises(ValueError, match="no such graph"):
        until_there(Background[Place](), "graph", fail)


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
