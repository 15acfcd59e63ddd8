"""Simulation: the same protocol and dynamics as on real workers, on a virtual clock.

The description of a run:

    scenario          everything that a run depends on: step times, links, graph, method's options
    objectives        the seam of the objective; consensus, quadratic
    module_objective  any torch module; digits

Its course:

    ideal             Poisson edges, as the paper's, and instantaneous exchanges
    links             the real protocol over links                network
    synchronous       lock-step rounds of all workers: all-reduce
    population        x, c and optimizers of all workers, a row each; their gradient steps
    trace             the time series                      figures: pictures of it
    study             simulate(scenario, method) -> Trace; many runs
    command           gossipdp simulate
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossipdp_lab.simulate.module_objective import ModuleObjective, digits_objective
    from gossipdp_lab.simulate.objectives import (
        Consensus,
        Evaluation,
        Gradients,
        GradientSource,
        Objective,
        Quadratic,
    )
    from gossipdp_lab.simulate.scenario import (
        ComputeTime,
        ConstantTime,
        Link,
        LinkModel,
        LognormalTime,
        Scenario,
        SlowedTime,
    )
    from gossipdp_lab.simulate.study import METHODS, Job, simulate, simulate_all
    from gossipdp_lab.simulate.trace import Interval, Record, Trace

__all__ = [
    "METHODS",
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
    "ModuleObjective",
    "Objective",
    "Quadratic",
    "Record",
    "Scenario",
    "SlowedTime",
    "Trace",
    "digits_objective",
    "simulate",
    "simulate_all",
]


# Imported on first use: the help of `gossipdp simulate` needs no torch.
_MODULES = ("scenario", "objectives", "trace", "study", "module_objective")


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    for module in _MODULES if name in __all__ else ():
        found = getattr(import_module(f"{__name__}.{module}"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
