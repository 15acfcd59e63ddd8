"""Two workers' loops over real loopback links, in one thread and on a clock of the test's own."""

import time
from collections.abc import Callable
from random import Random
from typing import Any

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
from gossipdp.links.tls import Tls
from gossipdp.protocol.pairing import Idle
from gossipdp.protocol.worker import WorkerProtocol

TIMEOUT_S = 5.0
NUM_VALUES = 60_000


class Pair:
    """Workers 0 and 1, which have a link; each turns when the test says so."""

    def __init__(self, own_tls: Tls) -> None:
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

    def _loop(self, rank: int, listeners: list[Any], own_tls: Tls) -> GossipLoop:
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

    def mean(self) -> torch.Tensor:
        """Return the mean of z = x + c/2 over both, in float64."""
        total = torch.zeros(NUM_VALUES, dtype=torch.float64)
        for segment in self.segments:
            for chunk, out in segment.split(total):
                z = torch.empty(chunk.num_elements)
                chunk.read_z(z)
                out += z.double() / 2
        return total


def test_new_keys_come_between_exchanges_and_the_mean_is_conserved(run_tls, monkeypatch):
    """Closed in the middle, a link has brought one end chunks that the other never gets."""
    monkeypatch.setattr(tls, "MAX_RECORDS", 200)  # an exchange takes a tenth of that
    pair = Pair(Tls(run_tls))
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
            lambda: all(
                isinstance(loop.protocol.pairing.state, Idle) and loop.protocol.live_links
                for loop in pair.loops
            )
        )
    assert len(links) > 2 * 4, "no link was replaced"
    torch.testing.assert_close(pair.mean(), expected, rtol=0, atol=1e-4)
    assert [loop.protocol.exchanges_failed for loop in pair.loops] == [0, 0]
    for loop in pair.loops:
        loop.close()
