"""Simulation: the same protocol and dynamics as on real workers, on a virtual clock.

What a run is:

    scenario          everything that a run depends on: step times, links, graph, method's knobs
    objectives        the seam of what is minimised; consensus, quadratic
    module_objective  any torch module; digits
    optimizers        how rows step

How it runs:

    ideal             Poisson edges, instantaneous exchanges: the paper's model
    links             the real protocol over links                network, traffic
    synchronous       rounds: all-reduce, D-PSGD                  mixing
    engine            the event heap and its clock
    population        x and c of all workers, a row each, and their gradient steps
    trace             the time series
    study             simulate(scenario, method) -> Trace; many runs; means over seeds
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossipdp.simulate.module_objective import ModuleObjective, digits_objective
    from gossipdp.simulate.objectives import (
        Consensus,
        Evaluation,
        Gradients,
        GradientSource,
        Objective,
        Quadratic,
    )
    from gossipdp.simulate.optimizers import AdamW, RowOptimizer, RowSteps, Sgd
    from gossipdp.simulate.scenario import (
        ComputeTime,
        ConstantTime,
        Link,
        LinkModel,
        LognormalTime,
        MeasuredTime,
        Scenario,
        SlowedTime,
    )
    from gossipdp.simulate.study import METHODS, Job, simulate, simulate_all
    from gossipdp.simulate.trace import Interval, Record, Trace

_HOMES = {
    "module_objective": ("ModuleObjective", "digits_objective"),
    "objectives": (
        *("Consensus", "Evaluation", "GradientSource", "Gradients"),
        *("Objective", "Quadratic"),
    ),
    "optimizers": ("AdamW", "RowOptimizer", "RowSteps", "Sgd"),
    "scenario": (
        *("ComputeTime", "ConstantTime", "LognormalTime", "MeasuredTime", "SlowedTime"),
        *("Link", "LinkModel", "Scenario"),
    ),
    "study": ("METHODS", "Job", "simulate", "simulate_all"),
    "trace": ("Interval", "Record", "Trace"),
}

__all__ = [
    "METHODS",
    "AdamW",
    "ComputeTime",
    "Consensus",
    "ConstantTime",
    "Evaluation",
    "GradientSource",
    "Gradients",
    "Interval",
    "Job",
    "Link",
    "LinkModel",
    "LognormalTime",
    "MeasuredTime",
    "ModuleObjective",
    "Objective",
    "Quadratic",
    "Record",
    "RowOptimizer",
    "RowSteps",
    "Scenario",
    "Sgd",
    "SlowedTime",
    "Trace",
    "digits_objective",
    "simulate",
    "simulate_all",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562): `gossipdp plan` drives links without torch."""
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"gossipdp.simulate.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'gossipdp.simulate' has no attribute {name!r}")
