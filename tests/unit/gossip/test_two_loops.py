"""Two workers' loops over real loopback links, in one thread and on a clock of the test's own."""

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
import torch
from links import World

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Segment, State
from gossipdp.gossip.loop import GossipLoop
from gossipdp.graph import build_graph
from gossipdp.graph.constants import Constants
from gossipdp.links import tls
from gossipdp.links.sockets import listen
from gossipdp.links.tcp import TcpTransport
from gossipdp.links.tls import Tls, TlsFiles
from gossipdp.protocol.members import ProgressEntry
from gossipdp.protocol.pairing import Exchanging, Idle
from gossipdp.protocol.worker import WorkerProtocol

TIMEOUT_S = 5.0
NUM_VALUES = 60_000


class Pair:
    """Workers 0 and 1, which have a link; each turns when the test says so."""

    def __init__(self, own_tls: Tls | None = None) -> None:
        self.now = 100.0
        self.generator = torch.Generator().manual_seed(0)
        self.segments = [Segment(self.draw(), Role.TRAINED, chunk_bytes=80_000) for _ in range(2)]
        listeners = [listen("127.0.0.1", 0) for _ in range(2)]
        self.loops = [self._loop(rank, listeners, own_tls) for rank in range(2)]
        members = [loop.protocol.membership.own for loop in self.loops]
        for loop in self.loops:
            loop.protocol.membership.merge_all(members)
            loop.start_exchanging()
        self.until(lambda: all(loop.protocol.live_links for loop in self.loops))

    def _loop(self, rank: int, listeners: list[Any], own_tls: Tls | None) -> GossipLoop:
        host, port = listeners[rank].getsockname()
        state, phase = State([self.segments[rank]]), Phase(0.4, 1.0)
        protocol = WorkerProtocol(
            rank=rank,
            incarnation=0,
            process_id=1000 + rank,
            host=host,
            port=port,
            constants=Constants.of(build_graph("ring", 2)),
            method="a2cid2",
            timeout_s=TIMEOUT_S,
            random=Random(rank),
            num_chunks=len(self.segments[rank].chunks),
        )

        def connect(handler: Any) -> TcpTransport:
            return TcpTransport(
                handler,
                World().identity(rank),
                b"secret",
                listeners[rank],
                tls=own_tls,
                clock=lambda: self.now,
                shared_memory="off",
            )

        return GossipLoop(protocol, state, phase, connect, lambda: self.now)

    def draw(self) -> torch.Tensor:
        return torch.randn(NUM_VALUES, generator=self.generator)

    def turn(self) -> None:
        for loop in self.loops:
            loop.turn(0.001)

    def until(self, condition: Callable[[], object]) -> None:
        """Turn both until a condition holds, while the clock stands still."""
        deadline_s = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < deadline_s
            self.turn()
            self.now += 1e-6  # a dial that is due comes due

    def step(self) -> None:
        """End a gradient step of both."""
        self.now += 0.5
        for loop in self.loops:
            loop.perform(loop.protocol.step(1, self.now))

    def states(self) -> list[Any]:
        return [loop.protocol.pairing.state for loop in self.loops]

    def mean(self) -> torch.Tensor:
        """Return the mean of z = x + c/2 over both, in float64."""
        total = torch.zeros(NUM_VALUES, dtype=torch.float64)
        for segment in self.segments:
            for chunk, out in segment.split(total):
                z = torch.empty(chunk.num_elements)
                chunk.read_z(z)
                out += z.double() / 2
        return total


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def make(*args: Any) -> Pair:
            pair = Pair(*args)
            for loop in pair.loops:
                stack.callback(loop.close)
            return pair

        yield make


def test_new_keys_come_between_exchanges_and_the_mean_is_conserved(
    make_pair: Callable[..., Pair], run_tls: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed in the middle, a link has brought one end chunks that the other never gets."""
    monkeypatch.setattr(tls, "MAX_RECORDS", 200)  # an exchange takes a tenth of that
    pair = make_pair(Tls(run_tls))
    links: set[Any] = set()
    expected = pair.mean()
    while sum(loop.protocol.exchanges_answered for loop in pair.loops) < 60:
        for loop, segment in zip(pair.loops, pair.segments, strict=True):
            links.add(loop._links[1 - loop.protocol.rank])
            gradient = pair.draw()
            segment.x += gradient
            expected += gradient.double() / 2
        pair.step()
        pair.until(
            lambda: (
                all(isinstance(state, Idle) for state in pair.states())
                and all(loop.protocol.live_links for loop in pair.loops)
            )
        )
    assert len(links) > 2 * 4, "links were made anew"
    torch.testing.assert_close(pair.mean(), expected, rtol=0, atol=1e-4)
    assert [loop.protocol.exchanges_failed for loop in pair.loops] == [0, 0]


def test_links_that_are_gone_are_forgotten(make_pair: Callable[..., Pair]) -> None:
    """A run of weeks makes many; each holds buffers and what its exchange was about."""
    pair = make_pair()
    gone: list[weakref.ref[Any]] = []
    for number in range(8):
        pair.step()
        pair.until(lambda: all(isinstance(state, Idle) for state in pair.states()))
        link = pair.loops[number % 2]._links[1 - number % 2]
        gone += [weakref.ref(loop._links[1 - rank]) for rank, loop in enumerate(pair.loops)]
        link.close("a test")
        del link
        pair.now += 0.5
        pair.until(lambda: not any(loop._links for loop in pair.loops))
        pair.until(lambda: all(loop.protocol.live_links for loop in pair.loops))
    pair.turn()
    gc.collect()
    assert sum(loop.protocol.exchanges_answered for loop in pair.loops) > 0
    assert [ref() for ref in gone] == [None] * 16


def test_news_of_many_workers_keeps_no_exchange_alive(make_pair: Callable[..., Pair]) -> None:
    """Heartbeats bring more bytes than a chunk, and nothing of the exchange."""
    pair = make_pair()
    one, other = pair.loops
    other._pump = lambda: None  # type: ignore[method-assign]
    while not all(isinstance(state, Exchanging) for state in pair.states()):
        pair.step()
        for _ in range(20):
            pair.turn()
    link = one._links[1]
    began, received = pair.now, link.bytes_received
    while not link.closed:
        pair.now += TIMEOUT_S / 20
        for loop in pair.loops:
            loop.protocol.progress.merge_all(
                [ProgressEntry(rank, 7, int(1e9 * pair.now), 1) for rank in range(2, 66)], pair.now
            )
        for _ in range(10):
            pair.turn()
        assert pair.now < began + 2 * TIMEOUT_S
    assert link.bytes_received > received + 2 * 4096
    assert pair.now >= began + TIMEOUT_S
    assert one.protocol.exchanges_failed == 1
