"""The rules for two threads that share one chunk, and the arithmetic of chunks."""

import math
import threading
from functools import partial
from random import Random

import pytest
import torch
from calling_back import CallingLock
from reference import MomentumState
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossipdp.dynamics.chunks import Chunk, Moment, Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.links.frames import MAX_CHUNK_BYTES


@pytest.mark.parametrize("role", [Role.TRAINED, Role.BUFFER])
def test_an_exchange_right_after_a_boundary_waits_for_the_next(role):
    (chunk,) = State([Segment(torch.full((3,), 6.0), role)]).chunks

    def exchange() -> None:
        mine = torch.empty(3)
        chunk.snapshot(0.0, mine)
        chunk.exchange(0.0, mine, torch.full((3,), 2.0), 0.5)

    exchange()
    chunk.lock = lock = CallingLock(after=exchange)  # type: ignore[assignment]
    assert chunk.boundary(0.0)
    assert lock.has_called
    assert chunk.x.tolist() == [4.0] * 3
    assert chunk.boundary(0.0)
    assert chunk.x.tolist() == [3.0] * 3


ZERO, ONE = torch.zeros(4), torch.ones(4)


def exchanged_once() -> tuple[Chunk, MomentumState]:
    """Return a chunk after an exchange at phase 0 with a peer 1 away, and what it holds by now."""
    (chunk,) = State([Segment(torch.zeros(4), Role.TRAINED)]).chunks
    chunk.exchange(0.0, ONE, ZERO, 1.5)
    start = MomentumState(torch.zeros(4).double(), torch.zeros(4).double())
    return chunk, start.exchange(ONE.double(), 1.5)


def x_and_c(chunk: Chunk) -> MomentumState:
    """Return what a chunk holds, flowed to its phase; its pending is in x."""
    x, c = torch.empty(4), torch.empty(4)
    chunk.read(x, c)
    return MomentumState(x.double(), c.double())


def assert_close(found: MomentumState, expected: MomentumState) -> None:
    torch.testing.assert_close(found.x, expected.x, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.c, expected.c, rtol=0.0, atol=1e-6)


CODED_ONE = torch.ones(4, dtype=torch.int8), torch.zeros(1, dtype=torch.int8), torch.empty(1)


@pytest.mark.parametrize("is_coded", [False, True])
def test_a_boundary_right_before_an_exchange_flows_once(is_coded):
    chunk, state = exchanged_once()
    chunk.lock = lock = CallingLock(before=lambda: chunk.boundary(1.0))
    if is_coded:
        chunk.exchange_coded(1.0, CODED_ONE, 1.5)
    else:
        chunk.exchange(1.0, ONE, ZERO, 1.5)
    assert chunk.has_pending
    assert lock.has_called
    expected = state.flow(1.0, 1.0).exchange(ONE.double(), 1.5)
    assert_close(x_and_c(chunk), expected)
    assert chunk.boundary(2.0)
    expected = expected.flow(1.0, 1.0)
    assert_close(x_and_c(chunk), expected)
    z = torch.empty(4)
    chunk.read_z(z)  # as a joiner does
    torch.testing.assert_close(z.double(), expected.z, rtol=0.0, atol=1e-6)


def test_an_exchange_right_after_a_copy_is_in_no_part_of_it():
    chunk, state = exchanged_once()
    chunk.lock = lock = CallingLock(after=lambda: chunk.exchange(0.0, ONE, ZERO, 1.5))
    assert_close(x_and_c(chunk), state)
    assert lock.has_called


class Order:
    """A chunk's order, which is entered and left under its lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self.is_held = lock, False

    def __enter__(self) -> None:
        assert self._lock.locked()
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        assert self._lock.locked(), "the next holder may be there as soon as it is free"
        self.is_held = False


class Within(TorchDispatchMode):
    """Refuses every operation on values outside of an order."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order, self.num_operations = order, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert self.order.is_held or function.is_view, f"{function} outside"
        self.num_operations += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("role", [Role.TRAINED, Role.BUFFER])
def test_each_operation_on_a_chunk_s_values_is_done_under_its_lock_and_in_order(role, monkeypatch):
    coded = "gossipdp.dynamics.update.exchange_coded"  # machine code, which no mode sees
    monkeypatch.setattr(coded, lambda pending, *_: float(pending.sum()))
    segment = Segment(torch.zeros(4), role)
    (chunk,) = State([segment]).chunks
    chunk.order = order = Order(chunk.lock)  # type: ignore[assignment]
    values, room = torch.ones(4), torch.empty(4)
    with Within(order) as operations:
        for work in (
            partial(chunk.snapshot, 0.0, room),
            partial(chunk.exchange, 0.0, room, values, 1.5),
            partial(chunk.boundary, 0.5),
            partial(chunk.exchange_coded, 0.5, (values, values, values), 1.5),
            partial(chunk.exchange, 0.5, room, values, 1.5),
            partial(chunk.read, room, room, 1.0),
            partial(chunk.read_z, room),
            partial(chunk.forget, slice(1, 2)),
            partial(chunk.replace, values),
            partial(segment.swap, values),
        ):
            operations.num_operations = 0
            work()
            assert operations.num_operations


def buffers(values: Tensor) -> Chunk:
    (chunk,) = State([Segment(values, Role.BUFFER)]).chunks
    return chunk


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("num_exchanges", [1, 2, 4])
def test_what_forward_passes_change_in_buffers_counts_whole(num_exchanges, sign):
    """Four workers' buffers are those of averaging at once, however forward passes fall.

    If each exchange halved what they had changed, a running mean would remember 2^k times as much.
    """
    random = Random(0)
    torch.manual_seed(0)
    ends = [buffers(sign * (1.0 + torch.rand(64, dtype=torch.float64))) for _ in range(4)]
    expected = torch.stack([end.x for end in ends])
    mean = expected.mean(dim=0)
    out = torch.empty(2, 64, dtype=torch.float64)

    def pass_forward(worker: int) -> None:
        x = ends[worker].x
        change = 0.1 * (sign * (1.0 + torch.rand_like(x)) - x)
        x += change
        expected[worker] += change
        mean.add_(change / 4)

    def exchange(one: int, other: int) -> None:
        pair = ends[one], ends[other]
        for end, snapshot in zip(pair, out, strict=True):
            assert end.snapshot(0.0, snapshot)
        delta = out[0] - out[1]
        if random.random() < 0.5:
            pass_forward(one)
        if random.random() < 0.2:
            pair[0].boundary(0.0)
        pair[0].exchange(0.0, out[0], out[1], 0.5)
        pair[1].exchange(0.0, out[1], out[0], 0.5)
        expected[one] -= delta / 2
        expected[other] += delta / 2

    for _ in range(10):
        events = [partial(pass_forward, worker) for worker in range(4)] * 2
        events += [partial(exchange, *random.sample(range(4), 2)) for _ in range(2 * num_exchanges)]
        random.shuffle(events)
        for event in events:
            event()
        for end in ends:
            end.boundary(0.0)
        found = torch.stack([end.x for end in ends])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.mean(dim=0), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_running_variance_stays_positive_however_it_shrinks(dtype, sign):
    """Peers' values are small beside this worker's, and then its own shrink too."""
    torch.manual_seed(1)

    def some() -> Tensor:
        return (sign * (0.01 + torch.rand(64)) ** 4).to(dtype)

    for _ in range(50):
        one = buffers(some())
        mine = torch.empty(64, dtype=dtype)
        for _ in range(int(torch.randint(1, 5, ()))):
            assert one.snapshot(0.0, mine)
            assert (sign * mine > 0.0).all()
            one.x.copy_(some())  # what forward passes do before the peer's values are there
            one.exchange(0.0, mine, some(), 0.5)
            one.x.copy_(some())
            one.read(mine)
            assert (sign * mine > 0.0).all()
        one.boundary(0.0)
        assert torch.equal(one.x, mine)
    one = buffers(torch.full((64,), sign, dtype=dtype))
    one.exchange(0.0, one.x.clone(), torch.zeros_like(mine), 0.5)
    one.x.zero_()
    one.boundary(0.0)
    assert not one.x.any()


def moment(values: Tensor, steps: int, decay: float = 0.999) -> Chunk:
    """One chunk of a second moment, of an optimizer that has made so many steps."""
    kept = Moment("exp_avg_sq", 16, decay, steps)
    segment = Segment(values, Role.MOMENT, momentum=False, moment=kept)
    (chunk,) = State([], moments=[segment]).moment_chunks
    return chunk


def meet(one: Chunk, other: Chunk) -> tuple[Tensor, Tensor]:
    """Let two chunks exchange; return what they sent."""
    mine, theirs = torch.empty_like(one.x), torch.empty_like(other.x)
    assert one.snapshot(0.0, mine)
    assert other.snapshot(0.0, theirs)
    one.exchange(0.0, mine, theirs, 0.5)
    other.exchange(0.0, theirs, mine, 0.5)
    return mine, theirs


@pytest.mark.parametrize("ages", [(7, 7), (20, 400)])
def test_second_moments_are_averaged_as_their_optimizers_correct_them(ages):
    torch.manual_seed(0)
    squares, masses = torch.rand(2, 1000), [1 - 0.999**age for age in ages]
    ends = [moment(squares[end] * masses[end], steps=ages[end]) for end in range(2)]
    meet(*ends)
    for end, mass in zip(ends, masses, strict=True):
        infinite = torch.ones(1000)
        infinite[1] = math.inf
        assert not math.isfinite(end.exchange(0.0, torch.empty(1000), infinite, 0.5)), "not taken"
        assert end.boundary(0.0)
        torch.testing.assert_close(end.x / mass, squares.mean(dim=0))
    meet(*ends)
    for end, age in zip(ends, ages, strict=True):
        held, out = end.x.clone(), torch.empty(1000)
        end._moment.steps = 0  # the optimizer was reset: what was brought counts no more
        assert end.boundary(0.0)
        end._moment.steps = age
        end.read(out)
        assert torch.equal(end.x, held)
        assert torch.equal(out, held)


def test_a_moment_whose_values_add_up_to_zero_is_averaged():
    ends = [moment(torch.tensor(each), 1, 0.0) for each in ([1.0, -1.0, 0.0], [3.0, 1.0, 2.0])]
    meet(*ends)
    for end in ends:
        assert end.boundary(0.0)
        assert end.x.tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "steps", "values"),
    [
        (torch.float32, 400, [1.0, math.inf, 1.0]),
        (torch.float32, 400, [1.0, math.nan, 1.0]),
        (torch.float16, 15, [1.0, 1000.0, 1.0]),  # v / (1 - beta^t) is beyond what float16 holds
        (torch.float32, 400, [0.0, 0.0, 0.0]),  # no gradients yet: the mean over workers would grow
    ],
)
def test_a_moment_that_cannot_be_sent_gives_nothing_and_takes_nothing(dtype, steps, values):
    held = torch.tensor(values, dtype=dtype)
    one, other = moment(torch.ones(3, dtype=dtype), steps=400), moment(held.clone(), steps)
    _, theirs = meet(one, other)
    assert not theirs.any()
    for end, expected in ((one, torch.ones_like(held)), (other, held)):
        assert end.boundary(0.0)
        torch.testing.assert_close(end.x, expected, rtol=0, atol=0, equal_nan=True)
        is_unsound = end is other and any(values)
        assert end._moment.is_unsound == is_unsound  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [buffers, lambda values: moment(values, steps=5000)])
def test_a_variance_of_low_precision_that_shrinks_after_a_boundary_stays_positive(make, dtype):
    """Half of the averages lie below what x is rounded to: that must not be taken away later."""
    torch.manual_seed(0)
    values = torch.rand(2, 1000).to(dtype).add(1.0)
    one, other = (make(each.clone()) for each in values)
    sent, _ = meet(one, other)
    one.boundary(0.0)
    torch.testing.assert_close(one.x, values.float().mean(dim=0).to(dtype), rtol=0.01, atol=0)
    one.x.mul_(2.0**-12)
    for _ in range(2):
        assert one.snapshot(0.0, sent)
        assert (sent > 0.0).all()
        one.boundary(0.0)
        assert (one.x > 0.0).all()
        one.exchange(0.0, sent, sent, 0.5)


def test_a_helper_s_error_reaches_the_boundary_of_a_large_model(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for length, num_helpers in ((7_999_999, 0), (8_000_000, 2)):
        state = State([Segment(torch.empty(length), Role.TRAINED, momentum=False)])
        state.compile("numba")
        assert len(state._helpers) == num_helpers
    main, has_helped = threading.get_ident(), threading.Event()

    def boundary(theta: float, *, wait: bool) -> bool:
        if threading.get_ident() == main:
            assert has_helped.wait(10)
            return True
        has_helped.set()
        raise OSError("no such memory")

    for chunk in state.chunks:
        monkeypatch.setattr(chunk, "boundary", boundary, raising=False)
    with pytest.raises(OSError, match="no such memory"):
        state.boundary(0.0)
    helpers = [each for each in threading.enumerate() if each.name.startswith("gossipdp-boundary")]
    assert helpers
    state.end_helpers()
    assert not any(helper.is_alive() for helper in helpers)


@pytest.mark.parametrize(
    ("given", "of_torch", "num_helpers"), [(0, 3, 0), (1, 3, 1), (9, 3, 2), (9, 99, 7)]
)
def test_with_the_helpers_that_there_are_a_boundary_is_whole(
    monkeypatch, given, of_torch, num_helpers
):
    """With the caller they are as many as torch's threads, but no more than eight."""
    start, started = threading.Thread.start, []

    def start_few(thread: threading.Thread) -> None:
        if len(started) == given:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    monkeypatch.setattr("gossipdp.dynamics.state.LEAST_HELPED_VALUES", 1)
    helped = State([Segment(torch.zeros(10), Role.TRAINED, chunk_bytes=4)])
    helped.compile("numba")
    assert len(started) == num_helpers
    helped.chunks[0].is_compiled = False  # as of a precision that no loop knows
    for times in (1, 2):
        for chunk in helped.chunks:
            chunk.pending.fill_(1.0)
            chunk.has_pending = True
        with helped.chunks[0].lock, helped.chunks[-1].lock:
            assert helped.boundary(0.0) == 2
        assert helped.boundary(0.0) == 0
        assert helped.segments[0].x.tolist() == [times] * 10
        helped.end_helpers()  # the second boundary has none
        assert not any(thread.is_alive() for thread in started)


def test_momentum_that_is_dropped_is_in_no_chunk():
    state = State([Segment(torch.zeros(3), Role.TRAINED, chunk_bytes=4) for _ in range(2)])
    state.drop_momentum()
    assert [each.c for each in (*state.segments, *state.chunks)] == [None] * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("role", [Role.TRAINED, Role.UNOPTIMIZED])
def test_no_chunk_is_longer_than_a_frame_in_any_precision(role, dtype):
    """Sums over all workers travel in pending's precision."""
    x = torch.empty(1 << 26, dtype=dtype, device="meta")
    for chunk_bytes in (1 << 25, MAX_CHUNK_BYTES):
        segment = Segment(x, role, momentum=False, chunk_bytes=chunk_bytes)
        longest = max(chunk.num_elements for chunk in segment.chunks)
        most = chunk_bytes // dtype.itemsize, MAX_CHUNK_BYTES // segment.pending.itemsize
        assert longest == min(most)
