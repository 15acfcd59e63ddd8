"""gossipdp inside other frameworks: each worker is a training of its own to the framework.

    transformers      GossipCallback for the Trainer of Hugging Face transformers
    accelerate        gossip_data_parallel for a loop under an Accelerator
    lightning         GossipStrategy for the Trainer of Lightning

They share ``single_process``, which hides the launcher from a framework while it is set up.
Importing this package imports no framework; each module needs its own (``pip install
'gossipdp[transformers]'`` or ``'gossipdp[lightning]'``).
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gossipdp.launcher.environment import Environment, without_launcher_variables

__all__ = ["Worker", "single_process"]

# numpy.random.seed, which the frameworks call, takes no larger one.
NUM_SEEDS = 2**32


@contextmanager
def needed_from(extra: str) -> Iterator[None]:
    """Name the extra that brings a framework if it is not there to be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        problem = f"this integration needs {error.name}: pip install 'gossipdp[{extra}]'"
        raise ModuleNotFoundError(problem, name=error.name) from error


@dataclass(frozen=True)
class Worker:
    """The place of this process in its run, before there is a model to ask.

    Attributes:
        rank: 0 to ``world_size`` - 1; -1 for one that joins and has yet to be given a rank.
        world_size: workers in the run; 0 for one that joins.
        seed: for this worker's data order and random numbers, in 0..2^32 - 1; different on each
            worker of a run.
    """

    rank: int
    world_size: int
    seed: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def single_process(seed: int = 0) -> Iterator[Worker]:
    """Hide the launcher's variables from frameworks; gossipdp still knows them.

    Accelerate, transformers and Lightning start ``torch.distributed`` when they find RANK and
    WORLD_SIZE. Set them up within this, and each worker is one process to them, then and later.

    Args:
        seed: of the run; the same on all workers.

    Yields:
        This worker.

    Example:
        >>> with single_process(seed=7) as worker:
        ...     (worker.rank, worker.world_size, worker.is_first)
        (0, 1, True)
    """
    environment = Environment.read()
    # Different for each worker and each of its lives, for ranks up to four million.
    lives = environment.num_restarts + environment.restart_count
    own_seed = ((seed * 1_000_003 + environment.rank) * 1_009 + lives) % NUM_SEEDS
    if environment.needs_rank:
        own_seed = secrets.randbelow(NUM_SEEDS)
    with without_launcher_variables():
        yield Worker(environment.rank, environment.world_size, own_seed)
