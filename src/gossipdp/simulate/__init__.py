"""Simulation: the same protocol and dynamics as on real workers, on a virtual clock.

What a run is:

    scenario          everything that a run depends on: step times, links, graph, method's knobs
    objectives        the seam of what is minimised; consensus, quadratic
    module_objective  any torch module; digits
    optimizers        how rows step

How it runs:

    ideal             Poisson edges, as the paper's, and instantaneous exchanges
    links             the real protocol over links                network, engine
    rounds            lock-step: rounds of all workers, and what they cost over links
    synchronous       all-reduce, D-PSGD
    local_steps       DiLoCo
    population        x and c of all workers, a row each, and their gradient steps
    trace             the time series
    study             simulate(scenario, method) -> Trace; many runs; means over seeds
"""

from gossipdp.simulate.module_objective import ModuleObjective, digits_objective
from gossipdp.simulate.objectives import (
    Consensus,
    Evaluation,
    Gradients,
    GradientSource,
    Objective,
    Quadratic,
)
from gossipdp.simulate.optimizers import AdamW, RowOptimizer, Sgd
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
    "Scenario",
    "Sgd",
    "SlowedTime",
    "Trace",
    "digits_objective",
    "simulate",
    "simulate_all",
]
