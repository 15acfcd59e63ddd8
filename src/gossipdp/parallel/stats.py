"""The results of a worker: its counts so far, and how the run ended."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from gossipdp.gossip.counters import Counters
from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.gossip.snapshot import Notice

logger = logging.getLogger("gossipdp")

# Steps of others after a worker's end matter in the average from this share of its own steps on.
# Fewer may be news that was still under way.
LATER_SHARE = 0.1
MIN_LATER_STEPS = 50


class Stats(Counters, frozen=True, kw_only=True):
    """One worker's counts at one moment; see ``GossipDataParallel.stats``. It does not change.

    Attributes:
        rank: of this worker.
        world_size: workers in the run.
        kernels: computes exchanges: ``numba`` (compiled), ``torch``, or both.
        recent_exchanges: the last 16 that were completed here, oldest first, with their times.
        noticed: the deaths and returns of others that this worker has noticed, oldest first.

    The counters, each described in :class:`~gossipdp.gossip.counters.Counters`, are fields too.
    ``achieved_comm_rate``, ``edge_distance`` and ``step_seconds`` are NaN until they are known.
    ``edge_distance`` is free, but far smaller than the consensus distance on sparse graphs.
    """

    rank: int
    world_size: int
    kernels: str = ""
    recent_exchanges: tuple[CompletedExchange, ...] = ()
    noticed: tuple[Notice, ...] = ()


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


def warn_of_steps_after(rank: int, known: Mapping[int, int], result: Consolidated) -> None:
    """Warn if the others trained on long after this worker, by its own count, had ended.

    Args:
        rank: of this worker.
        known: the steps of each worker by rank, when this one ended.
        result: the end of the run.
    """
    steps = result.gradient_steps_by_rank
    own = steps.get(rank, 0)
    later = sum(n - known.get(each, 0) for each, n in steps.items() if each != rank)
    if later >= max(MIN_LATER_STEPS, LATER_SHARE * own):
        logger.warning(
            "worker %d ended after %d steps of its own, and then the others made %d more. It "
            "exchanged until the end, so the last to train count most in the average. End all "
            "workers together: budget_samples= with model.batches(loader) or `while not "
            "model.finished`, or model.epochs(loader, n)",
            rank,
            own,
            later,
        )
