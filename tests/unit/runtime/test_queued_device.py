"""What two threads do to a state on a device that works late ends as if it were done at once.

The device is a stand-in (``tests/support/deferred_device.py``), the threads are this one, on two
streams; while one waits for its stream, the other has its turn.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from random import Random

import pytest
import torch
from deferred_device import GOSSIP, MAIN, DeferredDevice
from torch import Tensor

from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Chunk, Role, Segment, State
from gossipdp.runtime.device import Device, HostMemory
from gossipdp.runtime.queued_device import Slot, StagedArithmetic
from gossipdp.runtime.shared_state import SharedState

SEEDS = range(6)
ETA, ALPHA_TILDE = 0.4, 1.5


class World:
    """A state of three chunks and one of a buffer, and the time."""

    def __init__(self, device: Device, dtype: torch.dtype, eta: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.now_s = 0.0
        self.device = device
        x = torch.randint(-9, 9, (40,), generator=generator).to(dtype)
        segments = [
            Segment(x, Role.TRAINED, chunk_bytes=16 * dtype.itemsize),
            Segment(torch.arange(5.0), Role.BUFFER),
            Segment(torch.arange(3), Role.COPIED),
        ]
        self.state = State(segments)
        if isinstance(device, DeferredDevice):
            device.adopt_state(self.state)
        with self.main():
            self.shared = SharedState(
                self.state, Phase(eta, 1.0), lambda: self.now_s, "torch", device
            )
            self.shared.rest()

    def main(self) -> contextmanager:
        return self.device.used() if isinstance(self.device, DeferredDevice) else nullcontext()

    @contextmanager
    def gossip(self) -> Iterator[None]:
        """Without the wait at a thread's end."""
        if isinstance(self.device, DeferredDevice):
            with self.device.on(GOSSIP), self.device.used():
                yield
        else:
            yield

    def step(self, gradient: Tensor) -> None:
        with self.main():
            self.state.segments[0].x.sub_(gradient)

    def boundary(self) -> int:
        with self.main():
            return self.shared.boundary()

    def held(self) -> dict[str, Tensor]:
        """All that there is, when all is done."""
        for stream in (MAIN, GOSSIP):
            if isinstance(self.device, DeferredDevice):
                with self.device.on(stream):
                    self.device.wait_for_stream()
        held = {}
        for index, segment in enumerate(self.state.segments):
            held[f"x {index}"], held[f"pending {index}"] = segment.x, segment.pending
            if segment.c is not None:
                held["c"] = segment.c
        return {name: values.clone() for name, values in held.items()}


def random_values(random: Random, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    return torch.tensor([random.randint(-9, 9) for _ in range(chunk.num_elements)], dtype=dtype)


def run_script(world: World, seed: int, wire: torch.dtype) -> list[object]:
    """A random run without steps; what the host got to see."""
    random, seen = Random(seed), []
    chunks = world.state.chunks
    outs = [
        torch.empty(chunk.num_elements, dtype=wire if chunk.role is Role.TRAINED else chunk.x.dtype)
        for chunk in chunks
    ]
    for _ in range(6):
        theta = world.shared.start_exchange()
        for chunk, out in zip(chunks, outs, strict=True):
            peers = random_values(random, chunk, out.dtype)
            with world.gossip():
                if random.random() < 0.5:
                    seen.append(world.shared.snapshot(chunk, theta, out))
                    world.boundary() if random.random() < 0.5 else None
                    seen.append(world.shared.exchange(chunk, out, peers, ALPHA_TILDE))
                else:
                    seen.append(world.shared.snapshot_and_exchange(chunk, out, peers, ALPHA_TILDE))
            peers.zero_()  # the link's next chunk lands there
            seen.append(out.clone())
            out.fill_(7.0)
        world.shared.end_exchange()
        world.now_s += random.random()
        world.boundary()
        chunk = random.choice(chunks)
        out = torch.empty_like(chunk.x)
        with world.gossip():
            match random.randrange(4):
                case 0:
                    world.shared.take_over(chunk, random_values(random, chunk, chunk.x.dtype))
                case 1:
                    world.shared.replace(chunk, random_values(random, chunk, chunk.x.dtype))
                case 2:
                    landed = torch.empty(chunk.num_elements, dtype=chunk.x.dtype)
                    world.shared.read_flowed(chunk, landed)
                    seen.append(landed.clone())
        with world.main():
            match random.randrange(4):
                case 0:
                    world.shared.flow_to_now()
                case 1:
                    world.shared.reset()
                case 2:
                    world.shared.read(chunk, out)
                    seen.append(out if isinstance(world.device, HostMemory) else None)
    return seen


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return other is None or one == other


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_whatever_the_order_of_the_work_the_bits_are_those_of_host_memory(
    dtype: torch.dtype, wire: torch.dtype
) -> None:
    for seed in SEEDS:
        at_once = World(HostMemory(), dtype, ETA)
        late = World(DeferredDevice(seed), dtype, ETA)
        for one, other in zip(
            run_script(at_once, seed, wire), run_script(late, seed, wire), strict=True
        ):
            assert same(one, other), seed
        for name, values in at_once.held().items():
            assert torch.equal(values, late.held()[name]), (seed, name)


def train(seed: int, breaks: tuple[str, ...] = ()) -> bool:
    """Steps and boundaries wherever the gossip thread waits; whether every part of them counts.

    All values are whole numbers and halves, so the sums are exact: what x + pending has become is
    where it began, less all gradients, less half of all differences; c less all differences.
    """
    device = DeferredDevice(seed, breaks)
    world = World(device, torch.float32, eta=0.0)
    random, state = Random(seed), world.state
    segment = state.segments[0]
    begin = world.held()
    gradients, differences = torch.zeros(40), torch.zeros(40)
    slots = {chunk.index: slice(16 * chunk.index, 16 * chunk.index + 16) for chunk in state.chunks}
    is_right = True

    def step() -> None:
        with device.on(MAIN):
            if random.random() < 0.3:
                gradient = random_values(
                    random, Chunk(Role.TRAINED, segment.x, segment.x, None), torch.float32
                )
                gradients.add_(gradient)
                world.step(gradient)
                world.boundary()

    device.on_finish = step
    for _ in range(6):
        theta = world.shared.start_exchange()
        for chunk in state.chunks[:3]:
            out = torch.full((chunk.num_elements,), torch.nan)
            peers = random_values(random, chunk, torch.float32)
            with world.gossip():
                world.shared.snapshot(chunk, theta, out)
                step()
                norm = world.shared.exchange(chunk, out, peers, ALPHA_TILDE)
            step()
            difference = out - peers
            is_right &= norm == float((difference**2).sum())
            differences[slots[chunk.index]] += difference
        world.shared.end_exchange()
    end = world.held()
    expected = begin["x 0"] - gradients - 0.5 * differences
    return bool(
        is_right
        and torch.equal(end["x 0"] + end["pending 0"], expected)
        and torch.equal(end["c"], -differences)
    )


def test_steps_and_exchanges_lose_nothing() -> None:
    assert all(train(seed) for seed in range(30))


@pytest.mark.parametrize("rule", ["precede", "leave", "finish"])
def test_without_one_of_the_rules_it_shows(rule: str) -> None:
    assert not all(train(seed, (rule,)) for seed in range(30))


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


@pytest.mark.parametrize("kind", ["host", "stand-in", CUDA])
def test_two_threads_lose_nothing(kind: str) -> None:
    place = "cuda" if kind == "cuda" else "cpu"
    state = State([Segment(torch.zeros(5000, device=place), Role.TRAINED, chunk_bytes=4096)])
    (segment,) = state.segments
    device = None
    with ExitStack() as stack:
        if kind == "stand-in":
            device = DeferredDevice(0)
            device.adopt_state(state)
            stack.enter_context(device.used())
        shared = SharedState(state, Phase(0.0, 1.0), lambda: 0.0, "torch", device)
        shared.rest()
        differences = torch.zeros(5000)
        ended = threading.Event()

        def gossip() -> None:
            generator = torch.Generator().manual_seed(0)
            with shared.gossip_thread():
                for _ in range(8):  # more, and float32 would round
                    theta = shared.start_exchange()
                    for chunk, difference in segment.split(differences):
                        out = torch.full((chunk.num_elements,), torch.nan)
                        peers = torch.randint(-9, 9, out.shape, generator=generator).float()
                        assert shared.snapshot(chunk, theta, out)
                        shared.exchange(chunk, out, peers, ALPHA_TILDE)
                        difference += out - peers
                    shared.end_exchange()
            ended.set()

        thread = threading.Thread(target=gossip)
        thread.start()
        num_steps = 0
        gradient = torch.arange(5000.0, device=place) % 7
        while thread.is_alive() and num_steps < 500:
            segment.x.sub_(gradient)
            num_steps += 1
            shared.boundary()
        thread.join()
        assert ended.is_set()
        shared.boundary(wait=True)
        shared.rest()
        x, c = segment.x.to("cpu", copy=True), segment.c.to("cpu", copy=True)
    gradients = num_steps * (torch.arange(5000.0) % 7)
    assert torch.equal(x, -gradients - 0.5 * differences)
    assert torch.equal(c, -differences)


def test_a_boundary_leaves_out_a_chunk_that_is_in_use() -> None:
    device = DeferredDevice(0)
    world = World(device, torch.float32, ETA)
    chunk = world.state.chunks[0]
    skipped = []

    def boundary() -> None:
        with device.on(MAIN):
            skipped.append(world.boundary())

    device.on_finish = boundary
    with world.gossip():
        world.shared.snapshot(chunk, 0.0, torch.empty(chunk.num_elements))
    device.on_finish = None
    assert skipped == [1]
    assert world.boundary() == 0


def test_after_a_boundary_the_gossip_thread_waits_for_nothing_but_the_boundary() -> None:
    device = DeferredDevice(0)
    world = World(device, torch.float32, ETA)
    done = []
    for step in range(50):
        device.queue(lambda step=step: done.append(step))
    assert len(done) < 50
    world.boundary()
    assert len(done) == 50


def slot_keeps(seed: int, breaks: tuple[str, ...] = ()) -> bool:
    """Whether what a slot took to the device, and back, is what was there."""
    device = DeferredDevice(seed, breaks)
    with device.used():
        slot = Slot(device, 32)
        loaded, stored, values = [], [], torch.empty(8)
        for number in range(5):
            loaded.append(slot.load(values.fill_(number)).clone())
            slot.there(values).add_(100.0)
            slot.store(out := torch.empty(8))
            stored.append(out)
            slot.there(values).fill_(torch.nan)
    device.breaks = ()
    device.finish()
    return all(
        torch.equal(there, torch.full((8,), float(number)))
        and torch.equal(back, torch.full((8,), 100.0 + number))
        for number, (there, back) in enumerate(zip(loaded, stored, strict=True))
    )


def test_a_slot_is_used_again_only_when_the_device_is_done_with_it() -> None:
    assert all(slot_keeps(seed) for seed in range(20))
    assert not all(slot_keeps(seed, ("wait", "finish")) for seed in range(20))


def load_twice(seed: int, breaks: tuple[str, ...] = ()) -> bool:
    device = DeferredDevice(seed, breaks)
    with device.used():
        slot = Slot(device, 32)
        first = slot.load(torch.full((8,), 1.0)).clone()
        slot.load(torch.full((8,), 2.0))
    device.breaks = ()
    device.finish()
    return torch.equal(first, torch.full((8,), 1.0))


def test_a_slot_waits_for_its_own_copy_alone() -> None:
    assert all(load_twice(seed) for seed in range(20))
    assert not all(load_twice(seed, ("wait",)) for seed in range(20))


def test_what_computes_is_visible() -> None:
    device = DeferredDevice(0)
    world = World(device, torch.float32, ETA)
    assert world.shared.kernels == "torch on the device"
    assert isinstance(world.shared._gossip.of(world.state.chunks[0]), StagedArithmetic)


def test_sums_are_in_host_memory_and_come_back() -> None:
    for seed in SEEDS:
        device = DeferredDevice(seed)
        world = World(device, torch.bfloat16, ETA)
        x = world.state.segments[0].x.clone()
        with world.gossip():
            world.shared.flow_to_the_end()
            world.shared.start_sums()
            assert not any(device.holds(total) for total in world.shared.sums)
            assert torch.equal(torch.cat(world.shared.sums[:3]), x.float())
            for total in world.shared.sums:
                total.add_(1.0)
            assert world.shared.squared_distance_to_sums() == 40.0
            world.shared.adopt_sums()
            copied = world.shared.copied_values()
            assert copied[4].tolist() == [0, 1, 2]
            world.shared.adopt_copied({4: copied[4] + 5})
            out = torch.empty(3, dtype=torch.int64)
            world.shared.read_as_it_is(world.state.copied_chunks[0], out)
            assert out.tolist() == [5, 6, 7]
        assert torch.equal(world.state.segments[0].x, x + 1.0)
