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

What runs survive:

    faults            a schedule of what goes wrong, and when       fault_draws: random ones
    fault_run         one run under it                              watched_network, averaged_rows
    invariants        what must hold at every event                 ledger: of x + c/2
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Imported on first use: `gossipdp plan` drives the protocol over links without torch.
_HOMES = {
    "Job": "gossipdp.simulate.batch",
    "simulate_all": "gossipdp.simulate.batch",
    "ComputeTime": "gossipdp.simulate.compute_time",
    "ConstantTime": "gossipdp.simulate.compute_time",
    "LognormalTime": "gossipdp.simulate.compute_time",
    "MeasuredTime": "gossipdp.simulate.compute_time",
    "SlowedTime": "gossipdp.simulate.compute_time",
    "Consensus": "gossipdp.simulate.consensus",
    "Link": "gossipdp.simulate.link_model",
    "LinkModel": "gossipdp.simulate.link_model",
    "ModuleObjective": "gossipdp.simulate.module_objective",
    "Evaluation": "gossipdp.simulate.objective",
    "Gradients": "gossipdp.simulate.objective",
    "GradientSource": "gossipdp.simulate.objective",
    "Objective": "gossipdp.simulate.objective",
    "OBJECTIVES": "gossipdp.simulate.objectives",
    "digits_objective": "gossipdp.simulate.objectives",
    "load_objective": "gossipdp.simulate.objectives",
    "make_objective": "gossipdp.simulate.objectives",
    "AdamW": "gossipdp.simulate.optimizers",
    "RowOptimizer": "gossipdp.simulate.optimizers",
    "RowSteps": "gossipdp.simulate.optimizers",
    "Sgd": "gossipdp.simulate.optimizers",
    "Quadratic": "gossipdp.simulate.quadratic",
    "Scenario": "gossipdp.simulate.scenario",
    "METHODS": "gossipdp.simulate.simulation",
    "simulate": "gossipdp.simulate.simulation",
    "Interval": "gossipdp.simulate.trace",
    "Record": "gossipdp.simulate.trace",
    "Trace": "gossipdp.simulate.trace",
}

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


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gossipdp.simulate' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
