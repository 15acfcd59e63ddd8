"""The average of all live workers while they train on: ``model.averaged()``.

A request goes down a binary tree over the live workers, whose root is the worker that asks. Each
worker adds its own z = x + pending + c/2 to the partial sums of its children, chunk by chunk, in
the precision of pending, and sends them on to its parent. So every worker sends one model, however
many there are, and nobody holds more than ``WINDOW`` chunks but the worker that asked.

- *Counts* go up first (``TellAverage``). A worker that has no state to give (it joins, or is
  poisoned) passes on what is below it and is not counted.
- *Flow*: a parent asks for as many chunks as it has room for (``PullAverage``).
- *A death*, or a child that stands still, fails the request (``AverageFailed``, up to the root),
  and the worker that asked asks again without it. What is left of a failed request is dropped when
  the same worker asks anew, when the link to the parent ends, or after the time-out.
- *Several at once*: a request is named by its caller; each caller has one.

Driven by the gossip thread alone.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Chunk, State
from gossipdp.dynamics.update import is_finite
from gossipdp.errors import PeerLostError
from gossipdp.gossip.codec import tensor_bytes
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.link import Link
from gossipdp.protocol.messages import (
    AskAverage,
    AverageFailed,
    AverageMessage,
    ProtocolError,
    PullAverage,
    TellAverage,
)

WINDOW = 4
MAX_REQUESTS = 64


@dataclass(frozen=True)
class Averaged:
    """What a request brought: the number of workers in the sums, and who had none to give."""

    count: int
    without: tuple[int, ...]


class AverageFailedError(PeerLostError):
    """A request came to nothing because of worker ``rank``."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"worker {rank}: {reason}")
        self.rank = rank


@dataclass
class _Child:
    """One worker below this one: what it said, and how many of its chunks are here."""

    told: TellAverage | None = None
    num_landed: int = 0
    room: Tensor | None = None


@dataclass
class _Request:
    """What one worker has to do for one request.

    Chunks pass in order: opened (our own z is in its slot), summed (with all children's), sent.
    The root, which has no parent, has a slot for each chunk, the others have a window of them.
    """

    caller: int
    counter: int
    parent: int | None
    children: dict[int, _Child]
    gives: bool
    slots: list[Tensor]
    deadline_s: float
    result: "Future[Averaged]" = field(default_factory=Future)  # the root's
    has_told: bool = False
    count: int = 0
    without: tuple[int, ...] = ()
    num_opened: int = 0
    num_sent: int = 0
    num_freed: int = 0
    stop: int = 0

    @property
    def num_summed(self) -> int:
        return min((child.num_landed for child in self.children.values()), default=self.num_opened)

    def slot(self, chunk: Chunk) -> Tensor:
        """Where the sum of a chunk is."""
        slot = self.slots[chunk.index % len(self.slots)]
        return slot[: _sum_bytes(chunk)].view(chunk.pending.dtype)


class LiveAverages:
    """All requests that this worker takes part in.

    Args:
        state: this worker's.
        rank: of this worker.
        links: by peer; the loop's own table, which it keeps up to date.
        send: posts a message, and dials where there is no link.
        refusal: why this worker's state is not to be had just now, or None.
        clock: seconds, monotonic.
        timeout_s: a request that makes no progress for twice as long fails.
    """

    def __init__(
        self,
        state: State,
        rank: int,
        *,
        links: Mapping[int, Link],
        send: Callable[[int, AverageMessage], None],
        refusal: Callable[[], str | None],
        clock: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self._chunks = state.averaged_chunks
        self._rank = rank
        self._counter = secrets.randbits(40)  # no two lives of this rank begin with the same
        self._links = links
        self._send = send
        self._refusal = refusal
        self._clock = clock
        self._timeout_s = 2 * timeout_s
        self._requests: dict[int, _Request] = {}

    # The worker that asks.

    def begin(self, members: Sequence[int], sums: Sequence[Tensor]) -> "Future[Averaged]":
        """Sum z over ``members``, this worker first, into ``sums``, one for each exchanged chunk.

        The future's exception is an :class:`AverageFailedError`; then ``sums`` hold nothing of use.
        """
        self._counter += 1
        slots = [values.view(torch.uint8) for values in sums]
        request = self._join(self._rank, self._counter, members, slots, gives=True)
        self.pump()
        return request.result

    def end(self, reason: str) -> None:
        """Fail what this worker has asked for: it closes."""
        own = self._requests.pop(self._rank, None)
        self._requests.clear()
        if own is not None:
            own.result.set_exception(PeerLostError(reason))

    def _join(
        self, caller: int, counter: int, members: Sequence[int], slots: list[Tensor], *, gives: bool
    ) -> _Request:
        index = members.index(self._rank)
        parent = members[(index - 1) // 2] if index else None
        children = {rank: _Child() for rank in members[2 * index + 1 : 2 * index + 3]}
        request = _Request(caller, counter, parent, children, gives, slots, self._deadline_s())
        self._requests[caller] = request
        for rank in children:
            self._send(rank, AskAverage(caller, counter, tuple(members)))
        return request

    def _deadline_s(self) -> float:
        return self._clock() + self._timeout_s

    # What the loop reports.

    def receive(self, link: Link, message: AverageMessage) -> None:
        """Deal with one message; raises ProtocolError for one that no worker of ours sends."""
        peer = link.peer
        if isinstance(message, AskAverage):
            self._asked(peer, message)
            return
        request = self._requests.get(message.caller)
        if request is None or request.counter != message.counter:
            return
        match message:
            case TellAverage() if peer in request.children:
                request.children[peer].told = message
                request.deadline_s = self._deadline_s()
            case PullAverage(stop=stop) if peer == request.parent:
                request.stop = max(request.stop, min(stop, len(self._chunks)))
                request.deadline_s = self._deadline_s()
            case AverageFailed(rank=rank, reason=reason) if peer in request.children:
                self._fail(request, rank, reason)

    def _asked(self, peer: int, message: AskAverage) -> None:
        members = message.members
        if (
            self._rank not in members[1:]
            or members[0] != message.caller
            or len(set(members)) != len(members)
            or members[(members.index(self._rank) - 1) // 2] != peer
        ):
            raise ProtocolError(f"worker {peer} asks for an average out of its turn")
        if len(self._requests) >= MAX_REQUESTS and message.caller not in self._requests:
            reason = f"it takes part in {MAX_REQUESTS} averages already"
            self._send(peer, AverageFailed(message.caller, message.counter, self._rank, reason))
            return
        most_bytes = max(map(_sum_bytes, self._chunks), default=0)
        slots = list(torch.empty(WINDOW, -(-most_bytes // 64) * 64, dtype=torch.uint8))
        gives = self._refusal() is None
        self._join(message.caller, message.counter, members, slots, gives=gives)

    def landing(self, link: Link, frame_type: FrameType, key: ChunkKey) -> memoryview | None:
        """Where a partial sum goes, or None if it is not awaited."""
        request = self._requests.get(key.initiator)
        child = None if request is None else request.children.get(link.peer)
        if request is None or child is None or request.counter != key.counter:
            return None
        if key.index != child.num_landed or key.index >= request.num_opened:
            return None
        chunk = self._chunks[key.index]
        num_bytes = _sum_bytes(chunk)
        if child.room is None or child.room.nbytes < num_bytes:
            child.room = torch.empty(num_bytes, dtype=torch.uint8)
        return tensor_bytes(child.room[:num_bytes])

    def landed(self, link: Link, frame_type: FrameType, key: ChunkKey) -> None:
        """Add the partial sum that has just landed, if it is still awaited."""
        if self.landing(link, frame_type, key) is None:
            return
        request, chunk = self._requests[key.initiator], self._chunks[key.index]
        child = request.children[link.peer]
        assert child.room is not None
        values = child.room[: _sum_bytes(chunk)].view(chunk.pending.dtype)
        if not is_finite(values):
            self._fail(request, link.peer, "the sums that it sent hold NaN or infinity")
            return
        request.slot(chunk).add_(values)
        child.num_landed += 1
        request.deadline_s = self._deadline_s()

    def gone(self, peer: int, reason: str) -> None:
        """The link to ``peer`` has ended, or it is not to be reached."""
        for request in list(self._requests.values()):
            if peer == request.parent:
                del self._requests[request.caller]
                continue
            child = request.children.get(peer)
            if child is not None and child.num_landed < len(self._chunks):
                self._fail(request, peer, reason)

    def look(self, now: float, silent: Collection[int]) -> None:
        """Fail what waits for one of ``silent``, or has made no progress for the time-out."""
        for request in list(self._requests.values()):
            stopped = sorted(request.children.keys() & set(silent))
            if stopped:
                self._fail(request, stopped[0], "it is silent")
            elif now >= request.deadline_s:
                landed = {rank: child.num_landed for rank, child in request.children.items()}
                behind = min(landed, key=landed.__getitem__, default=self._rank)
                self._fail(request, behind, f"nothing of it came for {self._timeout_s:g} s")

    def _fail(self, request: _Request, rank: int, reason: str) -> None:
        self._requests.pop(request.caller, None)
        if request.parent is None:
            request.result.set_exception(AverageFailedError(rank, reason))
        elif request.parent in self._links:
            failed = AverageFailed(request.caller, request.counter, rank, reason)
            self._send(request.parent, failed)

    # Passing chunks on.

    def pump(self) -> None:
        """Open, sum and send as far as slots and links allow."""
        for request in list(self._requests.values()):
            freed = -1
            while request.num_freed > freed and self._open(request):
                freed = request.num_freed
                self._tell(request)
                if request.parent is None:
                    request.num_freed = request.num_summed
                else:
                    self._send_on(request, self._links.get(request.parent))
            is_whole = request.num_freed == len(self._chunks) and request.has_told
            if is_whole and self._requests.get(request.caller) is request:
                del self._requests[request.caller]
                request.result.set_result(Averaged(request.count, request.without))

    def _open(self, request: _Request) -> bool:
        """Put our own z into the slots that are free, and let the children send as much."""
        opened = request.num_opened
        while request.num_opened < min(request.num_freed + WINDOW, len(self._chunks)):
            chunk = self._chunks[request.num_opened]
            slot = request.slot(chunk)
            if request.gives:
                chunk.read_z(slot)
                if not is_finite(slot):
                    self._fail(request, self._rank, "its parameters hold NaN or infinity")
                    return False
            else:
                slot.zero_()
            request.num_opened += 1
        if request.num_opened > opened:
            pull = PullAverage(request.caller, request.counter, request.num_opened)
            for rank in request.children:
                self._send(rank, pull)
        return True

    def _tell(self, request: _Request) -> None:
        """Say, once all children have, over how many workers the sums are."""
        told = [child.told for child in request.children.values()]
        sums = [each for each in told if each is not None]
        if request.has_told or len(sums) < len(told):
            return
        request.has_told = True
        request.count = request.gives + sum(each.count for each in sums)
        request.without = tuple(rank for each in sums for rank in each.without)
        if not request.gives:
            request.without += (self._rank,)
        if request.parent is not None:
            count = TellAverage(request.caller, request.counter, request.count, request.without)
            self._send(request.parent, count)

    def _send_on(self, request: _Request, link: Link | None) -> None:
        """Send sums that the parent has room for; what has left frees its slot."""
        if link is None:
            return
        queued = link.queued_of(FrameType.AVERAGE_CHUNK)
        while request.num_sent < min(request.num_summed, request.stop) and queued < WINDOW:
            chunk = self._chunks[request.num_sent]
            key = ChunkKey(request.caller, 0, request.counter, chunk.index)
            link.send_chunk(FrameType.AVERAGE_CHUNK, key, tensor_bytes(request.slot(chunk)))
            request.num_sent += 1
            queued = link.queued_of(FrameType.AVERAGE_CHUNK)
        # Those of other requests may be among the queued: then fewer count as free than are.
        request.num_freed = max(request.num_freed, request.num_sent - queued)


def _sum_bytes(chunk: Chunk) -> int:
    """Bytes of a sum of one chunk, also of one that is averaged and holds no pending."""
    return chunk.num_elements * chunk.pending.element_size()
