"""Simulation: the same protocol and dynamics as on real workers, on a virtual clock.

What a run is:

    scenario          everything that a run depends on
    compute_time      how long gradient steps take
    link_model        what links are like
    objective         the seam of what is minimised
    objectives        by name:  consensus, quadratic, digits, the user's own
    module_objective  any torch module                             row_layout, row_gradients
    optimizers        how rows step

How it runs:

    simulation        simulate(scenario, method) -> Trace
    ideal             Poisson edges, instantaneous exchanges: the paper's model      edges
    links             the real protocol over links         network, wire, payload, carried_rows
    synchronous       rounds: all-reduce, D-PSGD                                     mixing
    engine            the event heap and its clock
    population        x and c of all workers, a row each
    training          their gradient steps
    recorder, trace   the time series
    batch             many runs over processes
"""

from gossipdp.simulate.batch import Job, simulate_all
from gossipdp.simulate.compute_time import (
    ComputeTime,
    ConstantTime,
    LognormalTime,
    MeasuredTime,
    SlowedTime,
)
from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.link_model import Link, LinkModel
from gossipdp.simulate.module_objective import ModuleObjective
from gossipdp.simulate.objective import Evaluation, Gradients, GradientSource, Objective
from gossipdp.simulate.objectives import (
    OBJECTIVES,
    digits_objective,
    load_objective,
    make_objective,
)
from gossipdp.simulate.optimizers import AdamW, RowOptimizer, RowSteps, Sgd
from gossipdp.simulate.quadratic import Quadratic
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import METHODS, simulate
from gossipdp.simulate.trace import Interval, Record, Trace

__all__ = [
    "METHODS",
    "OBJECTIVES",
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
    "load_objective",
    "make_objective",
    "simulate",
    "simulate_all",
]
