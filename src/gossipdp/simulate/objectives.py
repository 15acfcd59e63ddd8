"""The objectives by their names on the command line, built in or the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, final

from torch import nn

from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.module_objective import ModuleObjective
from gossipdp.simulate.objective import Evaluation, GradientSource, Objective
from gossipdp.simulate.quadratic import Quadratic
from gossipdp.workloads.digits import Digits, Network

OBJECTIVES = ("consensus", "quadratic", "digits", "digits-convolutional")

CONVOLUTIONAL_ROWS = 8
"""So many convolutional networks at once fit the processor's caches; 64 take twice as long each."""


def make_objective(
    name: str,
    *,
    dimension: int = 64,
    mu: float = 1.0,
    smoothness: float = 1.0,
    noise_variance: float = 1.0,
    heterogeneity: float = 0.0,
    batch_size: int = 32,
    disjoint: bool = False,
    dirichlet_alpha: float | None = None,
) -> Objective:
    """The objective of this name; arguments of other objectives play no part.

    ====================  =======================================================================
    consensus             no gradients; ``dimension``
    quadratic             ``dimension``, ``mu``, ``smoothness``, ``noise_variance``,
                          ``heterogeneity``: see :class:`~gossipdp.simulate.quadratic.Quadratic`
    digits                see :func:`digits_objective`; ``batch_size``, ``disjoint``,
                          ``dirichlet_alpha``
    digits-convolutional  the same with the network of ``gossipdp demo``
    module:function       what that function returns: see :func:`load_objective`
    ====================  =======================================================================

    Raises:
        ValueError: the name is unknown, or an argument is not valid.
    """
    if name == "consensus":
        return Consensus(dimension)
    if name == "quadratic":
        return Quadratic(dimension, mu, smoothness, noise_variance, heterogeneity)
    if name in ("digits", "digits-convolutional"):
        return digits_objective(
            network="perceptron" if name == "digits" else "convolutional",
            batch_size=batch_size,
            disjoint=disjoint,
            dirichlet_alpha=dirichlet_alpha,
        )
    if ":" in name:
        return load_objective(name)
    raise ValueError(
        f"there is no objective {name!r}; choose one of {', '.join(OBJECTIVES)}, or name a "
        "function that returns one: package.module:function or file.py:function"
    )


def digits_objective(
    *,
    network: Network = "perceptron",
    batch_size: int = 32,
    disjoint: bool = False,
    dirichlet_alpha: float | None = None,
) -> ModuleObjective:
    """Handwritten digits, as :class:`~gossipdp.workloads.Digits` has them.

    The loss is that of all 1,437 training images, whatever images each worker has; the metric
    is the accuracy on the 360 test images.

    The perceptron (64-64-10) is the default, since simulations compute the gradients of all
    workers on one machine: one of 64 workers' at a time costs well under 0.1 ms, where one of the
    demo's convolutional network costs 5 to 10 ms. It differs between methods and graphs as much.

    Args:
        network: "perceptron", or "convolutional" as in ``gossipdp demo``, with BatchNorm.
        batch_size: images in each gradient step of a worker.
        disjoint: no two workers have the same images.
        dirichlet_alpha: class shares of each worker's images ~ Dirichlet(alpha); None: alike.
    """
    digits = Digits(
        network=network,
        batch_size=batch_size,
        disjoint=disjoint,
        dirichlet_alpha=dirichlet_alpha,
    )
    is_perceptron = network == "perceptron"
    return ModuleObjective(
        digits.make_model,
        digits.loss,
        digits.train_loader,
        evaluate=partial(_judge_digits, digits),
        name="digits" if is_perceptron else "digits-convolutional",
        metric_name=digits.metric_name,
        vectorized=True,
        max_rows=64 if is_perceptron else CONVOLUTIONAL_ROWS,
    )


def load_objective(place: str) -> Objective:
    """The objective that a function of the user's returns, called without arguments.

    Args:
        place: ``package.module:function`` of a module that can be imported, or
            ``file.py:function``.

    Returns:
        An objective that can be pickled whatever the function returned, since it is made anew
        from ``place`` in each process.

    Raises:
        ValueError: there is no such module, file or function, or it returns something else.
    """
    return _LoadedObjective(place)


@final
class _LoadedObjective(Objective):
    def __init__(self, place: str) -> None:
        module_name, _, function_name = place.rpartition(":")
        if not module_name or not function_name:
            raise ValueError(
                f"{place!r} names no function; write package.module:function or file.py:function"
            )
        if module_name.endswith(".py"):
            path = Path(module_name).resolve()
            self._place = f"{path}:{function_name}"
            module = _import_file(path)
        else:
            self._place = place
            module = _import_module(module_name)
        function: Callable[[], Any] | None = getattr(module, function_name, None)
        if not callable(function):
            raise ValueError(f"{module_name} has no function {function_name!r}")
        objective = function()
        if not isinstance(objective, Objective):
            raise ValueError(
                f"{place} returned a {type(objective).__name__}; it must return a "
                "gossipdp.simulate.Objective, for instance a ModuleObjective"
            )
        self._objective = objective

    def __reduce__(self) -> tuple[type[_LoadedObjective], tuple[str]]:
        return _LoadedObjective, (self._place,)

    @property
    def name(self) -> str:
        return self._objective.name

    @property
    def has_gradients(self) -> bool:
        return self._objective.has_gradients

    @property
    def metric_name(self) -> str | None:
        return self._objective.metric_name

    def begin(self, num_workers: int, seed: int) -> GradientSource:
        return self._objective.begin(num_workers, seed)


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the user's module needs
        raise ValueError(
            f"there is no module {name!r} on the import path; name a file instead: file.py:function"
        ) from None


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    name = f"gossipdp_objective_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of their annotations there
    spec.loader.exec_module(module)
    return module


def _judge_digits(digits: Digits, model: nn.Module) -> Evaluation:
    return Evaluation(loss=digits.training_loss(model), metric=digits.evaluate(model))
