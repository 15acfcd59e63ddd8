"""Ctrl+C at any bytecode of a boundary: no lock stays taken, nothing is added twice or lost."""

import contextlib
import ctypes
import gc
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from clocked_device import HostAsCard
from torch import Tensor

from gossipdp.dynamics.chunks import BufferChunk, Chunk, Moment, MomentChunk, Role
from gossipdp.dynamics.device import Mark
from gossipdp.dynamics.inboxes import InboxChunk
from gossipdp.dynamics.state import Segment, State


class Silent:
    """Its ``__init__`` is object's, which takes and ignores all arguments of such a class."""

    def __new__(cls) -> "Silent":
        return super().__new__(cls)


# Trace functions without bytecodes of their own: the signal arrives, and it is the traced code
# where the interpreter looks for it next. In a trace function of Python's it would be that one. The
# one that sends it returns the other, so it is called once: ctypes asks audit hooks before each
# call, and there may be some in Python (filelock has one).
NOTHING = SimpleNamespace(then=Silent().__init__)
SEND_SIGINT = ctypes.pythonapi.PyErr_SetInterrupt
SEND_SIGINT.argtypes = [ctypes.py_object] * 3
SEND_SIGINT.restype = partial(getattr, NOTHING, "then")


def is_interrupted(call: Callable[[], object], number: int) -> bool | None:
    """Call with a SIGINT after so many bytecodes; return whether it came, None if there are fewer.

    No collection of garbage begins meanwhile: its callbacks (hypothesis has one) and finalizers
    have bytecodes of their own, and the interpreter prints and drops what is raised in them.
    """
    num_left = number
    is_sent = False

    def in_a_frame(_frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_left, is_sent
        num_left -= event == "opcode"
        if num_left > 0 or is_sent:
            return in_a_frame
        is_sent = True
        return SEND_SIGINT

    def tracer(frame: FrameType, _event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        return in_a_frame

    def interrupt(*_: object) -> None:
        sys.settrace(None)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    gc.disable()
    # Without it, Python 3.12 sends no opcodes in the first call: a frame must ask before settrace.
    sys._getframe().f_trace_opcodes = True
    try:
        sys.settrace(tracer)
        call()
        sys.settrace(None)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)
        gc.enable()
    return False if is_sent else None


class WatchedMark(Mark):
    """A mark whose holders leave it before the next one comes, unless all work was waited for."""

    is_open = False

    def leave(self) -> None:
        self.is_open = False

    def precede(self) -> None:
        assert not self.is_open, "the work before it was neither marked nor waited for"
        self.is_open = True


class AtOnce(HostAsCard):
    """Works at once, and watches that its locks' holders are in order."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[WatchedMark] = []
        self.num_finished = 0

    def mark(self) -> Mark:
        self.marks.append(WatchedMark())
        return self.marks[-1]

    def finish(self) -> None:
        self.num_finished += 1

    def finish_all(self) -> None:
        self.num_finished += 1
        for mark in self.marks:
            mark.is_open = False


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "flow alone": {"has_pending": False},
    "to the end of time": {"theta": math.inf},
    "bfloat16, waited for": {"dtype": torch.bfloat16, "wait": True},
    "compiled bfloat16": {"kernels": "numba", "dtype": torch.bfloat16},
    "buffers": {"role": Role.BUFFER},
    "moments": {"role": Role.MOMENT},
    "moments of an optimizer that was reset": {"role": Role.MOMENT, "steps": 0},
    "inboxes": {"is_ordered": True},
    "inboxes of bfloat16": {"is_ordered": True, "dtype": torch.bfloat16},
    "helped": {"kernels": "numba", "num_helpers": 2},
}
STATE = {"x", "pending", "c", "theta", "theta_c", "has_pending", "seen", "weight"}


class World:
    """A state of two chunks, or six that helpers do, and how its boundary is made."""

    def __init__(
        self,
        *,
        role: Role = Role.TRAINED,
        dtype: torch.dtype = torch.float32,
        has_pending: bool = True,
        theta: float = 0.3,
        kernels: str = "torch",
        is_ordered: bool = False,
        num_helpers: int = 0,
        wait: bool = False,
        steps: int = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        num_chunks = 6 if num_helpers else 2
        moment = Moment("exp_avg_sq", 1, 0.5, steps) if role is Role.MOMENT else None
        values = torch.rand(8 * num_chunks, generator=generator).to(dtype)
        segment = Segment(values, role, moment=moment, chunk_bytes=8 * dtype.itemsize)
        self.device = AtOnce() if is_ordered else None
        segments = [[segment], []]
        trained, moments = segments if moment is None else segments[::-1]
        self.state = State(trained, self.device, moments=moments)
        self.chunks = segment.chunks
        self.state.compile(kernels)
        self.theta, self.wait = theta, wait
        for chunk in self.chunks:
            chunk.pending.copy_(torch.rand(8, generator=generator) * has_pending)
            chunk.has_pending = has_pending
            if chunk.c is not None:
                chunk.c.copy_(torch.rand(8, generator=generator))
                chunk.theta_c = 0.0
            if isinstance(chunk, BufferChunk):
                chunk.seen.copy_(0.5 * chunk.x)
            if isinstance(chunk, MomentChunk):
                chunk.weight = 0.5
        self.began = self.held()

    def boundary(self) -> None:
        self.state.boundary(self.theta, wait=self.wait)

    def held(self) -> list[dict[str, Any]]:
        """Return what each chunk holds; its inboxes count as one."""
        found = []
        for chunk in self.chunks:
            held = {name: value for name, value in vars(chunk).items() if name in STATE}
            held["pending"] = chunk._brought()
            held["has_pending"] |= getattr(chunk, "is_taken", False)
            clones = {name: each.clone() for name, each in held.items() if isinstance(each, Tensor)}
            found.append(held | clones)
        return found

    def restore(self) -> None:
        for chunk, held in zip(self.chunks, self.began, strict=True):
            for name, value in held.items():
                if isinstance(value, Tensor):
                    getattr(chunk, name).copy_(value)
                else:
                    setattr(chunk, name, value)
            if isinstance(chunk, InboxChunk):
                chunk.taken.zero_()
                chunk.is_taken = False


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


@contextlib.contextmanager
def world_of(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> Iterator[World]:
    num_helpers = shape.get("num_helpers", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_helpers + 1)
    if num_helpers:
        monkeypatch.setattr("gossipdp.dynamics.state.LEAST_HELPED_VALUES", 1)
    world = World(**shape)
    try:
        yield world
    finally:
        world.state.end_helpers()


@pytest.mark.parametrize("name", SHAPES)
def test_wherever_a_boundary_is_interrupted_it_is_done_or_not_done(monkeypatch, name):
    with world_of(monkeypatch, SHAPES[name]) as world:
        world.boundary()
        done = world.held()
        world.restore()
        num_interrupts, num_short, outcomes = 0, 0, set()
        # Handlers run where calls return and loops jump back: few bytecodes apart lies one.
        for number in range(1, 5000, 1 if name == "plain" else 3):
            delivered = is_interrupted(world.boundary, number)
            for chunk in world.chunks:
                assert not chunk.lock.locked(), number
            for chunk, now, before, after in zip(
                world.chunks, world.held(), world.began, done, strict=True
            ):
                assert same(now, before) or same(now, after), (number, chunk.index)
                outcomes.add(same(now, before))
            world.boundary()
            assert all(map(same, world.held(), done)), "the next boundary does the rest"
            world.restore()
            # Where helpers take most chunks, a call has few bytecodes: ten in a row are the end.
            num_short = num_short + 1 if delivered is None else 0
            if num_short == 10:
                break
            num_interrupts += delivered is True
        assert num_interrupts > 50
        assert outcomes == {True, False}
        if world.device is not None:
            assert world.device.num_finished > 0


def test_an_interrupt_leaves_the_lock_of_a_chunk_in_use_to_its_holder(monkeypatch):
    with world_of(monkeypatch, {}) as world:
        chunk, other = world.chunks
        for number in range(1, 60):
            with chunk.lock:
                is_interrupted(world.boundary, 4 * number)
                assert chunk.lock.locked()
                assert same(world.held()[0], world.began[0])
            assert not other.lock.locked()
            world.restore()


@pytest.mark.parametrize("delays_s", [(0.05, 0.2), (0.2, 0.05)])
def test_an_interrupted_boundary_waits_for_its_helpers(monkeypatch, delays_s):
    """A helper that went on would write parameters beside their next user. Either may be last."""
    with world_of(monkeypatch, SHAPES["helped"]) as world:
        main, all_are_in = threading.get_ident(), threading.Barrier(3, timeout=30)
        goes_on, ended = [threading.Event() for _ in delays_s], []
        original, waiting = Chunk.boundary, iter(goes_on)

        def boundary(chunk: Chunk, theta: float, *, wait: bool) -> bool:
            if threading.get_ident() == main:
                all_are_in.wait()
                signal.raise_signal(signal.SIGINT)
            own = next(waiting)
            all_are_in.wait()
            assert own.wait(30)
            outcome = original(chunk, theta, wait=wait)
            ended.append(chunk)
            return outcome

        monkeypatch.setattr(Chunk, "boundary", boundary)

        def interrupt(*_: object) -> None:
            for event, delay_s in zip(goes_on, delays_s, strict=True):
                threading.Timer(delay_s, event.set).start()
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                world.boundary()
        finally:
            signal.signal(signal.SIGINT, before)
        assert len(ended) == 2
        world.state.end_helpers()
        assert len(ended) == 2, "none goes on"
