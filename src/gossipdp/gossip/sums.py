"""The data side of sums over a tree: the protocol decides, this reads, adds, divides and sends.

A worker's own values, z = x + pending + c/2, are read chunk by chunk when the sum is sent. Nothing
here writes the parameters: at every moment x + pending is this worker's, also for a main thread
that no longer waits in ``consolidate``. Sums and results are tensors of their own, one for each
chunk of each sum. A new attempt has new ones, so data of an old one that is still on its way stays
untouched. No call of the gossip thread takes longer than the work on a few chunks: actions that
cost a pass wait here, and :meth:`Sums.pump` does them for ``BUSY_S`` in a turn.
"""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Chunk, Role
from gossipdp.dynamics.state import State
from gossipdp.dynamics.update import difference, is_finite
from gossipdp.errors import PeerLostError, PoisonedError
from gossipdp.gossip.codec import tensor_bytes
from gossipdp.links.frames import SUM_TYPES, ChunkKey, FrameType
from gossipdp.links.link import Link
from gossipdp.protocol.actions import (
    AverageEnded,
    Commit,
    DataAction,
    FinishChunk,
    Finished,
    Forget,
    SendPartial,
    SendResult,
)
from gossipdp.protocol.messages import Epoch
from gossipdp.protocol.worker import Action, WorkerProtocol

MAX_QUEUED_CHUNKS, MAX_WAITING_CHUNKS = 4, 1024  # if a peer that lies wants more, the oldest go
BUSY_S = 0.01


@dataclass(frozen=True)
class _Slot:
    """One chunk of a sum: of the children alone, or whole, with this worker's own values."""

    values: Tensor
    is_whole: bool


@dataclass(frozen=True)
class Average:
    """The mean over some workers, a tensor for each averaged chunk; at the end also the copied.

    ``without``: the live workers that are not in it, and why.
    """

    values: list[Tensor]
    num_workers: int
    without: Mapping[int, str]


@dataclass(frozen=True)
class Outcome(Average):
    """The average that was committed, how far apart the workers were, and their lowest rank."""

    consensus_distance: float
    lead: int


class Sums:
    """Carries out the actions of sums over a tree.

    ``links`` is the loop's own table, by peer, which it keeps up to date. ``poisoned`` is called if
    this worker's own values are of no use to the last average. ``outcome`` is the committed result
    of consolidation; ``on_end`` is called with it when this worker may leave.
    """

    def __init__(
        self,
        state: State,
        protocol: WorkerProtocol,
        links: Mapping[int, Link],
        perform: Callable[[list[Action]], None],
        clock: Callable[[], float],
        *,
        poisoned: Callable[[], None],
    ) -> None:
        self.outcome: Outcome | None = None
        self.on_end: Callable[[Outcome], None] | None = None
        self._asked: Future[Average] | None = None
        self._protocol, self._links, self._clock = protocol, links, clock
        self._perform, self._poisoned = perform, poisoned
        self._chunks = state.all_chunks
        self._num_averaged = len(state.averaged_chunks)
        self._slots: dict[Epoch, dict[int, _Slot]] = {}
        self._to_finish: deque[FinishChunk] = deque()
        self._queues: dict[int, deque[SendPartial | SendResult]] = {}
        self._rooms: dict[int, Tensor] = {}  # the landing place of each peer's chunk
        # The sum whose payload went to a link last, the one whose payload comes, and bytes moved.
        self._leaving: dict[int, Epoch] = {}
        self._coming: dict[int, Epoch] = {}
        self._moved: dict[Link, tuple[int, int]] = {}

    # Requests of the loop.

    def ask(self) -> "Future[Average]":
        """Average all live workers while they train; the caller's thread waits for the future.

        It replaces a request whose caller no longer waits, such as after Ctrl+C.
        """
        self._asked = asked = Future[Average]()
        self._perform(self._protocol.average(self._clock()))
        return asked

    def end(self, reason: str) -> None:
        """Fail this worker's own request, because it closes."""
        if self._asked is not None:
            self._asked.set_exception(PeerLostError(reason))
            self._asked = None
        self.outcome = None
        self._slots.clear()
        self._queues.clear()

    def perform(self, action: DataAction) -> None:
        """Do one action of a sum, or keep it for :meth:`pump`."""
        match action:
            case SendPartial(peer=peer) | SendResult(peer=peer):
                self._queues.setdefault(peer, deque(maxlen=MAX_WAITING_CHUNKS)).append(action)
            case FinishChunk():
                self._to_finish.append(action)
            case Forget(epoch=epoch, before=None):
                self._slots.pop(epoch, None)
            case Forget(epoch=epoch, before=before):
                slots = self._slots.get(epoch, {})
                for index in [index for index in slots if before is not None and index < before]:
                    del slots[index]
            case AverageEnded(epoch=epoch, count=count, without=without):
                slots = self._slots.pop(epoch, {})
                asked, self._asked = self._asked, None
                own = without.get(self._protocol.rank)
                if asked is None:
                    return  # this worker closes
                if count:
                    values = [slots[index].values for index in sorted(slots)]
                    asked.set_result(Average(values, count, without))
                elif own is not None:
                    asked.set_exception(PoisonedError(f"this worker cannot average: {own}"))
                else:
                    asked.set_exception(PeerLostError("no worker has parameters to average"))
            case Commit(origin=origin, consensus_distance=distance, num_members=num_members):
                # All are here, except a leader's copied chunks if no worker has asked for them.
                results = [self._values(origin, index) for index in range(len(self._chunks))]
                values = [each for each in results if each is not None]
                left_out = self._protocol.consolidation.left_out
                lead = self._protocol.consolidation.lead
                self.outcome = Outcome(values, num_members, left_out, distance, lead)
            case Finished():
                assert self.outcome is not None
                assert self.on_end is not None
                lead = self._protocol.consolidation.lead  # who led at Commit may have died since
                self.outcome = replace(self.outcome, lead=lead)
                self.on_end(self.outcome)

    # Sending, and other work that takes a pass.

    def link_lost(self, peer: int) -> None:
        """Forget the chunks to and from ``peer``; the protocol asks for them again."""
        for table in (self._queues, self._rooms, self._leaving, self._coming):
            table.pop(peer, None)

    def pump(self) -> bool:
        """Divide and send, as far as the links' queues are short; return whether work is left."""
        until_s = self._clock() + BUSY_S
        while self._to_finish:
            self._finish(self._to_finish.popleft())
            if self._clock() > until_s:
                return True
        for peer, queue in list(self._queues.items()):
            link = self._links.get(peer)
            while queue and link is not None and link.queued_chunks < MAX_QUEUED_CHUNKS:
                self._send(link, queue.popleft())
                if self._clock() > until_s:
                    return True
        return False

    def _send(self, link: Link, action: SendPartial | SendResult) -> None:
        if isinstance(action, SendPartial):
            epoch, frame_type = action.epoch, FrameType.PARTIAL_CHUNK
            is_given_up = self._protocol.sum_of(epoch) is None
        else:
            epoch, frame_type = action.origin, FrameType.RESULT_CHUNK
            is_given_up = self._protocol.consolidation.origin != epoch
        values = None if is_given_up else self._values(epoch, action.chunk)
        if values is None:
            return
        self._leaving[link.peer] = epoch
        key = ChunkKey(epoch.leader, epoch.process_tag, epoch.number, action.chunk)
        link.send_chunk(frame_type, key, tensor_bytes(values))

    def _finish(self, action: FinishChunk) -> None:
        epoch, index = action.epoch, action.chunk
        is_average = self._protocol.averages.sum_of(epoch) is not None
        is_given_up = self._protocol.sum_of(epoch) is None
        values = None if is_given_up else self._values(epoch, index)
        if values is None:
            return
        values.div_(action.divisor)
        if not is_average:
            # If the mean is this worker's own values but for the rounding of the sum, it is these:
            # so equal workers, as of a finished run started again, keep theirs bit for bit.
            own = torch.empty_like(values)
            self._chunks[index].read_z(own)
            rounding = action.divisor * torch.finfo(values.dtype).eps
            if torch.allclose(values, own, rtol=rounding, atol=0.0):
                values.copy_(own)
        distance = 0.0 if is_average else self._squared_distance(self._chunks[index], values)
        self._perform(self._protocol.chunk_finished(epoch, index, distance, self._clock()))

    def _values(self, epoch: Epoch, index: int) -> Tensor | None:
        """Return the sum or result of one chunk; to a sum this worker's own values are added.

        None: it holds NaN or infinity, which is never sent. The others go on without this worker.
        """
        slots = self._slots.setdefault(epoch, {})
        slot, chunk = slots.get(index), self._chunks[index]
        if slot is not None and slot.is_whole:
            return slot.values
        own, reduction = self._empty(index), self._protocol.sum_of(epoch)
        if index >= self._num_averaged:
            chunk.read(own)
        elif reduction is not None and not reduction.gives:
            own.zero_()
        else:
            chunk.read_z(own)
        if slot is not None:
            own.add_(slot.values)
        if index < self._num_averaged and not is_finite(own):
            if self._protocol.averages.sum_of(epoch) is None:
                self._poisoned()
            reason = "its parameters, or their sum with those of others, hold NaN or infinity"
            now = self._clock()
            self._perform(self._protocol.cannot_give(epoch, self._protocol.rank, reason, now))
            return None
        slots[index] = _Slot(own, is_whole=True)
        return own

    def _empty(self, index: int) -> Tensor:
        """Return room for a chunk, in the precision in which it is summed and travels."""
        chunk = self._chunks[index]
        dtype = chunk.pending.dtype if index < self._num_averaged else chunk.x.dtype
        return torch.empty(chunk.num_elements, dtype=dtype, device="cpu")

    def _squared_distance(self, chunk: Chunk, result: Tensor) -> float:
        if chunk.role is not Role.TRAINED:
            return 0.0
        own = torch.empty_like(result)
        chunk.read_z(own)
        return difference(own, own, result)

    # Landing.

    def landing(self, link: Link, frame_type: FrameType, key: ChunkKey) -> memoryview | None:
        """Return the place for a partial sum or a result, or None if it is not awaited."""
        peer = link.peer
        if not self._accepts(peer, frame_type, key):
            self._coming.pop(peer, None)
            return None
        self._coming[peer] = _epoch(key)
        room = self._rooms[peer] = self._empty(key.index)
        return tensor_bytes(room)

    def landed(self, link: Link, frame_type: FrameType, key: ChunkKey) -> None:
        """Add the partial sum, or keep the result, that has just landed, if still awaited."""
        peer, index, epoch, now = link.peer, key.index, _epoch(key), self._clock()
        if not self._accepts(peer, frame_type, key):
            return
        values, slots = self._rooms.pop(peer), self._slots.setdefault(epoch, {})
        if index < self._num_averaged and not is_finite(values):
            reason = "what it sent to be averaged holds NaN or infinity"
            link.close(reason)
            self._perform(self._protocol.cannot_give(epoch, peer, reason, now))
        elif frame_type is FrameType.PARTIAL_CHUNK:
            if index in slots:
                values.add_(slots[index].values)
            slots[index] = _Slot(values, is_whole=False)
            self._perform(self._protocol.partial_landed(peer, epoch, index, now))
        else:
            slots[index] = _Slot(values, is_whole=True)
            distance = self._squared_distance(self._chunks[index], values)
            self._perform(self._protocol.result_landed(peer, epoch, index, distance, now))

    def _accepts(self, peer: int, frame_type: FrameType, key: ChunkKey) -> bool:
        epoch = _epoch(key)
        if frame_type is FrameType.RESULT_CHUNK:
            return self._protocol.consolidation.accepts_result(peer, epoch, key.index)
        reduction = self._protocol.sum_of(epoch)
        return reduction is not None and reduction.accepts(peer, key.index)

    def note_progress(self) -> None:
        """Tell the protocol between which peers payload of each sum moves, by bytes.

        On a slow link one whole chunk may take longer than the time-out.
        """
        if self._protocol.averages.is_idle and not self._protocol.consolidation.has_begun:
            self._moved.clear()
            return
        moved: dict[Link, tuple[int, int]] = {}
        for peer, link in self._links.items():
            moved[link] = (
                sum(link.chunk_bytes_sent[each] for each in SUM_TYPES),
                sum(link.chunk_bytes_received[each] for each in SUM_TYPES),
            )
            before = self._moved.get(link, moved[link])
            for which, table in enumerate((self._leaving, self._coming)):
                epoch = table.get(peer)
                if epoch is not None and moved[link][which] > before[which]:
                    self._protocol.moved(peer, epoch)
        self._moved = moved


def _epoch(key: ChunkKey) -> Epoch:
    return Epoch(key.counter, key.initiator, key.incarnation)
