"""Shared state and exchanges, two workers in one thread; and the locks, with two threads."""

import math
import threading
from collections import deque

import pytest
import torch

from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Role, Segment, State
from gossipdp.protocol.messages import ExchangeId
from gossipdp.runtime.exchange import WINDOW, Exchange, ExchangeBuffers, PoisonFound
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState

NUM_ELEMENTS = 1000
ID = ExchangeId(0, 0, 1)


class QueueLink(Link):
    """Keeps chunks in a queue until the test delivers them."""

    def __init__(self) -> None:
        self.queue: deque[tuple[ChunkKey, memoryview]] = deque()
        self.most_queued = 0

    def send_chunk(self, frame_type, key, payload):
        assert frame_type is FrameType.EXCHANGE_CHUNK
        self.queue.append((key, payload))
        self.most_queued = max(self.most_queued, len(self.queue))

    @property
    def queued_chunks(self):
        return len(self.queue)

    def send_control(self, data): ...
    def close(self, reason): ...

    queued_bytes = bytes_sent = bytes_received = 0
    last_heard_s = 0.0
    closed = False


def make_shared(seed: int, clock=lambda: 0.0, dtype=torch.float32) -> SharedState:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_ELEMENTS, generator=generator).to(dtype)
    state = State([Segment(x, Role.TRAINED, chunk_bytes=256)])
    return SharedState(state, Phase(0.4, 1.0), clock)


def x_and_z(shared: SharedState) -> tuple[torch.Tensor, torch.Tensor]:
    (segment,) = shared.state.segments
    x = segment.x.double() + segment.pending.double()
    return x, x + 0.5 * segment.c.double()


def deliver(link: QueueLink, to: Exchange) -> None:
    key, payload = link.queue.popleft()
    room = to.landing(key, len(payload))
    assert room is not None
    room[:] = payload
    to.landed()


def start(shareds, alpha_tilde=1.3):
    links = [QueueLink() for _ in shareds]
    return links, [
        Exchange(shared, link, ID, alpha_tilde, ExchangeBuffers(shared))
        for shared, link in zip(shareds, links, strict=True)
    ]


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
    assert all(link.most_queued <= WINDOW for link in links)


def test_chunks_of_another_exchange_or_out_of_turn_are_not_taken():
    links, exchanges = start([make_shared(0), make_shared(1)])
    exchanges[0].pump()
    size = len(links[0].queue[0][1])
    assert exchanges[1].landing(ChunkKey(0, 0, 1, 0), size) is not None
    for key, length in [
        (ChunkKey(0, 0, 2, 0), size),
        (ChunkKey(0, 0, 1, 1), size),
        (ChunkKey(0, 0, 1, 0), size - 4),
        (ChunkKey(0, 0, 1, 10**6), size),
    ]:
        assert exchanges[1].landing(key, length) is None


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
    room = exchange.landing(ChunkKey(0, 0, 1, 0), 256)
    assert room is not None
    room[:] = torch.full((64,), math.nan).view(torch.uint8).numpy().data
    before = x_and_z(shared)[0]
    with pytest.raises(PoisonFound) as found:
        exchange.landed()
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


def test_two_threads_lose_nothing():
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
