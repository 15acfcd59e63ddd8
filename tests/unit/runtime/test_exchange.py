"""Exchanges in each wire format, two workers in one thread; and the locks, with two threads."""

import math
import sys
import threading
from collections import deque
from itertools import pairwise
from random import Random

import pytest
import torch

from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Role, Segment, State
from gossipdp.protocol.messages import ExchangeId
from gossipdp.runtime import plain_exchange
from gossipdp.runtime.exchange import Exchange, PoisonFound
from gossipdp.runtime.frames import HEADER_BYTES, ChunkKey, FrameType
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.wire_formats import WIRE_FORMATS, wire_format

NUM_ELEMENTS = 1000
CHUNK = FrameType.EXCHANGE_CHUNK
ID = ExchangeId(0, 0, 1)


class QueueLink(Link):
    """Keeps chunks in a queue until the test delivers them."""

    def __init__(self) -> None:
        self.queue: deque[tuple[FrameType, ChunkKey, memoryview]] = deque()
        self.most_queued = 0
        self.sent = 0

    def send_chunk(self, frame_type, key, payload):
        self.queue.append((frame_type, key, payload))
        self.sent += HEADER_BYTES + len(payload)
        self.most_queued = max(self.most_queued, len(self.queue))

    @property
    def queued_chunks(self):
        return len(self.queue)

    @property
    def bytes_sent(self):
        return self.sent

    def send_control(self, data): ...
    def close(self, reason): ...

    queued_bytes = bytes_received = 0
    last_heard_s = 0.0
    closed = False


def make_shared(
    seed: int, clock=lambda: 0.0, dtype=torch.float32, num_elements=NUM_ELEMENTS, chunk_bytes=256
) -> SharedState:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_elements, generator=generator).to(dtype)
    state = State([Segment(x, Role.TRAINED, chunk_bytes=chunk_bytes)])
    return SharedState(state, Phase(0.4, 1.0), clock)


def x_and_z(shared: SharedState) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + pending, and x + c/2 with it, of all segments, in float64."""
    segments = shared.state.segments
    x = [segment.x.double() + segment.pending.double() for segment in segments]
    c = [0.0 if s.c is None else s.c.double() for s in segments]
    return torch.cat(x), torch.cat([a + 0.5 * b for a, b in zip(x, c, strict=True)])


def deliver(link: QueueLink, to: Exchange) -> None:
    frame_type, key, payload = link.queue.popleft()
    room = to.landing(frame_type, key, len(payload))
    assert room is not None, (frame_type, key)
    room[:] = payload
    assert to.expects(frame_type, key)
    to.landed(frame_type, key, room)


def start(shareds, alpha_tilde=1.3, formats=None):
    """Begin an exchange between two, in their wire formats (by default new plain ones)."""
    formats = formats or [wire_format("parameters", shared) for shared in shareds]
    links = [QueueLink() for _ in shareds]
    return links, [
        form.start(link, ID, alpha_tilde) for form, link in zip(formats, links, strict=True)
    ]


def exchange(shareds, formats, random: Random, alpha_tilde=1.3):
    """One whole exchange, frames and turns of the two ends in an order that is drawn."""
    links, exchanges = start(shareds, alpha_tilde, formats)
    idle = 0
    while not all(each.is_finished for each in exchanges):
        end = random.randrange(2)
        before = links[end].sent
        if random.random() < 0.5:
            exchanges[end].pump()
        elif links[end].queue:
            deliver(links[end], exchanges[1 - end])
            before = -1
        idle = 0 if links[end].sent != before else idle + 1
        assert idle < 100, "nothing moves any more"
    for each in exchanges:
        each.end()
    return links, exchanges


@pytest.mark.parametrize("order", ["in turn", "one side first"])
def test_an_exchange_averages_and_conserves_the_mean(order):
    shareds = [make_shared(0), make_shared(1)]
    (x0, z0), (x1, z1) = map(x_and_z, shareds)
    links, exchanges = start(shareds)
    while not all(exchange.is_finished for exchange in exchanges):
        for exchange in exchanges:
            exchange.pump()
        for here, there in ((0, 1), (1, 0)):
            burst = len(links[here].queue) if order == "one side first" else 1
            for _ in range(min(burst, len(links[here].queue))):
                deliver(links[here], exchanges[there])
    for exchange in exchanges:
        exchange.end()
    (y0, w0), (y1, w1) = map(x_and_z, shareds)
    assert torch.allclose(y0, y1, atol=1e-6)
    assert torch.allclose(w0 + w1, z0 + z1, atol=1e-6)
    assert exchanges[0].squared_distance == exchanges[1].squared_distance
    assert exchanges[0].squared_distance == pytest.approx(float((x0 - x1).square().sum()), rel=1e-5)
    assert all(link.most_queued <= plain_exchange.WINDOW for link in links)


def test_chunks_of_another_exchange_or_out_of_turn_are_not_taken():
    links, exchanges = start([make_shared(0), make_shared(1)])
    exchanges[0].pump()
    size = len(links[0].queue[0][2])
    assert exchanges[1].landing(CHUNK, ChunkKey(0, 0, 1, 0), size) is not None
    assert exchanges[1].landing(FrameType.EXCHANGE_REPEAT, ChunkKey(0, 0, 1, 0), size) is None
    for key, length in [
        (ChunkKey(0, 0, 2, 0), size),
        (ChunkKey(0, 0, 1, 1), size),
        (ChunkKey(0, 0, 1, 0), size - 4),
        (ChunkKey(0, 0, 1, 10**6), size),
    ]:
        assert exchanges[1].landing(CHUNK, key, length) is None


def test_poison_is_not_sent():
    shared = make_shared(0)
    shared.state.segments[0].x[70] = math.inf
    (link,), (exchange,) = start([shared])
    with pytest.raises(PoisonFound) as found:
        exchange.pump()
    assert found.value.ours
    assert len(link.queue) == 1  # the first chunk, which is sound


def test_poison_is_not_applied():
    shared = make_shared(0)
    _, (exchange,) = start([shared])
    exchange.pump()
    key = ChunkKey(0, 0, 1, 0)
    room = exchange.landing(CHUNK, key, 256)
    assert room is not None
    room[:] = torch.full((64,), math.nan).view(torch.uint8).numpy().data
    before = x_and_z(shared)[0]
    with pytest.raises(PoisonFound) as found:
        exchange.landed(CHUNK, key, room)
    assert not found.value.ours
    assert torch.equal(x_and_z(shared)[0], before)


def test_a_boundary_in_mid_exchange_changes_nothing_that_others_see():
    shareds = [make_shared(0), make_shared(1)]
    reference = [make_shared(0), make_shared(1)]
    for pair, with_boundaries in ((shareds, True), (reference, False)):
        links, exchanges = start(pair)
        while not all(exchange.is_finished for exchange in exchanges):
            for exchange in exchanges:
                exchange.pump()
            for here, there in ((0, 1), (1, 0)):
                deliver(links[here], exchanges[there])
                if with_boundaries:
                    pair[here].boundary(0)
    for one, other in zip(shareds, reference, strict=True):
        assert torch.allclose(x_and_z(one)[0], x_and_z(other)[0], atol=1e-6)
        assert torch.allclose(x_and_z(one)[1], x_and_z(other)[1], atol=1e-6)


def test_the_boundary_leaves_a_chunk_in_use_for_the_next_time():
    shared = make_shared(0)
    shared.state.chunks[3].pending.fill_(1.0)
    shared.state.chunks[3]._has_pending = True
    with shared._locks[3]:
        assert shared.boundary(0) == 1
    assert shared.state.chunks[3].pending[0] == 1.0
    assert shared.boundary(0) == 0
    assert shared.state.chunks[3].pending[0] == 0.0


@pytest.fixture
def switching_often():
    """Let threads take turns many times a millisecond: all orders are met, and none waits 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_two_threads_lose_nothing(switching_often):
    """The gossip thread adds, the main thread moves to x: in the end every addition is there."""
    shared = make_shared(0)
    start_sum = float(x_and_z(shared)[0].sum())
    rounds = 150
    ahead = [torch.ones(chunk.num_elements) for chunk in shared.state.chunks]
    behind = [torch.zeros(chunk.num_elements) for chunk in shared.state.chunks]

    def gossip() -> None:
        for _ in range(rounds):
            for chunk, one, zero in zip(shared.state.chunks, ahead, behind, strict=True):
                # delta = -1: half of it is added to every element.
                shared.exchange(chunk, zero, one, 0.5)

    thread = threading.Thread(target=gossip)
    thread.start()
    while thread.is_alive():
        shared.boundary(0)
    thread.join()
    shared.boundary(0, wait=True)
    expected = start_sum + 0.5 * rounds * NUM_ELEMENTS
    assert float(shared.state.segments[0].x.double().sum()) == pytest.approx(expected, rel=1e-5)
    assert not shared.state.segments[0].pending.any()


# Wire formats.


def mixed_shared(seed: int, scale: float = 1.0) -> SharedState:
    """Trained parameters of two precisions and buffers, over several chunks each."""
    generator = torch.Generator().manual_seed(seed)

    def values(count: int) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator)

    segments = [
        Segment(values(3000), Role.TRAINED, chunk_bytes=1024),
        Segment(values(700).abs(), Role.BUFFER, chunk_bytes=1024),
        Segment(values(1501).double(), Role.TRAINED, chunk_bytes=4096),
        Segment(torch.arange(5), Role.COPIED),
    ]
    return SharedState(State(segments), Phase(0.4, 1.0), lambda: 0.0)


def exchanged_z(shared: SharedState) -> torch.Tensor:
    """Return z of all that is exchanged."""
    segments = [s for s in shared.state.segments if s.role.is_exchanged]
    z = [s.x.double() + s.pending.double() for s in segments]
    return torch.cat(
        [a if s.c is None else a + 0.5 * s.c.double() for s, a in zip(segments, z, strict=True)]
    )


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_every_format_conserves_the_mean_of_z(name):
    """To the rounding of the sums alone: 1e-15 for what is held in float64."""
    shareds = [mixed_shared(0), mixed_shared(1)]
    formats = [wire_format(name, shared) for shared in shareds]
    before = sum(map(exchanged_z, shareds))
    random = Random(0)
    for _ in range(6):
        _, ends = exchange(shareds, formats, random)
        assert ends[0].squared_distance == ends[1].squared_distance
    after = sum(map(exchanged_z, shareds))
    assert torch.allclose(after, before, rtol=0, atol=3e-6)
    assert torch.allclose(after[3700:], before[3700:], rtol=0, atol=1e-14)
    assert ends[0].squared_distance < 1e-3 * 9000  # of two standard normal vectors


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_both_ends_apply_the_same_delta_with_opposite_signs(name):
    shareds = [mixed_shared(0), mixed_shared(1)]
    formats = [wire_format(name, shared) for shared in shareds]
    random = Random(1)
    for _ in range(4):
        for shared in shareds:
            for segment in shared.state.segments:
                if segment.role.is_exchanged:
                    segment.x += segment.pending.to(segment.x.dtype)
                    segment.pending.zero_()
        exchange(shareds, formats, random)
        for mine, peers in zip(*(shared.state.segments for shared in shareds), strict=True):
            assert torch.equal(mine.pending, -peers.pending)
            assert mine.c is None or torch.equal(mine.c, -peers.c)


def test_buffers_stay_exact_in_every_format():
    for name in WIRE_FORMATS:
        shareds = [mixed_shared(0), mixed_shared(1)]
        before = [shared.state.segments[1].x.clone() for shared in shareds]
        exchange(shareds, [wire_format(name, shared) for shared in shareds], Random(0))
        for shared in shareds:
            buffers = shared.state.segments[1]
            assert torch.allclose(buffers.x + buffers.pending, (before[0] + before[1]) / 2)


def test_bytes_at_the_link():
    sent = {}
    for name in WIRE_FORMATS:
        shareds = [make_shared(seed, num_elements=60_000, chunk_bytes=1 << 17) for seed in (0, 1)]
        formats = [wire_format(name, shared) for shared in shareds]
        links, ends = exchange(shareds, formats, Random(0))
        if name == "lattice8":  # the first exchange finds out how far apart the two are
            assert all(end.num_repeated == 2 for end in ends)
            links, ends = exchange(shareds, formats, Random(0))
            assert all(end.num_repeated == 0 for end in ends)
        sent[name] = links[0].bytes_sent
    assert sent["bfloat16"] / sent["parameters"] == pytest.approx(1 / 2, rel=0.03)
    assert sent["lattice8"] / sent["parameters"] == pytest.approx(1 / 4, rel=0.03)


def test_low_precision_parameters_are_sent_as_they_are_or_in_code():
    sent = {}
    for name in WIRE_FORMATS:
        shareds = [make_shared(seed, dtype=torch.bfloat16) for seed in (0, 1)]
        formats = [wire_format(name, shared) for shared in shareds]
        for _ in range(3):
            links, _ = exchange(shareds, formats, Random(0))
        sent[name] = links[0].bytes_sent
        x, y = (x_and_z(shared)[0] for shared in shareds)
        assert torch.allclose(x, y, atol=1e-2)
    assert sent["bfloat16"] == sent["parameters"] > sent["lattice8"]


@pytest.mark.parametrize("name", ["parameters", "lattice8"])
def test_many_agree_to_the_level_of_float32(name):
    """Plain gossip on a ring of 6: the error of the code shrinks with the distance."""
    shareds = [make_shared(seed, chunk_bytes=2048) for seed in range(6)]
    formats = [wire_format(name, shared) for shared in shareds]
    random = Random(3)
    distances = []
    for step in range(250):
        i = random.randrange(6)
        pair = (i, (i + 1) % 6)
        exchange([shareds[k] for k in pair], [formats[k] for k in pair], random, alpha_tilde=0.5)
        if step % 50 == 49:
            x = torch.stack([x_and_z(shared)[0] for shared in shareds])
            distances.append(float((x - x.mean(0)).square().mean()))
    floor = 3e-14
    assert all(late < max(0.3 * early, floor) for early, late in pairwise(distances))
    assert distances[-1] < floor  # float32 values of 1 to 4 are 1e-7 to 5e-7 apart


def test_a_distance_beyond_the_steps_is_repeated_and_learnt():
    shareds = [make_shared(0, chunk_bytes=2048), make_shared(0, chunk_bytes=2048)]
    formats = [wire_format("lattice8", shared) for shared in shareds]
    random = Random(0)
    exchange(shareds, formats, random)
    _, ends = exchange(shareds, formats, random)
    assert [end.num_repeated for end in ends] == [0, 0]
    # One value of one worker jumps, as no exchange before has shown.
    shareds[0].state.segments[0].x[600] += 50.0
    z = sum(x_and_z(shared)[1] for shared in shareds)
    _, ends = exchange(shareds, formats, random)
    assert [end.num_repeated for end in ends] == [1, 1]
    x, y = (x_and_z(shared)[0] for shared in shareds)
    assert abs(float(x[600] - y[600])) < 50 * 2**-7
    assert torch.allclose(sum(x_and_z(shared)[1] for shared in shareds), z, atol=1e-5)
    shareds[1].state.segments[0].x[600] += 50.0
    _, ends = exchange(shareds, formats, random)
    assert [end.num_repeated for end in ends] == [0, 0]


def test_hostile_steps_and_codes_end_in_a_repeat_or_in_nothing_applied():
    shareds = [make_shared(0), make_shared(1)]
    before = x_and_z(shareds[0])[0]
    links, ends = start(shareds, formats=[wire_format("lattice8", s) for s in shareds])
    ends[0].pump()
    frame_type, key, steps = links[0].queue.popleft()
    assert frame_type is FrameType.EXCHANGE_STEPS
    assert ends[0].landing(CHUNK, ChunkKey(0, 0, 1, 0), 68) is None, "steps come first"
    for step in (-128, -10, 127):
        ends[0].end()
        ends[0] = wire_format("lattice8", shareds[0]).start(links[0], ID, 1.3)
        ends[0].pump()
        links[0].queue.clear()
        room = ends[0].landing(frame_type, key, len(steps))
        room[:] = torch.full((len(steps),), step, dtype=torch.int8).view(torch.uint8).numpy().data
        ends[0].landed(frame_type, key, room)
        ends[0].pump()
        assert [kind for kind, *_ in links[0].queue] == [CHUNK, CHUNK]
        for kind, payload in (
            (CHUNK, Random(0).randbytes(68)),
            (FrameType.EXCHANGE_VERDICT, b"\x01"),
        ):
            chunk_key = ChunkKey(0, 0, 1, 0)
            room = ends[0].landing(kind, chunk_key, len(payload))
            room[:] = payload
            ends[0].landed(kind, chunk_key, room)
        verdicts = [bytes(data) for kind, _, data in links[0].queue if len(data) == 1]
        assert verdicts == [b"\x00"], "random bytes have not the checksum of what they decode to"
        assert torch.equal(x_and_z(shareds[0])[0], before)
        assert ends[0].landing(FrameType.EXCHANGE_VERDICT, ChunkKey(0, 0, 1, 0), 1) is None
        infinite = torch.full((64,), math.inf, dtype=torch.bfloat16)
        room = ends[0].landing(FrameType.EXCHANGE_REPEAT, chunk_key, 128)
        room[:] = infinite.view(torch.uint8).numpy().data
        with pytest.raises(PoisonFound) as found:
            ends[0].landed(FrameType.EXCHANGE_REPEAT, chunk_key, room)
        assert not found.value.ours
        assert torch.equal(x_and_z(shareds[0])[0], before)
        links[0].queue.clear()


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_no_format_sends_poison(name):
    shareds = [make_shared(0), make_shared(1)]
    shareds[0].state.segments[0].x[130] = math.nan
    formats = [wire_format(name, shared) for shared in shareds]
    with pytest.raises(PoisonFound) as found:
        exchange(shareds, formats, Random(0))
    assert found.value.ours
    assert not torch.isnan(x_and_z(shareds[1])[0]).any()


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="choose one of: parameters, bfloat16, lattice8"):
        wire_format("float7", make_shared(0))
