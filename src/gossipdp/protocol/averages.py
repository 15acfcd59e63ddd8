"""The average of all live workers while they train on: ``model.averaged()``.

It is a sum over the tree of the live workers (:mod:`~gossipdp.protocol.reduction`). Its root is the
worker that asks, and its result goes nowhere else. So every worker sends one model, however many
there are, and holds no more than a few chunks; only the worker that asked holds all.

- *Counts* go up first (``TellAverage``), since the root divides by them. A worker without a state
  to give (it joins, or is poisoned) passes on the sums below it and is not counted.
- *Restarts*: after a death, or if a worker gives nothing, the root restarts without it.
- *Several at once*: a request is named by its root; each worker has one of its own at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from gossipdp.protocol.actions import AverageEnded, Forget, Send
from gossipdp.protocol.messages import (
    AskAverage,
    AverageMessage,
    Epoch,
    Progressed,
    ProtocolError,
    PullPartials,
    ReductionMessage,
    Stalled,
    TellAverage,
)
from gossipdp.protocol.reduction import (
    ABANDONED_AFTER,
    REPEAT_AFTER,
    Blame,
    Reduction,
    ReductionAction,
    tree,
)

Actions = list[ReductionAction]

MAX_REQUESTS = 64
"""Sums for others in which a worker takes part at once; it refuses one more. So if more than 65
workers ask at the same moment, some of the averages are over fewer than all workers."""
FIRST_NUMBER = 1 << 60
"""Numbers of requests begin here, so that none is the name of an epoch of consolidation."""


@dataclass
class _Request:
    """One sum, and the counts that have come up."""

    ask: AskAverage
    sum: Reduction
    told: dict[int, TellAverage] = field(default_factory=dict)
    own: TellAverage | None = None
    """The number of workers in this one's sums; None: not all children have told theirs."""
    idle_ticks: int = 0


@dataclass
class _Own:
    """The request of this worker, and the workers without which it goes on."""

    blame: Blame
    without: dict[int, str]


class LiveAverages:
    """All sums over live workers in which this worker takes part.

    Args:
        number: numbers of its requests begin here; two lives of a rank have different ones.
        can_give: whether this worker has parameters to average.
    """

    def __init__(
        self, rank: int, process_id: int, number: int, num_chunks: int, can_give: Callable[[], bool]
    ) -> None:
        self.rank = rank
        self._process_tag = process_id % 2**32
        self._number = number
        self._num_chunks = num_chunks
        self._can_give = can_give
        self._requests: dict[int, _Request] = {}  # by the worker that asks
        self._own: _Own | None = None
        self._actions: Actions = []

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def sum_of(self, epoch: Epoch) -> Reduction | None:
        request = self._request(epoch)
        return None if request is None else request.sum

    def _request(self, epoch: Epoch) -> _Request | None:
        request = self._requests.get(epoch.leader)
        return request if request is not None and request.sum.epoch == epoch else None

    # --- this worker's own request ---------------------------------------------------------

    def ask(self, live: Collection[int], silent: Collection[int] = ()) -> Actions:
        """Sum over this worker and the live ones that are not silent; ``AverageEnded`` follows."""
        others = set(live) - {self.rank}
        without = dict.fromkeys(others.intersection(silent), "it is silent")
        self._own = _Own(Blame(self.rank), without)
        self._begin(self._own, others.difference(silent))
        return self._flush()

    def _begin(self, own: _Own, others: Collection[int]) -> None:
        self._number += 1
        epoch = Epoch(self._number, self.rank, self._process_tag)
        order, has_suspects = own.blame.begin(others)
        self._join(AskAverage(epoch, (self.rank, *order), has_suspects), own.blame)

    # --- inputs ----------------------------------------------------------------------------

    def receive(self, peer: int, message: AverageMessage | ReductionMessage) -> Actions:
        """Take in a message from ``peer``; raise ProtocolError if it breaks the rules."""
        if isinstance(message, AskAverage):
            self._asked(peer, message)
            return self._flush()
        request = self._request(message.epoch)
        if request is None:
            return []
        match message:
            case TellAverage() if peer in request.sum.children:
                if peer not in request.told:  # a repetition brings the sum no further
                    request.sum.moved(peer)
                request.told[peer] = message
                self._tell(request)
            case PullPartials(start=start) if (
                start >= self._num_chunks and peer == request.sum.parent
            ):
                self._forget(message.epoch.leader)  # all has arrived
            case PullPartials(start=start) if peer == request.sum.parent:
                self._actions.append(Forget(message.epoch, start))
                request.sum.receive(peer, message)
            case Progressed() | Stalled():
                request.sum.receive(peer, message)
        return self._flush()

    def partial_landed(self, peer: int, epoch: Epoch, chunk: int) -> Actions:
        reduction = self.sum_of(epoch)
        if reduction is not None:
            reduction.landed(peer, chunk)
        return self._flush()

    def chunk_finished(self, epoch: Epoch, chunk: int, squared_distance: float = 0.0) -> Actions:
        """Count a chunk of this worker's own average, whose distance nobody asks for."""
        request = self._request(epoch)
        if request is not None:
            request.sum.finished(chunk)
            self._end_if_whole(request)
        return self._flush()

    def cannot_give(self, epoch: Epoch, rank: int, reason: str) -> Actions:
        reduction = self.sum_of(epoch)
        if reduction is None:
            return []
        if self._own is not None and epoch.leader == self.rank == rank:
            self._own.without[rank] = reason
            self._end(0)
        else:
            reduction.accuse(rank, reason)
            if rank == self.rank:
                self._forget(epoch.leader)
        return self._flush()

    def link_lost(self, peer: int) -> Actions:
        for request in self._requests.values():
            request.sum.link_lost(peer)
            self._repeat(request, peer)
        return self._flush()

    def review(self, live: Collection[int]) -> Actions:
        """Go on without those that no longer live."""
        for caller, request in list(self._requests.items()):
            if caller not in live and caller != self.rank:
                self._forget(caller)
            elif self._own is not None and caller == self.rank:
                others = set(request.ask.members[1:])
                dead = others.difference(live)
                if dead:
                    self._begin(self._own, others - dead)
        return self._flush()

    def tick(self, heard: Collection[int], moving: Mapping[Epoch, Collection[int]]) -> Actions:
        """Count a quarter of a time-out; see :meth:`Consolidation.tick`."""
        for caller, request in list(self._requests.items()):
            reduction = request.sum
            awaited = [
                child
                for child in reduction.children
                if child not in request.told or reduction.awaits(child)
            ]
            gets_on = reduction.tick(moving.get(reduction.epoch, ()), awaited, heard)
            request.idle_ticks = 0 if gets_on else request.idle_ticks + 1
            if self._own is not None and caller == self.rank:
                left_out = self._own.blame.tick()
                if left_out is not None:
                    self._own.without |= left_out
                    self._begin(self._own, set(request.ask.members[1:]) - left_out.keys())
                    continue
            elif request.idle_ticks >= ABANDONED_AFTER:
                self._forget(caller)
                continue
            if request.idle_ticks and request.idle_ticks % REPEAT_AFTER == 0:
                for peer in [*reduction.children, reduction.parent]:
                    if peer is not None:
                        self._repeat(request, peer)
        return self._flush()

    # --- consequences ----------------------------------------------------------------------

    def _asked(self, peer: int, ask: AskAverage) -> None:
        ranks, epoch = ask.members, ask.epoch
        if not ranks or ranks[0] != epoch.leader or len(set(ranks)) != len(ranks):
            raise ProtocolError(f"worker {peer} asks for an average over {len(ranks)} in disorder")
        if tree(ranks, has_suspects=ask.has_suspects).get(self.rank) != peer:
            raise ProtocolError(f"worker {peer} asks for an average out of its turn")
        known = self._requests.get(epoch.leader)
        before = None if known is None else known.sum.epoch
        if known is not None and before is not None and before.process_tag == epoch.process_tag:
            if before == epoch:
                self._repeat(known, peer)
            if before.order >= epoch.order:
                return
        if known is None and len(self._requests) >= MAX_REQUESTS:
            reason = f"it takes part in {MAX_REQUESTS} averages already"
            refused = Stalled(epoch, self.rank, True, reason)
            self._actions.append(Send[ReductionMessage](epoch.leader, refused))
            return
        self._join(ask, None)

    def _join(self, ask: AskAverage, blame: Blame | None) -> None:
        self._forget(ask.epoch.leader)
        reduction = Reduction(
            ask.epoch,
            self.rank,
            tree(ask.members, has_suspects=ask.has_suspects),
            self._num_chunks,
            self._actions,
            blame=blame,
            gives=self._can_give(),
        )
        request = self._requests[ask.epoch.leader] = _Request(ask, reduction)
        for child in reduction.children:
            self._say(child, ask)
        self._tell(request)
        reduction.advance()

    def _tell(self, request: _Request) -> None:
        """Tell the number of workers in the sums, once all children have told theirs."""
        reduction, told = request.sum, request.told.values()
        if request.own is not None or len(told) < len(reduction.children):
            return
        without = tuple(rank for each in told for rank in each.without)
        request.own = TellAverage(
            reduction.epoch,
            reduction.gives + sum(each.count for each in told),
            without if reduction.gives else (*without, self.rank),
        )
        if reduction.parent is not None:
            self._say(reduction.parent, request.own)
        elif request.own.count == 0:
            self._end(0)
        else:
            reduction.divisor = request.own.count
            reduction.advance()
            self._end_if_whole(request)

    def _end_if_whole(self, request: _Request) -> None:
        if request.own is not None and request.sum.num_finished == self._num_chunks:
            self._end(request.own.count, request.own.without)

    def _end(self, count: int, without: Collection[int] = ()) -> None:
        own, request = self._own, self._requests.pop(self.rank)
        assert own is not None
        self._own = None
        reasons = dict.fromkeys(without, "it has no parameters to give just now") | own.without
        self._actions.append(AverageEnded(request.sum.epoch, count, reasons))

    def _repeat(self, request: _Request, peer: int) -> None:
        if peer in request.sum.children:
            self._say(peer, request.ask)  # also if it has told: it may have forgotten since
            request.sum.repeat(peer)
        elif peer == request.sum.parent and request.own is not None:
            self._say(peer, request.own)

    def _forget(self, caller: int) -> None:
        request = self._requests.pop(caller, None)
        if request is not None:
            self._actions.append(Forget(request.sum.epoch))

    def _say(self, peer: int, message: AverageMessage) -> None:
        self._actions.append(Send(peer, message))

    def _flush(self) -> Actions:
        actions = self._actions[:]
        self._actions.clear()  # the sums add to this very list
        return actions
