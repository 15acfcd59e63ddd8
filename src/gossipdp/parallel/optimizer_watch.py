"""A look at an optimizer: copies of the weights, memory across steps, steps without effect."""

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gossipdp.logs import OF_RUN
from gossipdp.parallel.shards import local

logger = logging.getLogger("gossipdp")

MAX_SAMPLES = 256
# Two or three values may agree by chance.
MIN_VALUES = 4
TOLERANCE = 0.01
MOST_SCALE = 2.0  # of a moment to its gradient
# Two optimizers may hold each other.
MAX_DEPTH = 6
COMPARES_GRADIENTS = (torch.optim.LBFGS,)


class OptimizerWatch:
    r"""Finds out whether an optimizer copies the weights, changes none, or remembers its steps.

    Exchanges move a parameter, but not a copy of it that an optimizer keeps: float32 master
    weights, slow weights (Lookahead), the z of schedule-free, an average. Such an optimizer pulls
    the parameter back to its copy, at one end of an exchange only, or ends with a copy that was not
    averaged. It does not help to add to the copy what an exchange adds to the parameter: z then
    still drifts apart between workers of unlike data. It helps to exchange the copy itself.

    A copy is recognized by its values. Let b and a be some values of a parameter before and after a
    step, s those of a tensor in the optimizer with as many elements, and t in 0..1:

    .. math:: \min_t \lVert s - b - t (a - b) \rVert \le 0.01 \, \lVert b - \bar b \rVert

    A parameter proves nothing if it is constant, if the step was larger than itself, or if a moment
    of its gradient may look like it: under a loss of 5 b^2 Adam's first momentum is b. The watch
    looks after an optimizer's first step, and again when its state gets further tensors.

    L-BFGS takes the difference of two steps' gradients for curvature along its own step. An
    exchange between them moves the parameters too, and the optimizer can diverge by it.

    Args:
        optimizer: one of the wrapper, which has moved the parameters already.
        names: of the module's parameters, by their id.
        exchanged: the tensors in its state that the user wants exchanged, by name.
        is_moved: whether exchanges move the parameters between two steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        exchanged: Collection[str] = (),
        *,
        is_moved: bool,
    ) -> None:
        self._optimizer = optimizer
        self._looks_for_memory = is_moved and isinstance(optimizer, COMPARES_GRADIENTS)
        self._exchanged = exchanged
        self._parameters = {
            names[id(parameter)]: parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._names = names
        # Of the parameters before the first step; {} after it.
        self._before = self._values()
        self._versions = {name: each._version for name, each in self._parameters.items()}
        self._num_kept = -1, -1

    def _values(self) -> dict[str, Tensor]:
        return {name: _sample(parameter) for name, parameter in self._parameters.items()}

    def stepped(self) -> None:
        """Look at an optimizer that has stepped, and whose boundary has not begun."""
        if self._looks_for_memory:
            self._warn_of_memory()
        state = self._optimizer.state
        num_kept = len(state), len(next((of for of in state.values() if isinstance(of, dict)), ()))
        if num_kept == self._num_kept:
            return
        self._num_kept = num_kept
        after = self._values()
        before, self._before = self._before or after, {}
        if before is not after and all(  # to write equal values, as at rate 0, is fine
            parameter._version == self._versions[name] and torch.equal(after[name], before[name])
            for name, parameter in self._parameters.items()
        ):
            logger.warning(
                "the first step of the %s changed no parameter. Either no gradient was there: call "
                "backward() before step(); or it writes to memory that it took from the parameters "
                "before they were wrapped, which moves them: let it look at the parameters "
                "(the parameter, and not its storage) in each step",
                type(self._optimizer).__name__,
                extra=OF_RUN,
            )
        self._find_copy(before, after)

    def _warn_of_memory(self) -> None:
        """Warn once of curvature that was measured across an exchange.

        ``n_iter`` counts since the state was empty, so a step alone never counts past its maximum.
        """
        states = [each for each in self._optimizer.state.values() if isinstance(each, dict)]
        kept = max((state.get("n_iter", 0) for state in states), default=0)
        if kept <= self._optimizer.param_groups[0]["max_iter"]:
            return
        self._looks_for_memory = False
        logger.warning(
            "the %s keeps its memory from step to step, and takes what an exchange adds between "
            "two steps for an effect of its own direction: it can diverge. Forget the memory "
            "before each step, optimizer.state.clear()",
            type(self._optimizer).__name__,
            extra=OF_RUN,
        )

    def _find_copy(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        groups = self._optimizer.param_groups
        decay = max(float(group.get("weight_decay") or 0.0) for group in groups)
        telling = {
            name: (before[name], values)
            for name, values in after.items()
            if _is_telling(self._parameters[name], decay, before[name], values)
        }
        by_size: dict[int, list[str]] = {}
        for name in telling:
            by_size.setdefault(local(self._parameters[name]).numel(), []).append(name)
        own = {local(parameter).data_ptr() for parameter in self._parameters.values()}
        for key, owner, tensor in self._kept():
            if tensor.data_ptr() in own or key in self._exchanged:
                continue
            for name in by_size.get(tensor.numel(), ()):
                if owner in (None, name) and _is_between(_sample(tensor), *telling[name]):
                    self._refuse_copy(key, name)

    def _kept(self) -> Iterator[tuple[str, str | None, Tensor]]:
        """Yield each tensor that the optimizer holds: its name, and of which parameter it is."""
        for attribute, value in vars(self._optimizer).items():
            if attribute != "state":
                yield from ((attribute, None, tensor) for tensor in _tensors(value))
        for parameter, state in self._optimizer.state.items():  # or what is of all, by its name
            owner = self._names.get(id(parameter))
            named = state if isinstance(state, dict) else {"state" if owner else parameter: state}
            for key, value in named.items():
                yield from ((str(key), owner, tensor) for tensor in _tensors(value))

    def _refuse_copy(self, key: str, name: str) -> None:
        raise ValueError(
            f"the {type(self._optimizer).__name__} keeps its own copy of the weights: {key!r} of "
            f"parameter {name!r}. "
            "Exchanges and consolidate() move the parameter alone, and the copy would undo that "
            f"here. Let exchanges average the copy too, exchange=Exchange(moments={{{key!r}: 1}}); "
            "or use an optimizer that keeps none. In place of float32 master weights train float32 "
            "parameters under torch.autocast; in place of an average, update a "
            "torch.optim.swa_utils.AveragedModel after each step"
        )


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the dense tensors of real numbers in nested containers, and in inner optimizers."""
    if isinstance(value, torch.optim.Optimizer):
        value = vars(value)
    if isinstance(value, Tensor):
        tensor = local(value)
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if is_plain and tensor.is_floating_point():
            yield tensor
    elif isinstance(value, (dict, list, tuple)) and depth < MAX_DEPTH:
        for held in value.values() if isinstance(value, dict) else value:
            yield from _tensors(held, depth + 1)


def _sample(tensor: Tensor) -> Tensor:
    values = local(tensor).detach().reshape(-1)
    return values[:: -(-values.numel() // MAX_SAMPLES) or 1].to("cpu", torch.float64, copy=True)


def _is_telling(parameter: Tensor, decay: float, before: Tensor, after: Tensor) -> bool:
    """Return whether a tensor that looks like this parameter must be a copy of it."""
    spread = _spread(before)
    if before.shape != after.shape or before.numel() < MIN_VALUES or spread == 0.0:
        return False
    if float((after - before).norm()) > spread:
        return False
    if (held := next(_tensors(parameter.grad), None)) is None:
        return True
    gradient = _sample(held)
    for moment in (gradient, gradient.abs(), gradient**2, gradient + decay * before):
        # Scaled and shifted as fits ``before`` best: is it on the way?
        centred = moment - moment.mean()
        scale = float(centred @ before) / max(float(centred @ centred), 1e-300)
        fitted = before.mean() + scale * centred
        if abs(scale) <= MOST_SCALE and _is_between(fitted, before, after):
            return False
    return True


def _is_between(held: Tensor, before: Tensor, after: Tensor) -> bool:
    step = after - before
    size = float(step @ step)
    along = min(1.0, max(0.0, float((held - before) @ step) / size)) if size else 0.0
    return float((held - before - along * step).norm()) <= TOLERANCE * _spread(before)


def _spread(values: Tensor) -> float:
    return float((values - values.mean()).norm())
