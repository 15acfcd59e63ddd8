"""What simulated workers minimise: the seam between a run and its gradients.

An :class:`Objective` describes; :meth:`Objective.begin` makes the :class:`GradientSource` of one
run, which owns that run's random state and data order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Gradients:
    """What one gradient step each of k workers found.

    Attributes:
        values: gradients of the trained columns; (k, num_trained).
        buffer_changes: what the steps add to the buffer columns; (k, d - num_trained).
        losses: training loss of each batch; (k,).
    """

    values: Tensor
    buffer_changes: Tensor
    losses: Tensor


@dataclass(frozen=True)
class Evaluation:
    """How good one row of parameters is."""

    loss: float
    """Over the training objective."""
    metric: float | None = None
    """On held-out data, where the objective has such."""


class GradientSource(ABC):
    """The gradients of one run.

    Attributes:
        start: where each worker starts; (n, d). Its dtype is that of the whole run.
        num_trained: the first so many columns are parameters; the rest are float buffers, which
            exchanges average without momentum.
    """

    start: Tensor
    num_trained: int

    @abstractmethod
    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        """The next gradient step of each of ``ranks`` at the rows ``x`` of shape (k, d).

        Called once for every step of a rank, in the order of that rank's steps. The answer for a
        rank does not depend on the ranks that it is asked with.
        """

    @abstractmethod
    def evaluate(self, x: Tensor) -> Evaluation:
        """Judge one row of shape (d,); draws nothing from the run's random state."""


class Objective(ABC):
    """A task for simulated workers; frozen and picklable."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What to call it in tables and figures."""

    @property
    def has_gradients(self) -> bool:
        """Whether workers take gradient steps at all."""
        return True

    @property
    def metric_name(self) -> str | None:
        """What :attr:`Evaluation.metric` is called; None where there is none."""
        return None

    @abstractmethod
    def begin(self, num_workers: int, seed: int) -> GradientSource:
        """The gradients of one run; the same arguments give the same run."""
