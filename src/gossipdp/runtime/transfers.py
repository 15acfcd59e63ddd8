"""All transfers of whole states in which one worker takes part: what it gives, and what it takes.

Driven by the gossip loop. At most one state is on its way *here* at a time; others wait their turn,
so that ``model.averaged()`` and a refresh do not meet. A fetch is answered exactly once, by
``on_end``: with None, or with what went wrong. It ends at the latest when nothing of it has come
for its time-out.

Races:

- The giver dies in the middle: its link goes down, it is dialled anew, its address refuses
  (:meth:`gone`), the fetch fails. If it does not refuse, the time-out ends it.
- The link alone is replaced (crossing dials): the fetch asks again, under another counter, and
  what still arrives under the old one is dropped.
- The taker dies in the middle: its link goes down, and what was to be sent is dropped.
- Asked while this worker has no state to give (it joins, is poisoned, refreshes, consolidates):
  it says so at once.
- Consolidation begins while this worker's parameters are under way: before pending lends its memory
  to the sums the loop calls :meth:`Transfers.refuse_parameters`, and from then on no chunk is read.
  Chunks read before are copies, and sound; where all were, the taker has the state whole. So has it
  the optimizers' state, which was copied in one piece. Else it is refused, asks others, who refuse
  too, and ends as one that came too late.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from gossipdp.dynamics.state import Chunk
from gossipdp.errors import PeerLostError
from gossipdp.protocol.messages import (
    OfferTraining,
    RequestState,
    RequestTraining,
    StateRefused,
)
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.training_transfer import TrainingReceiver, TrainingSender
from gossipdp.runtime.transfer import StateReceiver, StateSender

TransferMessage: TypeAlias = RequestState | StateRefused | RequestTraining | OfferTraining
OnEnd: TypeAlias = Callable[[Exception | None], None]


class TurnedAwayError(PeerLostError):
    """The peer answers, but its state is not to be had, or not worth having."""


class StateRefusedError(TurnedAwayError):
    """The peer says itself that its state is not to be had just now, and sends nothing of it."""


@dataclass
class _Fetch:
    """A state on its way to this worker, or waiting for its turn."""

    receiver: StateReceiver | TrainingReceiver
    on_end: OnEnd
    timeout_s: float
    deadline_s: float = 0.0


class Transfers:
    """Gives and takes states over the loop's links.

    Args:
        shared: this worker's state.
        links: by peer; the loop's own table, which it keeps up to date.
        send: posts a message, and dials where there is no link.
        refusal: why this worker's state is not to be had just now, or None.
        clock: seconds, monotonic.

    Attributes:
        num_chunks_sent, num_chunks_received: of all states so far; they show progress.
        training_wanted: whether somebody waits for the optimizers' state, which the main thread
            gives with :meth:`give_training`. Any thread may read it.
    """

    def __init__(
        self,
        shared: SharedState,
        links: Mapping[int, Link],
        send: Callable[[int, TransferMessage], None],
        refusal: Callable[[], str | None],
        clock: Callable[[], float],
    ) -> None:
        self.num_chunks_sent = 0
        self.num_chunks_received = 0
        self.training_wanted = False
        self._shared = shared
        self._links = links
        self._send = send
        self._refusal = refusal
        self._clock = clock
        self._senders: list[StateSender | TrainingSender] = []
        self._early_requests: dict[int, RequestState] = {}
        self._training_requests: dict[int, RequestTraining] = {}
        self._serves = False
        self._unserved: set[int] = set()
        self._on_served: Callable[[], None] | None = None
        self._fetches: deque[_Fetch] = deque()
        self._counter = 0

    # Giving.

    def serve(self, first: Iterable[int], on_served: Callable[[], None]) -> None:
        """Answer requests from now on; ``on_served`` once each of ``first`` has it or is gone."""
        self._serves = True
        self._unserved = set(first)
        self._on_served = on_served
        for peer, request in self._early_requests.items():
            self._give(peer, request)
        self._early_requests.clear()
        self._count_served()

    def give_training(self, data: bytes) -> None:
        """Send the encoded state of the optimizers to all who wait for it."""
        self.training_wanted = False
        for peer, request in self._training_requests.items():
            link = self._links.get(peer)
            if link is not None and self._may_give(peer, request.counter):
                self._send(peer, OfferTraining(request.counter, len(data)))
                self._senders.append(TrainingSender(link, request, data))
        self._training_requests.clear()

    def refuse_training(self, reason: str) -> None:
        """Say why the optimizers' state cannot be sent."""
        self.training_wanted = False
        for peer, request in self._training_requests.items():
            self._send(peer, StateRefused(request.counter, reason))
        self._training_requests.clear()

    def refuse_parameters(self, reason: str) -> None:
        """Read no more of the parameters for anybody, and say why."""
        reading = [
            sender
            for sender in self._senders
            if isinstance(sender, StateSender) and not sender.has_read_all
        ]
        self._senders = [sender for sender in self._senders if sender not in reading]
        for sender in reading:
            self._send(sender.link.peer, StateRefused(sender.counter, reason))

    def _give(self, peer: int, request: RequestState) -> None:
        link = self._links.get(peer)
        if link is not None and self._may_give(peer, request.counter):
            self._senders.append(StateSender(self._shared, link, request))

    def _may_give(self, peer: int, counter: int) -> bool:
        reason = self._refusal()
        if reason is not None:
            self._send(peer, StateRefused(counter, reason))
        return reason is None

    def _count_served(self) -> None:
        if self._on_served is not None and not self._unserved:
            on_served, self._on_served = self._on_served, None
            on_served()

    # Taking.

    def fetch(
        self, peer: int, sink: Callable[[Chunk, Tensor], None], on_end: OnEnd, timeout_s: float
    ) -> None:
        """Ask ``peer`` for its parameters; see :meth:`GossipLoop.fetch_state`."""
        self._begin(_Fetch(StateReceiver(self._shared, peer, sink), on_end, timeout_s))

    def fetch_training(
        self,
        peer: int,
        max_bytes: int,
        on_end: Callable[[bytes | Exception], None],
        timeout_s: float,
    ) -> None:
        """Ask ``peer`` for its optimizers' state, of at most ``max_bytes`` bytes."""
        receiver = TrainingReceiver(peer, max_bytes)
        self._begin(
            _Fetch(receiver, lambda error: on_end(error or receiver.data), timeout_s),
        )

    @property
    def source(self) -> int | None:
        """From whom a state is on its way here."""
        return self._fetches[0].receiver.peer if self._fetches else None

    def cancel(self, on_end: OnEnd) -> bool:
        """Forget the fetch that was begun with this very ``on_end``, which is not called."""
        kept = deque(fetch for fetch in self._fetches if fetch.on_end != on_end)
        if len(kept) == len(self._fetches):
            return False
        was_first = self._fetches[0].on_end == on_end
        self._fetches = kept
        if was_first:
            self._request_next()
        return True

    def end(self, error: Exception) -> None:
        """End every fetch."""
        fetches, self._fetches = self._fetches, deque()
        for fetch in fetches:
            fetch.on_end(error)

    def gone(self, peer: int, error: Exception) -> None:
        """Nothing more is to be had from ``peer``."""
        if self.source == peer:
            self._end_first(error)

    def _begin(self, fetch: _Fetch) -> None:
        self._fetches.append(fetch)
        if len(self._fetches) == 1:
            self._request_next()

    def _request_next(self) -> None:
        if self._fetches:
            fetch = self._fetches[0]
            fetch.deadline_s = self._clock() + fetch.timeout_s
            self._counter += 1
            self._send(fetch.receiver.peer, fetch.receiver.request(self._counter))

    def _end_first(self, error: Exception | None) -> None:
        fetch = self._fetches.popleft()
        self._request_next()
        fetch.on_end(error)

    # What the loop reports.

    def receive(self, link: Link, message: TransferMessage) -> None:
        """Deal with one message."""
        first = self._fetches[0] if self._fetches else None
        match message:
            case RequestState():
                if self._serves:
                    self._give(link.peer, message)
                else:
                    self._early_requests[link.peer] = message
            case RequestTraining():
                if self._may_give(link.peer, message.counter):
                    self._training_requests[link.peer] = message
                    self.training_wanted = True
            case StateRefused(counter=counter, reason=reason):
                if first is not None and first.receiver.counter == counter:
                    self._end_first(
                        StateRefusedError(f"worker {link.peer} cannot give its state: {reason}")
                    )
            case OfferTraining(counter=counter):
                if (
                    first is not None
                    and isinstance(first.receiver, TrainingReceiver)
                    and first.receiver.counter == counter
                ):
                    wrong = first.receiver.offered(message)
                    first.deadline_s = self._clock() + first.timeout_s
                    if wrong is not None:
                        self._end_first(PeerLostError(f"worker {link.peer}: {wrong}"))

    def link_down(self, link: Link) -> None:
        """What was under way on ``link`` is lost; what was to come on it is asked for again."""
        self._senders = [sender for sender in self._senders if sender.link is not link]
        self._early_requests.pop(link.peer, None)
        self._training_requests.pop(link.peer, None)
        if self.source == link.peer:
            fetch = self._fetches[0]
            self._counter += 1
            self._send(link.peer, fetch.receiver.request(self._counter))

    def dead(self, peer: int) -> None:
        """The address of ``peer`` refuses connections."""
        self._unserved.discard(peer)
        self._count_served()
        self.gone(peer, PeerLostError(f"worker {peer} is gone: its address refuses us"))

    def landing(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        """Return where a chunk goes, or None if it is not awaited."""
        if self.source != link.peer:
            return None
        return self._fetches[0].receiver.landing(frame_type, key, length)

    def landed(self, link: Link, key: ChunkKey) -> None:
        """The chunk that was to land is here."""
        if self.source != link.peer or self._fetches[0].receiver.counter != key.counter:
            return  # given up while it was arriving
        fetch = self._fetches[0]
        try:
            fetch.receiver.landed()
        except ValueError as error:
            self._end_first(TurnedAwayError(f"worker {link.peer} cannot give its state: {error}"))
            return
        self.num_chunks_received += 1
        fetch.deadline_s = self._clock() + fetch.timeout_s
        if fetch.receiver.is_finished:
            self._end_first(None)

    def pump(self) -> None:
        """Send what there is room for; end a fetch that stands still.

        On a closed link there is always room, and nothing is sent: ``link_down`` is on its way.
        """
        for sender in self._senders:
            if sender.link.closed:
                continue
            before = sender.num_sent
            sender.pump()
            self.num_chunks_sent += sender.num_sent - before
            if sender.is_finished and isinstance(sender, StateSender):
                self._unserved.discard(sender.link.peer)
        self._senders = [sender for sender in self._senders if not sender.is_finished]
        self._count_served()
        if self._fetches and self._clock() > self._fetches[0].deadline_s:
            fetch = self._fetches[0]
            self._end_first(
                PeerLostError(
                    f"worker {fetch.receiver.peer} sent nothing of its state for "
                    f"{fetch.timeout_s:g} s"
                )
            )
