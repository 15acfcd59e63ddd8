"""The results of a worker: its counts, its view of the others, and the end of the run."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from gossipdp.gossip.counters import Counters
from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.gossip.snapshot import LoopSnapshot
from gossipdp.gossip.sums import Outcome
from gossipdp.launcher.environment import show_address
from gossipdp.links.clock import since_boot_s
from gossipdp.logs import OF_RUN
from gossipdp.observe.status import MemberState, MemberStatus
from gossipdp.protocol.members import Status

logger = logging.getLogger("gossipdp")

# If others made more steps than this share of a worker's own after its end, they matter in the
# average. Fewer may be news that was still on its way.
LATER_SHARE = 0.1
MIN_LATER_STEPS = 50

# The names of a member's states in statistics and logs.
STATES: dict[Status, MemberState] = {
    Status.JOINING: "joining",
    Status.ALIVE: "training",
    Status.DONE: "done",
    Status.LEFT: "left",
    Status.DEAD: "lost",
}


class Stats(Counters, frozen=True, kw_only=True):
    """One worker's counts at one moment; see ``GossipDataParallel.stats``. It does not change.

    Attributes:
        kernels: computes exchanges: ``numba`` (compiled), ``torch``, or both.
        recent_exchanges: the last 16 that were completed here, oldest first, with their times.

    The fields of :class:`~gossipdp.gossip.counters.Counters` are fields too; NaN: not known yet.
    ``edge_distance`` is free, but far smaller than the consensus distance on sparse graphs.
    """

    kernels: str = ""
    recent_exchanges: tuple[CompletedExchange, ...] = ()


@dataclass(frozen=True)
class Consolidated:
    """The end of a run; every worker that took part holds the same parameters, bit for bit.

    Attributes:
        consensus_distance: (1/n) Σ ‖x_i - mean‖² just before averaging, after the momentum has
            flowed out; exact.
        world_size: workers over which the mean was taken.
        samples: of all workers, over all of their lives.
        gradient_steps: of all workers, over all of their lives.
        gradient_steps_by_rank: of each worker over all of its lives, the dead included.
    """

    consensus_distance: float
    world_size: int
    samples: int
    gradient_steps: int
    gradient_steps_by_rank: dict[int, int] = field(default_factory=dict, hash=False)


def missing_workers(snapshot: LoopSnapshot, now_s: float) -> str:
    """Name the workers that still train, and when each was last seen to make a step."""
    names = [
        f"worker {member.rank} (its last step came "
        f"{now_s - snapshot.stepped_s.get(member.rank, now_s):.0f} s ago)"
        for member in snapshot.members
        if member.status is Status.ALIVE
    ]
    if not names:
        return "all live workers are done and average their parameters"
    return f"{', '.join(names)} still train{'s' if len(names) == 1 else ''}"


def warn_of_absence(rank: int, outcome: Outcome, num_known: int) -> None:
    """Warn if the average at the end lacks some of the workers that the run had."""
    if outcome.num_workers < num_known:
        logger.warning(
            "worker %d: the average is over %d of %d workers; the others are lost, still train, or "
            "ended without consolidate(), which every worker has to call%s",
            rank,
            outcome.num_workers,
            num_known,
            "".join(f"; worker {other}: {why}" for other, why in outcome.without.items()),
            extra=OF_RUN,
        )


def warn_of_no_average(
    rank: int, snapshot: LoopSnapshot, is_early: bool, timeout_s: float, newest: Path | None
) -> None:
    """Warn once a run that a script ends by itself and has not saved the average.

    To have evaluated the average, as after each epoch, is not enough: a script that saves its
    module afterwards still saves one worker's. Of workers that trained together the first speaks
    that is not dead. Those that have left count too, and those that were found dead within the last
    time-out: the workers of one script end in no order, and one that ends without an average is
    found dead. Each speaks that ends before the budget is used up (``is_early``), or without
    ``consolidate()`` while another is in it. ``newest``: its last checkpoint.
    """
    members, ended_s = snapshot.members, since_boot_s() - timeout_s
    ending = {notice.rank for notice in snapshot.counters.noticed if notice.at_s > ended_s}
    ranks = {member.rank for member in members if member.status is not Status.DEAD} | ending
    is_odd = is_early or any(each.status in (Status.DONE, Status.LEFT) for each in members)
    if len(members) > 1 and (rank == min(ranks) or is_odd):
        logger.warning(
            "worker %d ends without consolidate(): %s%s",
            rank,
            "the budget is not used up, and the others train on without this worker. To end all, "
            "call model.stop() on one, and model.consolidate() on every worker"
            if is_early
            else "its module holds its own parameters, not the average of the workers. Call "
            "model.consolidate() on every worker, after the loop, before you evaluate or save",
            f"; its newest checkpoint is {newest}" if newest else "",
        )


def warn_of_steps_after(rank: int, known: Mapping[int, int], result: Consolidated) -> None:
    """Warn if the others trained on long after this worker, by its own count, had ended.

    ``known``: the steps of each worker by rank, when this one ended.
    """
    steps = result.gradient_steps_by_rank
    own = steps.get(rank, 0)
    later = sum(n - known.get(each, 0) for each, n in steps.items() if each != rank)
    if later >= max(MIN_LATER_STEPS, LATER_SHARE * own):
        logger.warning(
            "worker %d ended after %d steps of its own, and then the others made %d more. It "
            "exchanged until the end, so the last to train count most in the average. End all "
            "workers together: budget_samples= with model.batches(loader) or `while not "
            "model.finished`, or model.epochs(loader, n), with one samples= for all if their "
            "datasets differ in length",
            rank,
            own,
            later,
        )


def view_of(snapshot: LoopSnapshot, now_s: float) -> tuple[MemberStatus, ...]:
    """Return all workers that are known, for the status port."""

    def ago_s(at_s: float | None) -> float | None:
        return None if at_s is None else max(0.0, now_s - at_s)

    durations: dict[int, list[float]] = {}
    for each in snapshot.recent_exchanges:
        durations.setdefault(each.peer, []).append(each.ended_s - each.started_s)
    members = []
    for member in snapshot.members:
        rank, address = member.rank, ""
        if member.status_host and member.status_port:
            address = show_address(member.status_host, member.status_port)
        samples, steps = snapshot.progress.get(rank, (0, 0))
        members.append(
            MemberStatus(
                rank=rank,
                incarnation=member.incarnation,
                state=STATES[member.status],
                is_silent=rank in snapshot.silent,
                gradient_steps=steps,
                samples=samples,
                status_address=address,
                since_step_s=ago_s(snapshot.stepped_s.get(rank)),
                restarts=member.restarts,
                is_neighbour=rank in snapshot.neighbours,
                heard_ago_s=ago_s(snapshot.heard.get(rank)),
                exchange_seconds=fmean(durations[rank]) if rank in durations else None,
            )
        )
    return tuple(members)
