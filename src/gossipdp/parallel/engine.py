"""What moves parameters between workers: the seam behind ``method=``, and what both sides share."""

import abc
import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from gossipdp.observe.status import MemberStatus, NeighbourStatus
from gossipdp.parallel.checkpoint import Captured, Counts
from gossipdp.parallel.stats import Consolidated, Stats


class Engine(abc.ABC):
    """One worker's way of training together with the others.

    Main thread only; :meth:`stats` and :meth:`view` any thread may call.

    Args:
        module: of the user.
        before: what this worker had counted when its run resumed.

    Attributes:
        rank, incarnation: of this worker; how many of its lives came before this one.
        world_size: workers in the run.
        run_id, graph: of the run; the graph's name.
        forward_module: what computes the forward pass: the user's module, or a wrapper of it.
        is_consolidating: ``consolidate()`` was called.
        is_end_asked: says whether this process was asked to end (SIGTERM).
    """

    rank: int
    world_size: int
    run_id: str
    incarnation = 0
    graph = ""

    def __init__(self, module: nn.Module, before: Counts) -> None:
        self.forward_module = module
        self.is_consolidating = False
        self.is_end_asked: Callable[[], bool] = lambda: False
        self._before = before
        self._gradient_steps = self._samples = 0
        self._waited_s = 0.0
        self._is_closed = False

    @property
    def step_number(self) -> int:
        """The number of this worker's last gradient step; goes on where a run resumed."""
        return self._before.step + self._gradient_steps

    def counts(self) -> Counts:
        """What this worker has counted, in all of its lives."""
        return Counts(
            self.step_number,
            self._before.steps + self._gradient_steps,
            self._before.samples + self._samples,
        )

    @abc.abstractmethod
    def boundary(self, optimizer_index: int, samples: int) -> int:
        """The optimizer of that index has just stepped, on ``samples`` samples.

        Returns:
            On how many all processes of this worker did.
        """

    @abc.abstractmethod
    def total_samples(self) -> int:
        """Samples over all workers, as far as this one knows."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End the run for all workers, before its budget is used up."""

    @property
    @abc.abstractmethod
    def is_stopped(self) -> bool:
        """Whether a worker has done that, as far as this one knows."""

    @property
    def is_ending(self) -> bool:
        """Whether this worker is to save and end, between two steps."""
        return self.is_end_asked()

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ModelChangedError where parameters were moved or replaced since wrapping."""

    @abc.abstractmethod
    def loaded(self, tensors: Iterable[Tensor]) -> None:
        """Void what was under way to these parameters and buffers: they were loaded."""

    @abc.abstractmethod
    def export(self, values: dict[str, Any]) -> None:
        """Replace, in a state_dict, what is not yet in the module's own storage."""

    @abc.abstractmethod
    def capture(self) -> Captured:
        """Copy this worker's state.

        Raises:
            PoisonedError: trained parameters hold NaN or infinity.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """See ``GossipDataParallel.averaged``; here the parameters are the average at any time."""
        return contextlib.nullcontext()

    def consolidate(self, timeout_s: float = math.inf) -> Consolidated:
        """See ``GossipDataParallel.consolidate``."""
        if self._is_closed:
            raise RuntimeError("consolidate() was called before, or the model is closed")
        self.is_consolidating = True
        return self._consolidate(timeout_s)

    @abc.abstractmethod
    def _consolidate(self, timeout_s: float) -> Consolidated: ...

    def stats(self) -> Stats:
        """See ``GossipDataParallel.stats``."""
        counts = self.counts()
        return Stats(
            rank=self.rank,
            world_size=self.world_size,
            gradient_steps=counts.steps,
            samples=counts.samples,
            waited_seconds=self._waited_s,
        )

    @abc.abstractmethod
    def view(self) -> tuple[tuple[MemberStatus, ...], tuple[NeighbourStatus, ...]]:
        """All workers that are known, and those next to this one, for the status port."""

    def close(self) -> None:
        """End threads and links. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    @abc.abstractmethod
    def _close(self) -> None: ...
