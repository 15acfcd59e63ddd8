"""What ``gossipdp simulate`` minimises, and with which optimizer."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from gossipdp.simulate.module_objective import digits_objective
from gossipdp.simulate.objectives import Consensus, Objective, Quadratic
from gossipdp.simulate.optimizers import AdamW, RowOptimizer, Sgd

if TYPE_CHECKING:
    from gossipdp.cli.simulate import SimulateArguments

DIGITS = ("digits", "digits-convolutional")
WORKLOADS = ("consensus", "quadratic", *DIGITS)
DIGITS_SGD = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=5e-4)
"""As the demo trains it."""

WORKLOADS_OF = {
    "dimension": ("consensus", "quadratic"),
    "noise": ("quadratic",),
    "heterogeneity": ("quadratic",),
    "curvature": ("quadratic",),
    "batch_size": DIGITS,
    "disjoint": DIGITS,
    "dirichlet": DIGITS,
}
"""The workloads for which an option plays a part."""
OPTIMIZER_OPTIONS = (
    *("optimizer", "learning_rate", "momentum", "weight_decay"),
    "learning_rate_decay",
)


def make_objective(arguments: SimulateArguments) -> Objective:
    """The objective of ``--workload`` with its options.

    Raises:
        ValueError: there is none such, or an option belongs to another workload.
    """
    name, options = arguments.workload, arguments.task
    if name not in WORKLOADS and ":" not in name:
        raise ValueError(
            f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}, or name a "
            "function of yours that returns an objective: package.module:function or "
            "file.py:function"
        )
    _refuse(arguments, [option for option, names in WORKLOADS_OF.items() if name not in names])
    objective: Objective
    dimension = 64 if options.dimension is None else options.dimension
    if name == "consensus":
        objective = Consensus(dimension)
    elif name == "quadratic":
        mu, smoothness = parse_curvature(options.curvature or "1:1")
        noise = 1.0 if options.noise is None else options.noise
        objective = Quadratic(dimension, mu, smoothness, noise, options.heterogeneity or 0.0)
    elif name in DIGITS:
        objective = digits_objective(
            network="perceptron" if name == "digits" else "convolutional",
            batch_size=32 if options.batch_size is None else options.batch_size,
            disjoint=options.disjoint,
            dirichlet_alpha=options.dirichlet,
        )
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` would; other processes get it too
        objective = load_objective(name)
    if not objective.has_gradients:
        _refuse(arguments, OPTIMIZER_OPTIONS)
    return objective


def make_optimizer(arguments: SimulateArguments) -> RowOptimizer:
    """The optimizer that was asked for; what was left open is as the workload has it.

    Raises:
        ValueError: a number that cannot be, or a momentum for adamw.
    """
    options = arguments.task
    if options.optimizer == "adamw":
        if options.momentum is not None:
            raise ValueError("--momentum is sgd's; adamw has betas of its own: leave it out")
        default: RowOptimizer = AdamW()
    else:
        default = DIGITS_SGD if arguments.workload in DIGITS else Sgd()
    given = {
        "learning_rate": options.learning_rate,
        "momentum": options.momentum,
        "weight_decay": options.weight_decay,
    }
    settings = {**vars(default), **{k: value for k, value in given.items() if value is not None}}
    return type(default)(**settings)


def parse_curvature(text: str) -> tuple[float, float]:
    """The least and the largest eigenvalue.

    >>> parse_curvature("0.1:1")
    (0.1, 1.0)
    """
    least, _, largest = text.partition(":")
    try:
        eigenvalues = float(least), float(largest)
    except ValueError:
        eigenvalues = math.nan, math.nan
    if not (math.isfinite(sum(eigenvalues)) and 0 <= eigenvalues[0] <= eigenvalues[1]):
        raise ValueError(f"--curvature is {text!r}; write LEAST:LARGEST, such as 0.1:1")
    return eigenvalues


def _refuse(arguments: SimulateArguments, names: Collection[str]) -> None:
    """Raise for an option that was given and would play no part."""
    for name in names:
        if getattr(arguments.task, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} plays no part in --workload {arguments.workload}: leave it out"
            )


def load_objective(place: str) -> Objective:
    """The objective that a function of the user's returns, called without arguments.

    Args:
        place: ``package.module:function`` of a module that can be imported, or
            ``file.py:function``.

    Raises:
        ValueError: there is no such module, file or function, or it returns something else.
    """
    module_name, _, function_name = place.rpartition(":")
    if not module_name or not function_name:
        raise ValueError(
            f"{place!r} names no function; write package.module:function or file.py:function"
        )
    module = (
        _import_file(Path(module_name).resolve())
        if module_name.endswith(".py")
        else _import_module(module_name)
    )
    function: Callable[[], Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    objective = function()
    if not isinstance(objective, Objective):
        raise ValueError(
            f"{place} returned a {type(objective).__name__}; it must return a "
            "gossipdp.simulate.Objective, for instance a ModuleObjective"
        )
    return objective


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the user's module needs
        raise ValueError(
            f"there is no module {name!r} on the import path; name a file instead: file.py:function"
        ) from None


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    name = f"gossipdp_objective_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of their annotations there
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # other processes cannot import it
    return module
