"""What a worker can say about its run so far."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.gossip.published import Notice

logger = logging.getLogger("gossipdp")

# What others do after a worker's end weighs in the average from this share of its own steps on;
# fewer steps may be news that were under way.
LATER_SHARE = 0.1
MIN_LATER_STEPS = 50


@dataclass(frozen=True)
class Stats:
    """One worker's counts at one moment; see ``GossipDataParallel.stats``.

    Attributes:
        rank: of this worker.
        world_size: workers in the run.
        gradient_steps: boundaries of the first optimizer.
        samples: that this worker trained on.
        exchanges_initiated: that this worker asked for and completed.
        exchanges_answered: that a neighbour asked for and this worker completed.
        exchanges_failed: that were stopped before their end.
        achieved_comm_rate: 2 * exchanges_initiated / gradient_steps; the nominal rate in
            expectation. NaN before the first step.
        bytes_sent, bytes_received: on this worker's links, headers included.
        shared_bytes_sent, shared_bytes_received: of chunks that went by shared memory instead:
            read in place by neighbours of the same host, and theirs by this worker.
        exchange_seconds: time with an exchange under way, in the background.
        chunks_exchanged: chunks (1 to 4 MiB) in completed exchanges.
        chunks_repeated: those of them sent again in bfloat16, under ``wire_format="lattice8"``.
        waited_seconds: time that training waited for others: ``Exchange(pace="strict")``.
        exchanges_by_neighbour: completed exchanges per neighbour.
        edge_distance: half the mean squared distance to the partner over the last 16 exchanges;
            free, but far smaller than the consensus distance on sparse graphs. NaN before the
            first.
        kernels: what computes exchanges: ``numba`` (compiled), ``torch``, or both.
        step_seconds: running median of the duration of a gradient step. NaN before it exists.
        recent_exchanges: the last 16 that were completed here, oldest first, with their times.
        noticed: what this worker has noticed of others' deaths and returns, the oldest first.
        states_donated: optimizers' states given to workers that joined or came back.
        checkpoints: that were written by this process.
        checkpoints_failed: that could not be written.
        checkpoint_pause_seconds: time that training waited while checkpoints were copied.
    """

    rank: int
    world_size: int
    gradient_steps: int
    samples: int
    exchanges_initiated: int = 0
    exchanges_answered: int = 0
    exchanges_failed: int = 0
    achieved_comm_rate: float = float("nan")
    bytes_sent: int = 0
    bytes_received: int = 0
    shared_bytes_sent: int = 0
    shared_bytes_received: int = 0
    exchange_seconds: float = 0.0
    chunks_exchanged: int = 0
    chunks_repeated: int = 0
    waited_seconds: float = 0.0
    exchanges_by_neighbour: dict[int, int] = field(default_factory=dict)
    edge_distance: float = float("nan")
    kernels: str = ""
    step_seconds: float = float("nan")
    recent_exchanges: tuple[CompletedExchange, ...] = ()
    noticed: tuple[Notice, ...] = ()
    states_donated: int = 0
    checkpoints: int = 0
    checkpoints_failed: int = 0
    checkpoint_pause_seconds: float = 0.0

    @property
    def exchanges(self) -> int:
        """Completed exchanges, initiated or answered."""
        return self.exchanges_initiated + self.exchanges_answered


@dataclass(frozen=True)
class Consolidated:
    """How a run ended; every worker that took part holds the same parameters, bit for bit.

    Attributes:
        consensus_distance: (1/n) Σ ‖x_i - mean‖² just before averaging, after the momentum has
            flowed out; exact.
        world_size: workers over which the mean was taken.
        samples: over all workers and all of their lives.
        gradient_steps: likewise.
        gradient_steps_by_rank: of each worker, over all of its lives; the dead are there too.
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
            "worker %d ended after %d steps of its own, and then the others made %d more. "
            "Until then it still exchanged, so whoever trains last counts most in the average. End "
            "all workers together: budget_samples= with model.batches(loader) or `while not "
            "model.finished`, or model.epochs(loader, n)",
            rank,
            own,
            later,
        )
