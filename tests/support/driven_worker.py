"""A worker's whole protocol, driven by hand: rank 1 of a ring of six."""

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

import msgspec

from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.actions import Send
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import Envelope, ExchangeId, Heartbeat, Message, Propose
from gossipdp.protocol.worker import Action, WorkerProtocol

TIMEOUT_S = 5.0
RING = Constants.of(build_graph("ring", 6))
Kind = TypeVar("Kind")


class InPhase(Random):
    """Ticks of all workers at the same moments: each gap is exactly its mean."""

    def uniform(self, a: float, b: float) -> float:
        return 1.0


def member(rank: int, status: Status = Status.ALIVE, incarnation: int = 0) -> Member:
    return Member(rank, incarnation, 70 + rank, status, "10.0.0.1", 4000 + rank)


def protocol_of(rank: int, *, constants: Constants = RING, **changes: Any) -> WorkerProtocol:
    """Make one worker of a ring of six, or as ``changes`` of its record and arguments say."""
    own = {name: changes.pop(name) for name in Member.__struct_fields__ if name in changes}
    arguments: dict[str, Any] = {
        "own": msgspec.structs.replace(member(rank), **own),
        "graph": LiveGraph(constants),
        "method": "a2cid2",
        "timeout_s": TIMEOUT_S,
        "random": Random(0),
    }
    return WorkerProtocol(**(arguments | changes))


def make_worker(*linked: int, rank: int = 1, **changes: Any) -> WorkerProtocol:
    """Make rank 1 of a ring of six: its neighbours are 0 and 2."""
    worker = protocol_of(rank, **changes)
    worker.membership.merge_all(member(rank) for rank in range(6) if rank != worker.rank)
    for peer in linked:
        worker.link_up(peer, 0.0)
    return worker


def of_type(actions: Sequence[Action], kind: type[Kind]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


def said(actions: Sequence[Action], peer: int | None = None) -> list[Message]:
    """Return the messages sent, without heartbeats."""
    return [
        action.message.message
        for action in actions
        if isinstance(action, Send)
        and peer in (None, action.peer)
        and not isinstance(action.message.message, Heartbeat)
    ]


def run(worker: WorkerProtocol, start: float, end: float, talking: Sequence[int]) -> list[Action]:
    """Poll at every deadline while some peers show life; return all actions."""
    actions: list[Action] = []
    now = start
    while (now := max(now, worker.next_deadline())) <= end:
        for peer in talking:
            actions += worker.heard(peer, now)
        actions += worker.poll(now)
    return actions


def ask(peer: int, counter: int = 1) -> Envelope:
    return Envelope(Propose(ExchangeId(peer, 0, counter), 0.6))


def tell(*members: Member) -> Envelope:
    return Envelope(Heartbeat(), members)
