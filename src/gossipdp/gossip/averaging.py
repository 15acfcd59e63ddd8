"""The data side of consolidation: the protocol decides, this adds, divides, sends and lands.

x holds this worker's input until the commit. ``sums``, in host memory of their own, first take the
partial sums and then the result. So at every moment x + pending is this worker's parameters, also
for a main thread that no longer waits in ``consolidate``. Driven by the gossip thread.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Role, State
from gossipdp.dynamics.update import is_finite
from gossipdp.gossip.codec import tensor_bytes
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.link import Link
from gossipdp.protocol.actions import (
    Commit,
    DataAction,
    FinishChunk,
    Finished,
    MeasureDistance,
    Prepare,
    SendPartial,
    SendResult,
)
from gossipdp.protocol.messages import Epoch
from gossipdp.protocol.worker import Action, WorkerProtocol

MAX_QUEUED_CHUNKS = 4


@dataclass(frozen=True)
class Outcome:
    """What was committed, and of which workers in vain nothing more was awaited."""

    consensus_distance: float
    num_workers: int
    left_out: tuple[int, ...] = ()


class Averaging:
    """Carries out the consolidation's actions on the parameters.

    Args:
        state: the parameters.
        protocol: told what has landed and what was measured.
        links: by peer; the loop's own table, which it keeps up to date.
        perform: does the actions that the protocol answers with.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        state: State,
        protocol: WorkerProtocol,
        links: Mapping[int, Link],
        perform: Callable[[list[Action]], None],
        clock: Callable[[], float],
    ) -> None:
        self.has_begun = False
        self.outcome: Outcome | None = None
        self._on_end: Callable[[Outcome], None] | None = None
        self._state = state
        self._sums: list[Tensor] = []
        self._protocol = protocol
        self._links = links
        self._perform = perform
        self._clock = clock
        self._chunks = state.averaged_chunks + state.copied_chunks
        self._num_averaged = len(state.averaged_chunks)
        # Integer results wait here for the commit.
        self._copied: dict[int, Tensor] = {}
        self._queues: dict[int, deque[tuple[FrameType, Epoch, int]]] = {}
        # One landing place a peer: the children's sums and the parent's result come side by side.
        self._landings: dict[int, Tensor] = {}

    def on_end(self, callback: Callable[[Outcome], None]) -> None:
        """Call ``callback`` in the loop's thread when this worker may leave."""
        self._on_end = callback

    def perform(self, action: DataAction) -> None:
        """Do one action of the consolidation."""
        match action:
            case Prepare():
                self._prepare()
            case SendPartial(peer=peer, epoch=epoch, chunk=chunk):
                self._queue(peer, FrameType.PARTIAL_CHUNK, epoch, chunk)
            case SendResult(peer=peer, origin=origin, chunk=chunk):
                self._queue(peer, FrameType.RESULT_CHUNK, origin, chunk)
            case FinishChunk(chunk=chunk, num_members=num_members):
                self._sums[chunk].div_(num_members)
            case MeasureDistance(origin=origin):
                distance = sum(
                    chunk.squared_distance(self._sums[chunk.index])
                    for chunk in self._state.chunks
                    if chunk.role is Role.TRAINED
                )
                self._perform(self._protocol.distance_measured(origin, distance, self._clock()))
            case Commit(consensus_distance=distance, num_members=num_members):
                left_out = self._protocol.consolidation.left_out
                self._commit(Outcome(distance, num_members, left_out))
            case Finished():
                assert self.outcome is not None
                assert self._on_end is not None
                self._on_end(self.outcome)

    def _prepare(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._state.boundary(math.inf, wait=True)  # x is x + pending + c/2 from here on
        else:
            # A new attempt: what is on its way was read from the sums that now start anew.
            self._queues.clear()
            for link in self._links.values():
                if link.queued_chunks:
                    link.close("consolidation starts anew")
        if not self._sums:
            self._sums = [
                torch.empty(chunk.num_elements, dtype=chunk.pending.dtype)
                for chunk in self._state.averaged_chunks
            ]
        for chunk, total in zip(self._state.averaged_chunks, self._sums, strict=True):
            chunk.read(total)
        self._copied = {
            chunk.index: torch.empty_like(chunk.x, device="cpu")
            for chunk in self._state.copied_chunks
        }
        for chunk in self._state.copied_chunks:
            chunk.read(self._copied[chunk.index])

    def _commit(self, outcome: Outcome) -> None:
        self.outcome = outcome
        for chunk in self._chunks:
            chunk.replace(self._values(chunk.index))

    # Sending.

    def _queue(self, peer: int, frame_type: FrameType, epoch: Epoch, chunk: int) -> None:
        queue = self._queues.setdefault(peer, deque())
        if (frame_type, epoch, chunk) not in queue:  # asked for again while it waits here
            queue.append((frame_type, epoch, chunk))

    def link_lost(self, peer: int) -> None:
        """Forget what was to be sent to ``peer``; the protocol asks for it again."""
        self._queues.pop(peer, None)
        self._landings.pop(peer, None)

    def pump(self) -> None:
        """Send what is queued as far as the links' own queues are short."""
        for peer, queue in self._queues.items():
            link = self._links.get(peer)
            while queue and link is not None and link.queued_chunks < MAX_QUEUED_CHUNKS:
                frame_type, epoch, index = queue.popleft()
                key = ChunkKey(epoch.leader, epoch.process_tag, epoch.number, index)
                link.send_chunk(frame_type, key, tensor_bytes(self._values(index)))

    def _values(self, index: int) -> Tensor:
        """The sum or result of one chunk."""
        return self._copied[index] if index >= self._num_averaged else self._sums[index]

    # Landing.

    def landing(self, link: Link, frame_type: FrameType, key: ChunkKey) -> memoryview | None:
        """Where a partial sum or a result goes, or None if it is not awaited."""
        if not self._accepts(link.peer, frame_type, key):
            return None
        _, num_bytes = self._layout(key.index)
        room = self._landings.get(link.peer)
        if room is None or room.numel() < num_bytes:
            room = self._landings[link.peer] = torch.empty(num_bytes, dtype=torch.uint8)
        return tensor_bytes(room[:num_bytes])

    def landed(self, link: Link, frame_type: FrameType, key: ChunkKey) -> None:
        """Add the partial sum, or keep the result, that has just landed, if still awaited.

        One that holds NaN or infinity is not let in: its link is closed, and what it stood for is
        asked for again. A worker looks for poison in its own values before it consolidates.
        """
        peer, index, epoch = link.peer, key.index, _epoch(key)
        if not self._accepts(peer, frame_type, key):
            return
        dtype, num_bytes = self._layout(index)
        values = self._landings[peer][:num_bytes].view(dtype)
        if index < self._num_averaged and not is_finite(values):
            link.close("what it sent to be averaged holds NaN or infinity")
        elif frame_type is FrameType.PARTIAL_CHUNK:
            self._sums[index].add_(values)
            self._perform(self._protocol.partial_landed(peer, epoch, index, self._clock()))
        else:
            self._values(index).copy_(values)
            self._perform(self._protocol.result_landed(peer, epoch, index, self._clock()))

    def _accepts(self, peer: int, frame_type: FrameType, key: ChunkKey) -> bool:
        consolidation = self._protocol.consolidation
        if frame_type is FrameType.PARTIAL_CHUNK:
            return consolidation.accepts_partial(peer, _epoch(key), key.index)
        return consolidation.accepts_result(peer, _epoch(key), key.index)

    def _layout(self, index: int) -> tuple[torch.dtype, int]:
        """Precision and bytes of what travels of a chunk."""
        chunk = self._chunks[index]
        dtype = chunk.pending.dtype if index < self._num_averaged else chunk.x.dtype
        return dtype, chunk.num_elements * dtype.itemsize


def _epoch(key: ChunkKey) -> Epoch:
    return Epoch(key.counter, key.initiator, key.incarnation)
