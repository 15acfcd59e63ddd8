"""What an engine tells of the run besides its own statistics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from gossipdp.observe.status import MemberState, MemberStatus, NeighbourStatus
from gossipdp.protocol.membership import Member, Status
from gossipdp.runtime.environment import show_address
from gossipdp.runtime.exchange import CompletedExchange
from gossipdp.runtime.identity import FIRST_VISITOR_RANK
from gossipdp.runtime.link import Link

_STATES: Mapping[Status, MemberState] = {
    Status.JOINING: "joining",
    Status.ALIVE: "training",
    Status.DONE: "done",
    Status.LEFT: "left",
    Status.DEAD: "dead",
}


@dataclass(frozen=True)
class RunView:
    """The run as one worker sees it at one moment.

    Attributes:
        run_id, graph: of the run; the graph's name.
        incarnation: this worker's present one.
        is_averaging: ``consolidate()`` was called.
        members: all workers that are known.
        neighbours: those linked, in the graph next to this one, or exchanged with.
    """

    run_id: str
    graph: str
    incarnation: int
    is_averaging: bool
    members: tuple[MemberStatus, ...]
    neighbours: tuple[NeighbourStatus, ...] = ()


def show_members(
    members: Iterable[Member], silent: frozenset[int], counts: Mapping[int, tuple[int, int]]
) -> tuple[MemberStatus, ...]:
    """The membership; ``counts``: samples and gradient steps by rank."""
    shown = []
    for member in members:
        samples, steps = counts.get(member.rank, (0, 0))
        has_status = member.status_host and member.status_port
        shown.append(
            MemberStatus(
                rank=member.rank,
                incarnation=member.incarnation,
                state=_STATES[member.status],
                is_silent=member.rank in silent,
                gradient_steps=steps,
                samples=samples,
                status_address=show_address(member.status_host, member.status_port)
                if has_status
                else "",
            )
        )
    return tuple(shown)


def show_neighbours(
    neighbours: frozenset[int],
    links: Iterable[Link],
    exchanges: Mapping[int, int],
    recent: Iterable[CompletedExchange],
    now_s: float,
) -> tuple[NeighbourStatus, ...]:
    """The graph's neighbours and whoever else is linked, or was exchanged with."""
    by_peer = {link.peer: link for link in links if link.peer < FIRST_VISITOR_RANK}
    durations: dict[int, list[float]] = {}
    for each in recent:
        durations.setdefault(each.peer, []).append(each.ended_s - each.started_s)
    shown = []
    for rank in sorted({*neighbours, *by_peer, *exchanges}):
        link = by_peer.get(rank)
        shown.append(
            NeighbourStatus(
                rank=rank,
                exchanges=exchanges.get(rank, 0),
                is_neighbour=rank in neighbours,
                is_linked=link is not None,
                heard_ago_s=max(0.0, now_s - link.last_heard_s) if link else None,
                exchange_seconds=fmean(durations[rank]) if rank in durations else None,
                bytes_sent=link.bytes_sent + link.shared_bytes_sent if link else 0,
                bytes_received=link.bytes_received + link.shared_bytes_received if link else 0,
            )
        )
    return tuple(shown)
