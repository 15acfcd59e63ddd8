"""What ``gossipdp simulate`` minimises, and with which optimizer."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

from gossipdp.simulate.objective import Objective
from gossipdp.simulate.objectives import OBJECTIVES
from gossipdp.simulate.objectives import make_objective as make_by_name
from gossipdp.simulate.optimizers import AdamW, RowOptimizer, Sgd

if TYPE_CHECKING:
    from gossipdp.cli.simulate import SimulateArguments, TaskOptions

DIGITS = ("digits", "digits-convolutional")
DIGITS_SGD = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=5e-4)
"""As the demo trains it."""


def make_objective(arguments: SimulateArguments) -> Objective:
    """The objective of ``--workload`` with its options.

    Raises:
        ValueError: there is none such, or an option belongs to another workload.
    """
    name, options = arguments.workload, arguments.task
    if name not in OBJECTIVES and ":" not in name:
        raise ValueError(
            f"there is no workload {name!r}; choose one of {', '.join(OBJECTIVES)}, or name a "
            "function of yours that returns an objective: package.module:function or "
            "file.py:function"
        )
    _check_belongs(name, options)
    given: dict[str, Any] = {
        "dimension": options.dimension,
        "noise_variance": options.noise,
        "heterogeneity": options.heterogeneity,
        "batch_size": options.batch_size,
        "dirichlet_alpha": options.dirichlet,
    }
    if options.curvature is not None:
        given["mu"], given["smoothness"] = parse_curvature(options.curvature)
    if ":" in name and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` would; the other processes get it too
    objective = make_by_name(
        name,
        disjoint=options.disjoint,
        **{key: value for key, value in given.items() if value is not None},
    )
    if not objective.has_gradients:
        _refuse(
            name,
            {
                "--optimizer": options.optimizer,
                "--learning-rate": options.learning_rate,
                "--momentum": options.momentum,
                "--weight-decay": options.weight_decay,
                "--learning-rate-decay": options.learning_rate_decay or None,
            },
        )
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


def _check_belongs(name: str, options: TaskOptions) -> None:
    """Raise for options of other workloads: they would play no part."""
    if name not in ("consensus", "quadratic"):
        _refuse(name, {"--dimension": options.dimension})
    if name != "quadratic":
        _refuse(
            name,
            {
                "--noise": options.noise,
                "--heterogeneity": options.heterogeneity,
                "--curvature": options.curvature,
            },
        )
    if name not in DIGITS:
        _refuse(
            name,
            {
                "--batch-size": options.batch_size,
                "--disjoint": options.disjoint or None,
                "--dirichlet": options.dirichlet,
            },
        )


def _refuse(name: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} plays no part in --workload {name}: leave it out")
