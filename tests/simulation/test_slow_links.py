"""Nobody is left out for a slow link: consolidation where every chunk takes seconds.

The machines themselves, joined by links that carry one chunk after another and are shared by what
passes at a time. Nothing is lost, nobody stalls, and no view changes, so one epoch has to do.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gossipdp.protocol.actions import (
    Commit,
    FinishChunk,
    Finished,
    Send,
    SendPartial,
    SendResult,
)
from gossipdp.protocol.consolidate import Consolidation
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import Epoch
from gossipdp.protocol.reduction import TICKS_PER_TIMEOUT

TIMEOUT_S = 5.0
WORD_S = 0.02
LATEST_END_S = 20_000.0
Chunk = tuple[type[SendPartial] | type[SendResult], Epoch, int]


class SlowLinks:
    """Workers whose links take ``chunk_s[rank]`` seconds for a chunk that is alone on its way."""

    def __init__(self, chunk_s: list[float], num_chunks: int) -> None:
        self.now = 0.0
        self.chunk_s = chunk_s
        self.ranks = range(len(chunk_s))
        self.workers = [
            Consolidation(rank, 100 + rank, num_chunks, is_linked=lambda _: True)
            for rank in self.ranks
        ]
        self.status = [Status.DONE for _ in self.ranks]
        self.commits: dict[int, Commit] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queues: dict[tuple[int, int], list[Chunk]] = {}
        self._under_way: dict[tuple[int, int], Chunk] = {}

    def run(self) -> None:
        self._review()
        for rank in self.ranks:
            self._after(0.01 * rank, lambda rank=rank: self._tick(rank))
        while self._events and set(self.status) != {Status.LEFT} and self.now < LATEST_END_S:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def _review(self) -> None:
        members = [
            Member(rank, 0, 100 + rank, status, "127.0.0.1", 1000 + rank)
            for rank, status in enumerate(self.status)
        ]
        for rank in self.ranks:
            self._perform(rank, lambda worker: worker.review(members))

    def _tick(self, rank: int) -> None:
        moving: dict[Epoch, set[int]] = {}
        for (sender, peer), (_, epoch, _) in self._under_way.items():
            if rank in (sender, peer):
                moving.setdefault(epoch, set()).update({sender, peer} - {rank})
        heard = set(self.ranks) - {rank}
        self._perform(rank, lambda worker: worker.tick(heard, moving))
        self._after(TIMEOUT_S / TICKS_PER_TIMEOUT, lambda: self._tick(rank))

    def _perform(self, rank: int, call: Callable[[Consolidation], list[Any]]) -> None:
        if self.status[rank] is Status.LEFT:
            return
        for action in call(self.workers[rank]):
            match action:
                case Send(peer=peer, message=message):
                    self._after(
                        WORD_S,
                        lambda peer=peer, message=message: self._perform(
                            peer, lambda worker: worker.receive(rank, message)
                        ),
                    )
                case SendPartial(peer=peer, epoch=epoch, chunk=chunk):
                    self._queue(rank, peer, (SendPartial, epoch, chunk))
                case SendResult(peer=peer, origin=epoch, chunk=chunk):
                    self._queue(rank, peer, (SendResult, epoch, chunk))
                case FinishChunk(epoch=epoch, chunk=chunk):
                    self._after(
                        0.0,
                        lambda epoch=epoch, chunk=chunk: self._perform(
                            rank, lambda worker: worker.chunk_finished(epoch, chunk, 1.0)
                        ),
                    )
                case Commit():
                    self.commits[rank] = action
                case Finished():
                    self.status[rank] = Status.LEFT
                    self._after(WORD_S, self._review)

    def _queue(self, sender: int, peer: int, chunk: Chunk) -> None:
        queue = self._queues.setdefault((sender, peer), [])
        if chunk not in queue:
            queue.append(chunk)
        self._pump(sender, peer)

    def _pump(self, sender: int, peer: int) -> None:
        queue = self._queues[sender, peer]
        if not queue or (sender, peer) in self._under_way:
            return
        chunk = queue.pop(0)
        self._under_way[sender, peer] = chunk
        num_out = sum(link[0] == sender for link in self._under_way)
        num_in = sum(link[1] == peer for link in self._under_way)
        seconds = max(self.chunk_s[sender] * num_out, self.chunk_s[peer] * num_in)
        self._after(seconds, lambda: self._land(sender, peer, chunk))

    def _land(self, sender: int, peer: int, chunk: Chunk) -> None:
        kind, epoch, index = chunk
        del self._under_way[sender, peer]
        is_sum = kind is SendPartial

        def landed(worker: Consolidation) -> list[Any]:
            if is_sum:  # dropped where it is not awaited
                return worker.partial_landed(sender, epoch, index)
            return worker.result_landed(sender, epoch, index, 1.0)

        self._perform(peer, landed)
        self._pump(sender, peer)


@pytest.mark.parametrize(
    ("chunk_s", "num_chunks"),
    [
        ([3.4] * 2, 256),
        ([1.34] * 3, 256),
        ([6.7] * 3, 64),
        ([0.34, 0.34, 13.4, 0.34], 32),
        ([3.4] * 8, 64),
        ([1.3] * 64, 64),
    ],
    ids=["2", "3", "3-slower", "4-of-which-one-slow", "8", "64"],
)
def test_one_epoch_over_slow_links_averages_all(chunk_s: list[float], num_chunks: int) -> None:
    network = SlowLinks(chunk_s, num_chunks)
    network.run()
    assert set(network.status) == {Status.LEFT}
    assert {(commit.origin.number, commit.num_members) for commit in network.commits.values()} == {
        (1, len(chunk_s))
    }
    assert all(worker.left_out == {} for worker in network.workers)
