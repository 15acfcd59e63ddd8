"""An objective made of any torch module: functional calls on the rows of one (n, d) state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from gossipdp.rules import at_least_1
from gossipdp_lab.simulate.objectives import Evaluation, Gradients, GradientSource, Objective
from gossipdp_lab.tasks.digits import Digits

logger = logging.getLogger("gossipdp.simulate")  # beneath the one that --log-level sets

MakeModel: TypeAlias = Callable[[], nn.Module]
Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
Batches: TypeAlias = Callable[[int, int, int], Iterable[Any]]
Evaluate: TypeAlias = Callable[[nn.Module], Evaluation]

NUM_EVALUATION_BATCHES = 16


@final
class ModuleObjective(Objective):
    """A torch module that workers train, each on batches of its own.

    A row of the state holds the trainable parameters of a worker, then its float buffers (BatchNorm
    statistics). Integer buffers are no part of it: every forward pass sees those of a new model.

    Gradients of many rows are computed together by ``torch.func.vmap``, if their batches have one
    shape. If vmap cannot do it (models that draw random numbers, such as dropout, or whose control
    flow depends on data), they are computed row by row, with random numbers of the rank's own, and
    the log says so. So the gradient of a rank's k-th step depends on its row and the seed alone,
    and not on the way in which it is computed.

    Args:
        make_model: a new module on the CPU; called with torch's random state seeded.
        loss: the mean loss of a batch, a scalar, from ``loss(model, batch)``.
        batches: the batches of one worker, ``batches(rank, num_workers, seed)``: a BatchLoader, a
            DataLoader, or anything that can be iterated again and again. A batch is a tensor, or
            a tuple, list or dict of such; the same arguments must give the same batches.
        evaluate: judges a model in evaluation mode. None: the mean loss of the first
            16 batches, drawn from the workers in turn.
        name: its name in tables and figures.
        metric_name: the name of :attr:`Evaluation.metric` as ``evaluate`` sets it.
        max_rows: rows that are computed together, at most; 1: row by row, without vmap.

    For runs in several processes the callables must be picklable, by cloudpickle at least.

    Example:
        >>> from gossipdp_lab.tasks.digits import Digits
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
        max_rows: int = 64,
    ) -> None:
        self.name, self.metric_name = name, metric_name
        self.make_model = make_model
        self.loss = loss
        self.batches = batches
        self.judge = evaluate
        self.max_rows = at_least_1("max_rows", max_rows)

    def begin(self, num_workers: int, seed: int) -> GradientSource:
        return _ModuleSource(self, num_workers, seed)


class RowLayout:
    """Trainable parameters, then float buffers, each in the order of the module's names.

    A parameter under several names is one, under the first of them. Frozen parameters and integer
    buffers are not in the row.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        if not trained:
            raise ValueError("the module has no trainable parameter: there is nothing to simulate")
        tensors: dict[str, Tensor] = {**trained, **buffers}
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1:
            raise ValueError(
                f"the module's parameters and float buffers are of {len(dtypes)} dtypes "
                f"({', '.join(sorted(map(str, dtypes)))}); a row has one: convert the module, "
                "for instance by .float()"
            )
        devices = {tensor.device.type for tensor in tensors.values()}
        if devices != {"cpu"}:
            raise ValueError(
                f"the module lies on {', '.join(sorted(devices))}; make it on the CPU, where "
                "simulations run"
            )
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.buffers = list(buffers)
        self.num_trained = sum(tensor.numel() for tensor in trained.values())

    def read(self, model: nn.Module) -> Tensor:
        """Return the row of a module; (d,)."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.shapes])

    @torch.no_grad()
    def write(self, row: Tensor, model: nn.Module) -> None:
        """Copy a row of shape (d,) into a module."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, value in self.tensors(row[: self.num_trained], row[self.num_trained :]).items():
            tensors[name].copy_(value)

    def tensors(self, trained: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the two parts of a row, by name; views."""
        lengths = [shape.numel() for shape in self.shapes.values()]
        num_parameters = len(lengths) - len(self.buffers)
        pieces = (
            *trained.split(lengths[:num_parameters]),
            *buffers.split(lengths[num_parameters:]),
        )
        named = zip(self.shapes.items(), pieces, strict=True)
        return {name: piece.view(shape) for (name, shape), piece in named}


class _LossOfModel(nn.Module):
    """The loss as a module, so that functional calls replace the model's tensors within."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


class _ModuleSource(GradientSource):
    def __init__(self, objective: ModuleObjective, num_workers: int, seed: int) -> None:
        self._objective, self._num_workers, self._seed = objective, num_workers, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = objective.make_model()
        self._layout = RowLayout(self._model)
        self._loss_of_model = _LossOfModel(self._model, objective.loss)
        self._integers = {
            f"model.{name}": buffer.clone()
            for name, buffer in self._model.named_buffers()
            if name not in self._layout.shapes
        }
        self._together = vmap(grad(self._loss, has_aux=True))
        self._batches = [self._batches_of(rank) for rank in range(num_workers)]
        self._steps = [0] * num_workers
        self.start = self._layout.read(self._model).expand(num_workers, -1).clone()
        self.num_trained = self._layout.num_trained
        self._is_vectorized = objective.max_rows > 1 and self._can_vectorize()
        self._judged: list[Any] = []
        if objective.judge is None:
            num_sources = min(num_workers, NUM_EVALUATION_BATCHES)
            turns = cycle([self._batches_of(rank) for rank in range(num_sources)])
            self._judged = [next(batches) for batches in islice(turns, NUM_EVALUATION_BATCHES)]

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        batches, seeds = [], []
        for rank in ranks:
            batches.append(next(self._batches[rank]))
            seeds.append(Random(f"{self._seed} step {rank} {self._steps[rank]}").getrandbits(63))
            self._steps[rank] += 1
        if self._is_vectorized and all(_is_alike(batches[0], batch) for batch in batches[1:]):
            return self._vectorized(x, batches)
        return self._looped(x, batches, seeds)

    def evaluate(self, x: Tensor) -> Evaluation:
        self._layout.write(x, self._model)
        self._model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if self._objective.judge is not None:
                return self._objective.judge(self._model)
            losses = [float(self._objective.loss(self._model, batch)) for batch in self._judged]
            return Evaluation(loss=sum(losses) / len(losses))

    def _batches_of(self, rank: int) -> Iterator[Any]:
        """Yield a worker's batches from the first on, over and over again."""
        batches = self._objective.batches(rank, self._num_workers, self._seed)
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

    def _loss(self, trained: Tensor, buffers: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of one row, and its new buffers: a pure function of tensors."""
        tensors = self._layout.tensors(trained, buffers)
        # The model changes its buffers in place: copies, so that nothing outside is changed.
        state = {f"model.{name}": value.clone() for name, value in tensors.items()}
        state |= {name: value.clone() for name, value in self._integers.items()}
        loss = functional_call(self._loss_of_model, state, (batch,))
        after = [state[f"model.{name}"].flatten() for name in self._layout.buffers]
        return loss, torch.cat([buffers[:0], *after])

    def _vectorized(self, x: Tensor, batches: Sequence[Any]) -> Gradients:
        """Compute many rows together."""
        self._loss_of_model.train()
        most, found = self._objective.max_rows, []
        for begin in range(0, len(batches), most):
            rows = x[begin : begin + most]
            trained, buffers = rows[:, : self.num_trained], rows[:, self.num_trained :]
            stacked = tree_map(lambda *each: torch.stack(each), *batches[begin : begin + most])
            values, after = self._together(trained, buffers, stacked)
            found.append((values, after.detach() - buffers))
        return Gradients(*map(torch.cat, zip(*found, strict=True)))

    def _looped(self, x: Tensor, batches: Sequence[Any], seeds: Sequence[int]) -> Gradients:
        """Compute one row after the other, each with a random state of its own."""
        self._loss_of_model.train()
        values, changes = [], []
        with torch.random.fork_rng(devices=[]):
            for row, batch, seed in zip(x, batches, seeds, strict=True):
                torch.manual_seed(seed)
                trained, buffers = row[: self.num_trained], row[self.num_trained :]
                trained = trained.detach().requires_grad_()
                loss, after = self._loss(trained, buffers, batch)
                values += torch.autograd.grad(loss, trained)
                changes.append(after.detach() - buffers)
        return Gradients(torch.stack(values), torch.stack(changes))

    def _can_vectorize(self) -> bool:
        """Try vmap on a batch that training does not need, and return whether it works."""
        batch = next(self._batches_of(0))
        row = self._layout.read(self._model)
        self._looped(row.unsqueeze(0), [batch], [0])  # an error in the model itself is its own
        try:
            self._vectorized(row.expand(2, -1), [batch, batch])
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.warning(
                "the gradients of %s are computed one worker at a time, which is slower, since "
                "torch.func.vmap cannot: %s",
                self._objective.name,
                str(error).splitlines()[0],
            )
            return False
        return True


def _is_alike(batch: Any, other: Any) -> bool:
    """Say if two batches can be stacked."""
    pairs = zip(tree_leaves(batch), tree_leaves(other), strict=True)
    return all((one.shape, one.dtype) == (two.shape, two.dtype) for one, two in pairs)


def digits_objective(
    *, batch_size: int = 32, dirichlet_alpha: float | None = None
) -> ModuleObjective:
    """Make an objective of the handwritten digits of :class:`~gossipdp_lab.tasks.digits.Digits`.

    The loss is that of all 1,437 training images, whatever images each worker has; the metric
    is the accuracy on the 360 test images.

    The network is a perceptron (64-64-10), since simulations compute the gradients of all workers
    on one machine. With 64 workers one of its gradients takes well under 0.1 ms; one of the demo's
    convolutional network takes 5 to 10 ms. Methods and graphs differ as much on it.

    Args:
        batch_size: images in each gradient step of a worker.
        dirichlet_alpha: class shares of each worker's images ~ Dirichlet(alpha); None: alike.
    """
    digits = Digits(network="perceptron", batch_size=batch_size, dirichlet_alpha=dirichlet_alpha)
    return ModuleObjective(
        digits.make_model,
        digits.loss,
        digits.train_loader,
        evaluate=partial(_judge_digits, digits),
        name="digits",
        metric_name=digits.metric_name,
    )


def _judge_digits(digits: Digits, model: nn.Module) -> Evaluation:
    return Evaluation(digits.training_loss(model), digits.evaluate(model))
