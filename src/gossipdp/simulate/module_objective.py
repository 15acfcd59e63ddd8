"""Any torch module as an objective: functional calls on the rows of one n x d state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from gossipdp.simulate.objective import Evaluation, Gradients, GradientSource, Objective
from gossipdp.simulate.row_gradients import LoopedGradients, RowGradients, VectorizedGradients
from gossipdp.simulate.row_layout import RowLayout

logger = logging.getLogger(__name__)

MakeModel: TypeAlias = Callable[[], nn.Module]
Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
Batches: TypeAlias = Callable[[int, int, int], Iterable[Any]]
Evaluate: TypeAlias = Callable[[nn.Module], Evaluation]

NUM_EVALUATION_BATCHES = 16


@final
class ModuleObjective(Objective):
    """Workers train a torch module, each on batches of its own.

    The trainable parameters of a worker are a row of the state, then its float buffers (BatchNorm
    statistics). Integer buffers are no part of it: every forward pass sees those of a new model.

    Gradients of many rows are computed together by ``torch.func.vmap``. What vmap cannot do
    (models that draw random numbers, such as dropout, or whose control flow depends on data) is
    done row by row, with random numbers of the rank's own; the log says so. So the gradient of a
    rank's k-th step depends on its row and the seed alone, not on what it is computed with.

    Args:
        make_model: a new module on the CPU; called with torch's random state seeded.
        loss: the mean loss of a batch, a scalar, from ``loss(model, batch)``.
        batches: the batches of one worker, ``batches(rank, num_workers, seed)``: a BatchLoader, a
            DataLoader, or anything that can be iterated again and again. A batch is a tensor, or
            a tuple, list or dict of such; the same arguments must give the same batches.
        evaluate: judges a model in evaluation mode. None: the mean loss of the first
            16 batches, drawn from the workers in turn.
        name: what to call it.
        metric_name: what ``evaluate`` puts into :attr:`Evaluation.metric`.
        vectorized: True, by vmap (an error where it cannot); False, row by row; None, by vmap
            where one attempt at the start succeeds.
        max_rows: how many rows are computed together, at most.

    For runs in several processes the callables must be picklable: module-level functions.

    Example:
        >>> from gossipdp.workloads import Digits
        >>> digits = Digits(network="perceptron")
        >>> objective = ModuleObjective(digits.make_model, digits.loss, digits.train_loader)
        >>> source = objective.begin(num_workers=4, seed=0)
        >>> source.start.shape
        torch.Size([4, 4810])
        >>> source.gradients([0, 2], source.start[[0, 2]]).values.shape
        torch.Size([2, 4810])
    """

    def __init__(
        self,
        make_model: MakeModel,
        loss: Loss,
        batches: Batches,
        *,
        evaluate: Evaluate | None = None,
        name: str = "module",
        metric_name: str | None = None,
        vectorized: bool | None = None,
        max_rows: int = 64,
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; it must be at least 1")
        self._name = name
        self._metric_name = metric_name
        self.make_model = make_model
        self.loss = loss
        self.batches = batches
        self.judge = evaluate
        self.vectorized = vectorized
        self.max_rows = max_rows

    @property
    def name(self) -> str:
        return self._name

    @property
    def metric_name(self) -> str | None:
        return self._metric_name

    def begin(self, num_workers: int, seed: int) -> GradientSource:
        return _ModuleSource(self, num_workers, seed)


class _ModuleSource(GradientSource):
    def __init__(self, objective: ModuleObjective, num_workers: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = objective.make_model()
        self._layout = RowLayout(self._model)
        self._seed = seed
        self._rows = _choose(objective, self._model, self._layout, num_workers, seed)
        self._batches = [
            _endless(objective.batches(rank, num_workers, seed), rank)
            for rank in range(num_workers)
        ]
        self._steps = [0] * num_workers
        self.start = self._layout.read(self._model).expand(num_workers, -1).clone()
        self.num_trained = self._layout.num_trained
        self._judge = objective.judge or _MeanLoss(objective, num_workers, seed)

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        batches, seeds = [], []
        for rank in ranks:
            batches.append(next(self._batches[rank]))
            seeds.append(Random(f"{self._seed} step {rank} {self._steps[rank]}").getrandbits(63))
            self._steps[rank] += 1
        return self._rows.gradients(x, batches, seeds)

    def evaluate(self, x: Tensor) -> Evaluation:
        self._layout.write(x, self._model)
        self._model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return self._judge(self._model)


class _MeanLoss:
    """Evaluates on the first batches of the workers."""

    def __init__(self, objective: ModuleObjective, num_workers: int, seed: int) -> None:
        self._loss = objective.loss
        sources: dict[int, Iterator[Any]] = {}
        self._batches = []
        for count in range(NUM_EVALUATION_BATCHES):
            rank = count % num_workers
            if rank not in sources:
                sources[rank] = _endless(objective.batches(rank, num_workers, seed), rank)
            self._batches.append(next(sources[rank]))

    def __call__(self, model: nn.Module) -> Evaluation:
        losses = [float(self._loss(model, batch)) for batch in self._batches]
        return Evaluation(loss=sum(losses) / len(losses))


def _choose(
    objective: ModuleObjective, model: nn.Module, layout: RowLayout, num_workers: int, seed: int
) -> RowGradients:
    """How to compute the gradients of rows, tried out on a batch that training does not miss."""
    looped = LoopedGradients(model, objective.loss, layout)
    if objective.vectorized is False:
        return looped
    vectorized = VectorizedGradients(model, objective.loss, layout, objective.max_rows)
    batch = next(_endless(objective.batches(0, num_workers, seed), 0))
    row = layout.read(model)
    looped.gradients(row.unsqueeze(0), [batch], [0])  # an error in the model itself is its own
    try:
        vectorized.gradients(row.expand(2, -1), [batch, batch], [0, 0])
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        if objective.vectorized:
            raise ValueError(
                f"the gradients of {objective.name} cannot be computed together by torch.func.vmap "
                f"({reason}): leave vectorized at None or set it to False, which is slower"
            ) from error
        logger.warning(
            "the gradients of %s are computed one worker at a time, which is slower, since "
            "torch.func.vmap cannot: %s",
            objective.name,
            reason,
        )
        return looped
    return vectorized


def _endless(batches: Iterable[Any], rank: int) -> Iterator[Any]:
    """Iterate over and over again."""
    while True:
        none = True
        for batch in batches:
            none = False
            yield batch
        if none:
            raise ValueError(
                f"the batches of rank {rank} have come to an end: give an iterable that can be "
                "iterated again, such as a list or a DataLoader, with at least one batch"
            )
