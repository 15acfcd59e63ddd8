"""The training thread's view of the gossip thread's work."""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calling_back import CallingLock
from threadpoolctl import threadpool_info
from waiting import LONGEST_S, wait_until

from gossipdp.gossip import thread as threads
from gossipdp.gossip.thread import Background, GossipThread, one_blas_thread


def fail(*_: object) -> None:
    raise OSError("no such device")


def loop_of(**changes: Any) -> Any:
    """Return a loop whose turns fail."""
    clock = SimpleNamespace(timed_from_step=math.inf)
    protocol = SimpleNamespace(rank=0, clock=clock, exchange_rate=None)
    plain = {"protocol": protocol, "clock": lambda: 0.0, "turn": fail, "close": lambda: None}
    plain |= {"transport": SimpleNamespace(wake=lambda: None), "its_thread": nullcontext}
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    ("wake_at_step", "behind"),
    [(math.inf, 0), (7.5, 0), (5.0, 0), (4.9, 1), (4.0, 1), (2.3, 3), (-1.0, 6)],
)
def test_steps_since_a_tick_came_due_are_counted(wake_at_step, behind):
    woken: list[int] = []
    thread = GossipThread(loop_of(transport=SimpleNamespace(wake=lambda: woken.append(1))))
    thread._wake_at_step = wake_at_step  # it is never started, so no step is ever looked at
    for _ in range(5):
        thread.step(samples=1)
    assert thread.steps_behind == behind
    assert len(woken) == sum(step >= wake_at_step for step in range(1, 6))


def until_there(background: Background[int], key: object, function: Callable[[], int]) -> int:
    return wait_until(lambda: background(key, function), "it is worked out")


def threads_of_blas() -> list[int]:
    return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]


def test_graphs_are_worked_out_in_a_thread_of_their_own_and_the_newest_counts():
    """Its caller is never held up, and numpy's library takes one core, not all of them."""
    background, go_on = Background[int](one_blas_thread), threading.Event()
    ran_in, blas, woken = list[str](), list[int](), threading.Event()

    def first() -> int:
        ran_in.append(threading.current_thread().name)
        blas.extend(threads_of_blas())
        go_on.wait()
        return 1

    assert background("first", first) is None
    assert background("first", first) is None
    assert background("second", lambda: 2) is None, "the first still runs"
    go_on.set()
    assert until_there(background, "second", lambda: 2) == 2
    background.wake = lambda: time.sleep(0.1) or woken.set()
    assert until_there(background, "first", lambda: 3) == 3
    background.close()
    assert woken.is_set(), "it ends once it has woken the gossip thread"
    assert ran_in == ["gossipdp-background"]
    assert set(blas) == {1}
    with pytest.raises(OSError, match="no such device"):  # where it was asked for
        until_there(background, "graph", fail)


def test_blas_has_its_threads_back_though_two_graphs_are_worked_out_at_once(monkeypatch):
    before, guard = threads_of_blas(), CallingLock()
    go_on, is_awaited = threading.Event(), threading.Event()
    monkeypatch.setattr(threads, "_blas_guard", guard)
    one, other = (Background[int](one_blas_thread) for _ in range(2))

    def first() -> int:
        assert go_on.wait(LONGEST_S)
        return 1

    assert one("first", first) is None
    wait_until(guard.locked, "the first is worked out")
    guard.before = is_awaited.set
    assert other("second", lambda: 2) is None
    assert is_awaited.wait(LONGEST_S)
    go_on.set()
    assert until_there(other, "second", lambda: 2) == 2
    assert until_there(one, "first", first) == 1
    assert threads_of_blas() == before


@pytest.mark.parametrize("meets", ["before the wish", "the wish", "within the step", "the turn"])
def test_no_step_is_overlooked_however_two_threads_meet(meets):
    """The loop looks at a step in that turn, which does not wait then, or is woken from it."""
    waits_s: list[float] = []
    woken: list[int] = []
    looked_at: list[tuple[int, float, float]] = []
    due: list[str] = []

    class Clock:
        @property
        def timed_from_step(self) -> float:
            meet("the wish")
            return 1.0

    def clock() -> float:
        meet("within the step")
        return 5.0

    def turn(timeout_s: float) -> None:
        waits_s.append(timeout_s)
        meet("the turn")
        thread._stopping = True

    def meet(place: str) -> None:
        """Let the other thread have its turn, once."""
        if due == [place]:
            due.clear()
            thread._turn_until_closed() if place == "within the step" else thread.step(3)

    loop = loop_of(clock=clock, turn=turn, perform=lambda _: None)
    loop.transport.wake = lambda: woken.append(len(waits_s))
    loop.protocol.clock = Clock()
    loop.protocol.step = lambda *step: looked_at.append(step)
    thread = GossipThread(loop)
    due.append(meets)
    if meets == "before the wish":
        empty = thread._empty_queues
        thread._empty_queues = lambda: (empty(), thread.step(3))  # type: ignore[method-assign]
    if meets == "within the step":
        thread.step(3)
    else:
        thread._turn_until_closed()
    assert len(waits_s) == 1
    assert waits_s == [0.0] or (waits_s, woken) == ([0.5], [1])
    GossipThread._empty_queues(thread)
    assert looked_at == [(3, 5.0, 5.0)]


def test_a_step_that_is_looked_at_late_is_reported_with_both_times():
    now_s, looked_at = [5.0], list[tuple[int, float, float]]()
    loop = loop_of(clock=lambda: now_s[0], perform=lambda _: None)
    loop.protocol.step = lambda *step: looked_at.append(step)
    thread = GossipThread(loop)
    for now_s[0], samples in ((5.0, 3), (5.125, 4)):
        thread.step(samples)
    now_s[0] = 5.25
    thread._empty_queues()
    assert looked_at == [(3, 5.25, 5.0), (4, 5.25, 5.125)]


def test_calls_are_answered_even_if_closing_fails():
    thread, future = GossipThread(loop_of(close=fail)), Future[None]()
    thread._calls.append((lambda: None, future))
    thread._empty_queues = lambda: None
    with pytest.raises(OSError, match="no such device"):
        thread._run()
    with pytest.raises(OSError, match="no such device"):
        future.result(0)


def test_the_thread_takes_one_core_first_and_turns_its_loop_within_its_context(monkeypatch):
    """Its caller waits for that, and takes its own number of cores again."""
    numbers, said, goes_on = list[tuple[bool, int]](), list[Any](), threading.Event()

    class Ready(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            goes_on.set()
            return super().wait(timeout)

    def get_num_threads() -> int:
        assert threading.current_thread() is not thread._thread or goes_on.wait(LONGEST_S)
        return 7

    def set_num_threads(number: int) -> None:
        numbers.append((threading.current_thread() is thread._thread, number))
        goes_on.set()

    monkeypatch.setattr(torch, "get_num_threads", get_num_threads)
    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    within = ExitStack()
    within.callback(said.append, "leaves")
    thread = GossipThread(loop_of(its_thread=lambda: within, close=partial(said.append, "closes")))
    thread._loop.transport.wake = partial(said.append, "wakes")
    thread._ready = Ready()
    thread.start()
    thread._thread.join()
    assert numbers == [(True, 1), (False, 7)]
    thread._thread = SimpleNamespace(is_alive=lambda: True, join=said.append)
    thread.close()  # which waits, but not for ever
    assert said == ["leaves", "closes", "wakes", 5.0]


def test_a_call_that_the_end_of_the_thread_overtakes_is_answered(monkeypatch):
    def ends_first() -> Future[object]:
        thread.start()
        thread._thread.join()
        return Future()

    thread = GossipThread(loop_of())
    monkeypatch.setattr(threads, "Future", ends_first)
    with pytest.raises(OSError, match="no such device"):
        thread.call(lambda: None).result(0)
    thread._calls = type("Emptied", (deque,), {"__bool__": lambda _: True})()
    thread._fail_calls()  # both look, and the other is quicker


def test_whatever_a_call_raises_reaches_its_caller():
    """One that is no Exception ends the thread as well; its caller once waited for ever."""
    thread, ran, woken = GossipThread(loop_of()), list[int](), list[int]()
    thread._loop.transport.wake = lambda: woken.append(len(thread._calls))
    thread._thread = threading.current_thread()  # which is alive
    for number in range(3):
        thread.call(partial(ran.append, number))
    future = thread.call(sys.exit)
    assert woken == [1, 2, 3, 4], "each is in the queue by then"
    with pytest.raises(SystemExit):
        thread._empty_queues()
    assert ran == [0, 1, 2], "the calls before it, in their order"
    with pytest.raises(SystemExit):
        future.result(0)
