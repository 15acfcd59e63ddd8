"""What moves parameters between workers: the seam behind ``method=``."""

import abc
import math
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from gossipdp.parallel.checkpoint import Captured
from gossipdp.parallel.stats import Consolidated, RunView, Stats


class Engine(abc.ABC):
    """One worker's way of training together with the others; main thread only.

    Attributes:
        rank: of this worker.
        incarnation: how many lives of this worker came before this one.
        world_size: workers in the run.
        forward_module: what computes the forward pass: the user's module, or a wrapper of it.
    """

    rank: int
    incarnation: int
    world_size: int
    forward_module: nn.Module

    @abc.abstractmethod
    def boundary(self, optimizer_index: int, samples: int) -> None:
        """The optimizer of that index has just stepped, on ``samples`` samples."""

    @abc.abstractmethod
    def total_samples(self) -> int:
        """Samples over all workers, as far as this one knows."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ModelChangedError where parameters were moved or replaced since wrapping."""

    @abc.abstractmethod
    def loaded(self) -> None:
        """The module's parameters were loaded from elsewhere: what was under way is void."""

    @abc.abstractmethod
    def export(self, values: dict[str, Any]) -> None:
        """Replace, in a state_dict, what is not yet in the module's own storage."""

    @property
    @abc.abstractmethod
    def step_number(self) -> int:
        """The number of this worker's last gradient step; goes on where a run resumed."""

    @abc.abstractmethod
    def capture(self) -> Captured:
        """Copy this worker's state.

        Raises:
            PoisonedError: trained parameters hold NaN or infinity.
        """

    @abc.abstractmethod
    def averaged(self) -> AbstractContextManager[None]:
        """See ``GossipDataParallel.averaged``."""

    @abc.abstractmethod
    def consolidate(self, timeout_s: float = math.inf) -> Consolidated:
        """See ``GossipDataParallel.consolidate``."""

    @abc.abstractmethod
    def stats(self) -> Stats:
        """See ``GossipDataParallel.stats``."""

    @abc.abstractmethod
    def view(self) -> RunView:
        """What else it knows of the run, for the status port; any thread may ask."""

    @abc.abstractmethod
    def close(self) -> None:
        """End threads and links. A second call does nothing."""
