"""One worker's consolidation machine and what it meets, for tests that drive it by hand."""

from collections.abc import Sequence

from gossipdp.protocol.actions import Send
from gossipdp.protocol.consolidate import Consolidation
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import Average, BeginEpoch, Epoch
from gossipdp.protocol.reduction import ReductionAction


def process(rank: int) -> tuple[int, int]:
    return (rank, 100 + rank)


def view(num_workers: int, **others: Status) -> list[Member]:
    """All done, but for ``worker3=Status.DEAD`` and the like."""
    return [
        Member(rank, 1, 100 + rank, others.get(f"worker{rank}", Status.DONE))
        for rank in range(num_workers)
    ]


def epoch(number: int, leader: int = 0) -> Epoch:
    return Epoch(number, leader, 100 + leader)


def begin(number: int, *ranks: int, average: Average | None = None) -> BeginEpoch:
    return BeginEpoch(epoch(number, ranks[0]), tuple(process(rank) for rank in ranks), average)


def worker(
    rank: int,
    num_chunks: int = 2,
    num_copied_chunks: int = 0,
    *,
    among: Sequence[Member] = (),
    joins: int | None = None,
) -> Consolidation:
    """Make the machine of a worker ``among`` others, which joins that epoch of theirs."""
    machine = Consolidation(rank, 100 + rank, num_chunks, num_copied_chunks)
    if among:
        machine.review(among)
    if joins is not None:
        machine.receive(0, begin(joins, *range(len(among))))
    return machine


def ticks(machine: Consolidation, number: int) -> list[ReductionAction]:
    """Let so many quarters of a time-out pass, in which a worker hears all others."""
    return [action for _ in range(number) for action in machine.tick(range(100), {})]


def begun(actions: list[ReductionAction]) -> set[BeginEpoch]:
    return {
        action.message
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, BeginEpoch)
    }
