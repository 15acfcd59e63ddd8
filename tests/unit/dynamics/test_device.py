"""Two threads on a device that queues: each access waits for what it must come after."""

import gc
import math
import mmap
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from random import Random
from unittest.mock import patch

import pytest
import torch
from clocked_device import GOSSIP, MAIN, ClockedDevice, HostAsCard, OutOfOrderError
from torch import Tensor, nn

from gossipdp.dynamics import device as devices
from gossipdp.dynamics.chunks import BufferChunk, Chunk, Moment, Role
from gossipdp.dynamics.device import Device, Slot, _Pinned, device_of, refusal
from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Segment, State
from gossipdp.parallel.training_state import BetweenSteps

ETA, ALPHA_TILDE = 0.4, 1.5


class World:
    """A state of three chunks and one of a buffer, by choice one of a moment, and the time."""

    def __init__(
        self, device: Device, dtype: torch.dtype, eta: float, *, has_moment: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.phase = Phase(eta, 1.0)
        self.now_s = 0.0
        self.device = device
        x = torch.randint(-9, 9, (40,), generator=generator).to(dtype)
        segments = [
            Segment(x, Role.TRAINED, chunk_bytes=16 * dtype.itemsize),
            Segment(torch.arange(5.0), Role.BUFFER),
            Segment(torch.arange(3), Role.COPIED),
        ]
        moment = Moment("exp_avg_sq", 1, 0.5, steps=1)
        moments = [Segment(torch.arange(1.0, 9.0), Role.MOMENT, momentum=False, moment=moment)]
        self.state = State(segments, device, moments=moments if has_moment else ())
        if isinstance(device, ClockedDevice):
            device.adopt_state(self.state)
        with self.main():
            self.device.finish()

    def main(self) -> AbstractContextManager[None]:
        return self._as(MAIN)

    def gossip(self) -> AbstractContextManager[None]:
        """Work as the gossip thread, without the wait at its end."""
        return self._as(GOSSIP)

    def _as(self, stream: str) -> AbstractContextManager[None]:
        return self.device.on(stream) if isinstance(self.device, ClockedDevice) else nullcontext()

    def hand_over(self) -> None:
        """Let one thread tell the other that it may go on: no mark, and no wait."""
        if isinstance(self.device, ClockedDevice):
            self.device.meet()

    def step(self, gradient: Tensor) -> None:
        with self.main():
            self.state.segments[0].x.sub_(gradient)

    def boundary(self) -> int:
        with self.main():
            return self.state.boundary(self.phase.at(self.now_s))

    def held(self) -> dict[str, Tensor]:
        held = {}
        for index, segment in enumerate(self.state.segments + self.state.moments):
            held[f"x {index}"], held[f"pending {index}"] = segment.x, brought(segment)
            if segment.x.dtype is not segment.pending.dtype and segment.role is Role.TRAINED:
                # Two inboxes round x at other times than one pending.
                held[f"x {index}"] = segment.x.double() + held.pop(f"pending {index}").double()
            for chunk in segment.chunks:
                if isinstance(chunk, BufferChunk):
                    held[f"seen {chunk.index}"] = chunk.seen
            if segment.c is not None:
                held["c"] = segment.c
        return {name: values.clone() for name, values in held.items()}


def brought(segment: Segment) -> Tensor:
    """Return what exchanges have brought that x has not yet."""
    return sum(segment._inboxes[1:], segment.pending)


def random_values(random: Random, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    return torch.tensor([random.randint(-9, 9) for _ in range(chunk.num_elements)], dtype=dtype)


def run_script(world: World, seed: int, wire: torch.dtype) -> list[object]:
    """Run at random; return the host's view of it."""
    random, seen = Random(seed), []
    chunks = world.state.carried([1])
    outs = [
        torch.empty(chunk.num_elements, dtype=wire if chunk.role is Role.TRAINED else chunk.x.dtype)
        for chunk in chunks
    ]
    for _ in range(6):
        theta = world.phase.start_exchange(world.now_s)
        for chunk, out in zip(chunks, outs, strict=True):
            peers = random_values(random, chunk, out.dtype)
            with world.gossip():
                seen.append(chunk.snapshot(theta, out))
                world.boundary() if random.random() < 0.5 else None
                seen.append(chunk.exchange(theta, out, peers, ALPHA_TILDE))
            peers.zero_()  # the link's next chunk lands there
            seen.append(out.clone())
            out.fill_(7.0)
        world.phase.end_exchange(world.now_s)
        world.now_s += random.random()
        gradient = random_values(random, chunks[0], chunks[0].x.dtype)[0]
        if chunks[0].x.dtype is chunks[0].pending.dtype:
            world.step(gradient)  # else its own rounding shows when x was rounded
        world.boundary()
        chunk = random.choice(chunks)
        out = torch.empty_like(chunk.x)
        choice = random.randrange(3)
        if choice == 0:  # rule 4
            with world.main():
                world.device.finish()
            world.hand_over()
        with world.gossip():
            match choice:
                case 0:  # as a sum in host memory, in its precision
                    chunk.replace(random_values(random, chunk, chunk.pending.dtype))
                    world.hand_over()
                case 1:
                    landed = torch.empty(chunk.num_elements, dtype=chunk.pending.dtype)
                    chunk.read_z(landed)
                    seen.append(landed.clone())
        with world.main():
            match random.randrange(3):
                case 0:
                    world.state.device.finish()
                    for each in world.state.chunks:
                        each.forget(slice(1, 5))
                case 1:
                    chunk.read(out, theta=world.phase.at(world.now_s))
                    seen.append(out)
    return seen


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        *((each, each) for each in (torch.float32, torch.bfloat16, torch.float64)),
        (torch.float32, torch.bfloat16),
    ],
)
def test_all_is_in_order_and_the_bits_are_those_of_host_memory(dtype, wire):
    for seed in range(4):
        # No flow: it comes at other times where values have two inboxes.
        host = World(Device(), dtype, 0.0, has_moment=True)
        device = World(ClockedDevice(), dtype, 0.0, has_moment=True)
        seen = [run_script(world, seed, wire) for world in (host, device)]
        for one, other in zip(*seen, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, seed
        held = device.held()
        for name, values in host.held().items():
            assert torch.equal(values, held[name]), (seed, name)


def test_steps_beside_exchanges_are_in_order():
    """Exchange chunk by chunk; step, and begin a boundary, wherever the gossip thread waits."""
    device = ClockedDevice()
    world = World(device, torch.float32, ETA, has_moment=True)

    def step() -> None:
        world.step(torch.ones(40))
        world.now_s += 0.5
        world.boundary()

    device.on_finish = step
    for _ in range(3):
        theta = world.phase.start_exchange(world.now_s)
        for chunk in world.state.carried([1]):
            out, peers = torch.zeros(2, chunk.num_elements)
            with world.gossip():
                chunk.snapshot(theta, out)
                step()
                chunk.exchange(theta, out, peers, ALPHA_TILDE)
        world.phase.end_exchange(world.now_s)
        step()


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_CUDA = [pytest.mark.cuda, NEEDS_CUDA]
BOTH = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("place", "kernels", "dtype", "num_chunks"),
    [
        # Few and large chunks, so that threads meet; or more, and two helpers at each boundary.
        *(("host", "torch", dtype, 2) for dtype in BOTH),
        *(("host", "numba", dtype, 7) for dtype in BOTH),
        ("stand-in", "torch", torch.float32, 5),
        pytest.param("cuda", "torch", torch.float32, 5, marks=ON_CUDA),
    ],
)
def test_two_threads_lose_nothing(monkeypatch, *, place, kernels, dtype, num_chunks):
    """Boundary, step and reading race snapshot and exchange, on the kernels that training uses.

    All numbers are multiples of 2**-8 and small, so every sum is exact: in the end x + pending is
    where it began, plus all steps, less half of all differences; and c is less all of them. (A step
    of bfloat16 parameters rounds, so those take none.)
    """
    num_values = 300_000 if place == "host" else 5000
    x = torch.zeros(num_values, dtype=dtype, device="cuda" if place == "cuda" else "cpu")
    if kernels == "numba":
        monkeypatch.setattr("gossipdp.dynamics.state.LEAST_HELPED_VALUES", num_values)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    segment = Segment(x, Role.TRAINED, chunk_bytes=x.nbytes // num_chunks)
    device = ClockedDevice(is_strict=False) if place == "stand-in" else None
    state = State([segment], device)
    state.compile(kernels)
    assert state.kernels.startswith(kernels)
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-5)  # so that all orders are met, and no thread waits 5 ms
        stack.callback(state.end_helpers)
        if device is not None:
            device.adopt_state(state)
            stack.enter_context(device.used())
        for seed in range(8 if place == "host" else 1):
            race(segment, state, seed)


def race(segment: Segment, state: State, seed: int) -> None:
    """Run eight rounds of exchanges (more would round in float32) beside steps and boundaries."""
    for chunk in state.chunks:
        chunk.replace(torch.zeros_like(chunk.x))
    total = torch.zeros(segment.x.numel())
    failures = []

    def gossip() -> None:
        try:
            random = Random(seed)
            with state.device.gossip_thread():
                for _ in range(8):
                    for chunk, differences in segment.split(total):
                        mine = torch.empty(chunk.num_elements)
                        peers = torch.full_like(mine, float(2 * random.randint(-2, 2)))
                        assert chunk.snapshot(0.0, mine)
                        norm = chunk.exchange(0.0, mine, peers, ALPHA_TILDE)
                        # torch.dot, in float32 on one thread, drifts 3e-4 where all are equal.
                        assert norm == pytest.approx(float((mine - peers).square().sum()), rel=1e-3)
                        differences += mine - peers
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=gossip)
    state.device.finish()
    thread.start()
    num_steps, out = 0, torch.empty_like(segment.x)
    while thread.is_alive():
        if num_steps < 100 and segment.x.dtype is torch.float32:
            segment.x += 2.0  # as an optimizer steps: without a lock
            num_steps += 1
            for chunk, room in segment.split(out) if not state.device.is_queued else ():
                chunk.read(room)
        state.boundary(0.0)
    thread.join()
    assert not failures, failures
    state.boundary(0.0, wait=True)
    state.device.finish()
    held = segment.x, brought(segment), segment.c
    x, pending, c = (values.to("cpu", copy=True).double() for values in held)
    assert torch.equal(x + pending, 2.0 * num_steps - 0.5 * total.double())
    assert torch.equal(c, -total.double())


def exchanged(x: Tensor, device: Device | None) -> list[Tensor]:
    """Return the last snapshot, x, c and what x could not hold, after exchanges and boundaries."""
    segment = Segment(x, Role.TRAINED, chunk_bytes=1 << 14)
    state, out = State([segment], device), torch.empty(x.shape, dtype=x.dtype)
    generator = torch.Generator().manual_seed(0)
    with state.device.gossip_thread():
        for number in range(3):
            peers = torch.randn(x.shape, generator=generator).to(x.dtype)
            pairs = zip(segment.split(out), segment.split(peers), strict=True)
            for (chunk, mine), (_, theirs) in pairs:
                chunk.snapshot(0.1 * number, mine)
                chunk.exchange(0.1 * number, mine, theirs, ALPHA_TILDE)
            state.boundary(0.1 * number + 0.05)
        held = [segment.x, segment.c, segment.copy()[0]]
        return [out, *(each.to("cpu", copy=True) for each in held)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [pytest.param("cuda", marks=ON_CUDA)])
def test_a_card_does_the_same_operations_with_the_same_bits(place, dtype):
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    here, host = exchanged(x.to(place), None), exchanged(x, HostAsCard())
    assert all(torch.equal(one, other) for one, other in zip(here, host, strict=True))


@pytest.mark.parametrize(("place", "wait"), [(0, True), (3, False)])
def test_the_gossip_thread_never_waits_for_a_step(place, wait):
    """Rule 5: the main thread knows that its step is done before it leaves a chunk's mark.

    If it does not wait for the chunk, that is so for one without inboxes.
    """
    device = ClockedDevice()
    world = World(device, torch.float32, ETA)
    chunk = world.state.chunks[place]
    with world.gossip():
        chunk.exchange(0.0, *torch.ones(2, chunk.num_elements), ALPHA_TILDE)
    world.step(torch.ones(40))
    stepped = device.clock(MAIN)[MAIN]
    assert device.clock(device.host).get(MAIN, 0) < stepped
    with world.main():
        world.state.boundary(1.0, wait=wait)
    assert device.clock(device.host)[MAIN] >= stepped


def test_with_inboxes_no_thread_waits_for_the_others_work():
    """Rule 5: the host is one boundary ahead of the device, and no exchange waits for a step."""
    device = ClockedDevice()
    world = World(device, torch.float32, ETA)
    chunk, steps = world.state.chunks[0], []
    for number in range(3):
        with world.gossip():
            out = torch.empty(chunk.num_elements)
            chunk.snapshot(0.0, out)
            chunk.exchange(0.0, out, torch.zeros(chunk.num_elements), ALPHA_TILDE)
        world.step(torch.ones(40))
        steps.append(device.clock(MAIN)[MAIN])
        assert world.boundary() == 0
        main, gossip = (device.clock(actor).get(MAIN, 0) for actor in (f"{MAIN}'s thread", GOSSIP))
        assert main < steps[number]
        assert gossip < steps[number]
        assert number == 0 or main >= steps[number - 1]
    skipped = []
    with world.gossip():
        chunk.exchange(0.0, *torch.ones(2, chunk.num_elements), ALPHA_TILDE)
        device.on_finish = lambda: skipped.append(world.boundary())
        chunk.snapshot(0.0, out)
    device.on_finish = None
    assert skipped == [1], "a boundary leaves out a chunk that is in use"
    assert world.boundary() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inboxes_hold_what_a_float64_reference_does(monkeypatch, dtype):
    """Exchanges, steps and boundaries at random; flow is the exchanges', or overdue."""
    monkeypatch.setattr("gossipdp.dynamics.update.MOST_AT_ONCE", 16)  # of the 40
    world = World(ClockedDevice(), dtype, ETA)
    random, (segment, *_) = Random(0), world.state.segments
    z, c = segment.x.double(), torch.zeros(40).double()  # z: x and what was brought
    now = theta = theta_c = 0.0
    num_overdue, is_filled = 0, False
    for number in range(60):
        if number % 7 == 0:  # as where an evaluation of the average begins or ends
            other = torch.full_like(segment.x, 9.0)
            world.device.adopt(other, is_x=True)
            with world.main():
                segment.swap(other)
        now, before = now + 0.8 * random.random(), segment.x.double()
        left = [math.exp(-2.0 * (phase - theta_c)) for phase in (theta, now)]
        share = 0.5 * (left[0] - left[1])
        match random.choice(["exchange", "step", "boundary"]):
            case "exchange":
                z += share * c
                c *= left[1]
                theta = theta_c = now
                is_filled = True
                parts = zip(segment.chunks, z.split(16), c.split(16), strict=True)
                for chunk, own, momentum in parts:
                    out = torch.empty(chunk.num_elements)
                    peers = random_values(random, chunk, torch.float32)
                    with world.gossip():
                        assert chunk.snapshot(now, out)
                        squared_norm = chunk.exchange(now, out, peers, ALPHA_TILDE)
                    torch.testing.assert_close(out.double(), own, rtol=0.0, atol=1e-4)
                    delta = out.double() - peers.double()
                    assert squared_norm == pytest.approx(float(delta.square().sum()))
                    own -= 0.5 * delta
                    momentum -= (ALPHA_TILDE - 0.5) * delta
            case "step":
                world.step(random_values(random, segment.chunks[0], dtype)[0])
                z += segment.x.double() - before
            case "boundary":
                if left[1] < 0.5 * left[0] and c.any() and not is_filled:
                    z += share * c
                    theta, num_overdue = now, num_overdue + 1
                with world.main():
                    assert world.state.boundary(now) == 0
                is_filled = False
                # Each inbox keeps what bfloat16 could not hold of x, which may have been larger.
                kept = 0.0 if dtype is torch.float32 else 2.0**-7 * float(z.abs().max())
                torch.testing.assert_close(segment.x.double(), z, rtol=0.0, atol=kept + 1e-4)
        held = segment.x.double() + brought(segment).double()
        torch.testing.assert_close(held, z, rtol=0.0, atol=1e-4)
        torch.testing.assert_close(segment.c.double(), c, rtol=0.0, atol=1e-4)
    assert num_overdue > 1


def test_who_hands_x_over_has_waited():
    """Rule 4. The gossip thread's part ends with a replaced chunk."""
    device = ClockedDevice()
    world = World(device, torch.float32, ETA)
    chunk, ones = world.state.chunks[0], torch.ones(16)
    world.step(torch.ones(40))
    world.hand_over()
    with world.gossip(), pytest.raises(OutOfOrderError):
        chunk.replace(ones)
    with world.main():
        device.finish()
    world.hand_over()
    with world.gossip():
        chunk.replace(ones)
    world.hand_over()
    world.step(torch.ones(40))


def optimizer_on(device: ClockedDevice) -> tuple[BetweenSteps, Callable[[], None], Tensor]:
    """Return what is told of an optimizer's steps, a step, and what each one writes, as bytes."""
    held = nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([held], lr=0.1, momentum=0.9)
    held.grad = torch.ones(100)
    optimizer.step()
    momentum = optimizer.state[held]["momentum_buffer"]
    device.adopt(held.data, held.grad, momentum)
    between = BetweenSteps([optimizer])
    between.attach(device.mark(), lambda: None)

    def step() -> None:
        with device.used():
            between.begins(optimizer)
            optimizer.step()
            between.ended(optimizer)
        device.meet()  # by the guard

    return between, step, momentum.view(torch.uint8)


def test_an_optimizers_state_is_read_when_the_device_has_done_its_step():
    """The main thread waits for the device at the end of a step if a joiner asks, and else not."""
    device = ClockedDevice()
    between, step, momentum = optimizer_on(device)
    room = torch.empty(400, dtype=torch.uint8)

    def copy() -> bool:
        with device.on(GOSSIP):
            is_copied = between._copy(momentum, room)
        device.meet()
        return is_copied

    for _ in range(3):
        step()
        assert not copy(), "nobody has waited for the device"
        step()
        assert copy()
        step()
        assert copy(), "more is likely to follow"
        step()  # for which it waits once more
    # If the main thread trains no more, another one waits for the device.
    between, step, momentum = optimizer_on(device)
    step()
    with device.on(GOSSIP):
        (described,) = between._describe().tensors
        assert described.data_ptr() == momentum.data_ptr()
        assert between._copy(described, torch.empty(400, dtype=torch.uint8))


def test_who_describes_an_optimizers_state_waits_for_the_end_of_a_later_step(monkeypatch):
    """The host is ahead: when a step's mark is past, the next one has been asked for."""
    device = ClockedDevice(is_strict=False)
    between, step, _ = optimizer_on(device)
    waits, wait = [], between._mark.wait

    def step_meanwhile() -> None:
        wait()
        waits.append(threading.current_thread().name)
        if len(waits) == 1:
            between._is_awaited = False  # seen before the describer has said that it waits
            step()

    monkeypatch.setattr(between._mark, "wait", step_meanwhile)
    with device.used():
        between._describe()
    assert len(waits) == 2


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_slot_is_used_again_only_when_the_device_is_done_with_it(is_pinned):
    """Pinned memory goes straight, and may change as soon as the call returns."""
    device = ClockedDevice()

    def of_host() -> Tensor:
        return device.pinned(32).view(torch.float32) if is_pinned else torch.empty(8)

    found, values = [], of_host()
    with device.used():
        slot = Slot(device, 32)
        for number in range(3):
            for more in (10.0, 20.0):
                there = slot.load(values.fill_(number + more))
                found.append(there.clone())
            there.add_(100.0)
            slot.store(out := of_host())
            found.append(out)
        assert (slot._between is None) == is_pinned
    expected = [number + more for number in range(3) for more in (10.0, 20.0, 120.0)]
    for each, value in zip(found, expected, strict=True):
        assert torch.equal(each, torch.full((8,), value))


class Driver:
    """The part of the driver that locks pages of a device, unless its ``status`` is an error."""

    def __init__(self) -> None:
        self.status, self.index, self.locked = 0, -1, dict[tuple[int, int], tuple[int, int]]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.status == 0:
            self.locked[address, self.index] = num_bytes, flags
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        if self.status == 0:
            del self.locked[address, self.index]
        return self.status


@pytest.fixture
def driver(monkeypatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(devices, "_never_unlocked", [])
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(
        torch.accelerator, "device_index", lambda index: patch.object(made, "index", index)
    )
    return made


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("is_peers", [False, True])
def test_pages_are_locked_as_long_as_somebody_holds_them(
    monkeypatch, card, driver, refuses, is_peers
):
    """Unless the driver refuses, all that lies within is pinned meanwhile.

    A refusal leaves an error behind, which the next launch takes away.
    """
    driver.status = 7 if refuses else 0
    device, values = device_of({torch.device("cuda:0")}), torch.zeros(64)
    device.load(0, values)
    memory = memoryview(values[8:24].numpy()).cast("B")
    flags = 9 if is_peers else 1  # those of cudaHostRegister: portable, and read alone
    expected = {} if refuses else {(values[8:24].data_ptr(), 0): (64, flags)}
    card.num_launches = 0
    held = device.pin(memory, is_peers=is_peers)
    assert (held is None, card.num_launches, driver.locked) == (refuses, refuses, expected)
    assert bool(device._slots) == is_peers, "another memory of this worker's has other slots"
    parts = values[8:24], values[8:9], values[23:24], values[7:9], values[23:25], values[0:4]
    assert list(map(device.is_pinned, parts)) == [not refuses] * 3 + [False] * 3
    del held
    assert not driver.locked
    forked = _Pinned(memory, 0, is_peers=is_peers)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del forked
    assert driver.locked == expected, "a forked child unlocks nothing"
    assert not devices._never_unlocked


def test_memory_that_cannot_be_unlocked_is_kept(driver):
    """The driver would take other memory at its place for it."""
    memory = memoryview(bytearray(64))
    pinned = _Pinned(memory, 0, is_peers=False)
    driver.status = 1
    del pinned
    assert devices._never_unlocked == [memory]


def test_an_interrupt_just_after_pages_were_locked_unlocks_them(driver):
    def interrupted(*given: int) -> int:
        Driver.cudaHostRegister(driver, *given)
        raise KeyboardInterrupt

    driver.cudaHostRegister = interrupted
    with pytest.raises(KeyboardInterrupt):
        _Pinned(memoryview(bytearray(64)), 0, is_peers=False)
    gc.collect()
    assert not driver.locked


@pytest.mark.cuda
@NEEDS_CUDA
def test_a_refusal_of_the_driver_leaves_no_error_behind():
    device = device_of({torch.device("cuda:0")})
    values = torch.arange(4096, dtype=torch.float32)
    memory = memoryview(values.view(torch.uint8).numpy())
    held = device.pin(memory, is_peers=False)
    assert values.is_pinned()
    assert device.is_pinned(values)
    with device.gossip_thread():
        assert device.pin(memory, is_peers=False) is None
        there = device.load(0, values)
        assert torch.equal((there + 1).cpu(), values + 1)
        device.on_device(values).copy_(there * 2)
        device.store(values)
    del held
    assert not values.is_pinned()
    assert torch.equal(values, 2 * torch.arange(4096, dtype=torch.float32))


def test_an_exchange_takes_the_snapshot_that_the_host_holds():
    """Whoever repeats a chunk in another form writes it where an earlier snapshot was."""
    world = World(ClockedDevice(), torch.float32, 0.0)
    one, other = world.state.chunks[:2]
    mine, apart, zeros = torch.empty(16), torch.empty(16), torch.zeros(16)
    with world.gossip():
        one.snapshot(0.0, mine)
        one.snapshot(0.0, apart)
        mine.fill_(3.0)
        assert one.exchange(0.0, mine, zeros, ALPHA_TILDE) == 16 * 9.0
        other.snapshot(0.0, mine)
        expected = float(other.x.square().sum())
        assert other.exchange(0.0, mine, zeros, ALPHA_TILDE) == expected


def test_after_an_interrupt_the_next_holder_waits_for_all():
    """Ctrl+C may end a holder before it has left the mark."""
    device = ClockedDevice()
    world = World(device, torch.float32, ETA)
    chunk = world.state.chunks[0]
    with world.main():
        chunk.order.__enter__()
        chunk.pending.add_(1.0)  # and here its thread is thrown out
        device.holders.clear()
    with world.gossip():
        chunk.snapshot(0.0, torch.empty(16))


def test_other_devices_and_several_are_refused():
    for name in ("meta", "mps:0", "xpu:1"):
        known = f"on {name}. Exchanges know the CPU and CUDA devices: move the module"
        with pytest.raises(ValueError, match=re.escape(known)):
            device_of({torch.device(name)})
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\); move the module to one"):
        device_of({torch.device("meta"), torch.device("cpu")})
    assert type(device_of(set())) is Device


def test_a_gpu_of_another_maker_is_for_those_who_ask_for_it(monkeypatch):
    for value, is_allowed in (("", False), ("1", False), ("yes", True)):
        monkeypatch.setenv("GOSSIPDP_UNTRIED_GPU", value)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        reason = refusal(torch.device("cuda:0"))
        assert (reason is None) is is_allowed
        assert is_allowed or "set GOSSIPDP_UNTRIED_GPU=yes to try it" in reason
        monkeypatch.setattr(torch.version, "hip", None)
        assert refusal(torch.device("cuda:0")) is None


def test_large_memory_is_zeros_on_page_ends_of_its_own(monkeypatch):
    asked: list[int] = []

    class Memory(mmap.mmap):
        def madvise(self, option: int) -> None:
            asked.append(option)
            super().madvise(option)
            raise OSError("this kernel has none")

    monkeypatch.setattr(mmap, "mmap", Memory)
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        length = (32 << 20) // dtype.itemsize
        values, others = (devices.zeros(length, dtype, cpu) for _ in range(2))
        assert (values.shape, values.dtype) == ((length,), dtype)
        assert values.data_ptr() % (2 << 20) == 0
        assert not values.any()
        values[:5].fill_(1.0)
        assert not others.any()
        assert not devices.zeros(length - 1, dtype, cpu).any()
    assert asked == [mmap.MADV_HUGEPAGE] * 6
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")  # a Python that was built beside an old C library
    assert not devices.zeros(length, dtype, cpu).any()
