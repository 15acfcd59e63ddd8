"""How long a run takes until workers agree, from theory."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

from gossipdp.simulate.ensemble import TAIL_LOWEST
from gossipdp.simulate.mixing import mixing_matrix, second_eigenvalue
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import SYNCHRONOUS

MARGIN = 1.3
"""Single runs lie on both sides of the expectation that the bounds are about."""

LEAST_STEPS = 20.0
STEPS_WITHOUT_AGREEMENT = 100.0

MOST_VALUES = {"numba": 2.5e8, "torch": 1e7, "links": 3e6, "rounds": 2.5e8}
"""Values that may be exchanged in one run, so that it takes some seconds at most."""


@dataclass(frozen=True)
class Length:
    """How long a run is, in units of time.

    Attributes:
        num_steps: that long.
        needed: what theory says it takes; more than ``num_steps`` where that would take too long.
    """

    num_steps: float
    needed: float

    @property
    def is_cut(self) -> bool:
        """Whether the run may be over before the workers agree."""
        return self.num_steps < self.needed


def steps_to_agree(scenario: Scenario, method: str, *, values_per_worker: int) -> Length:
    """How long a consensus run must be to fall to 1e-24 of the first consensus distance.

        expected distance <= 2 exp(-rate t),     t = log(2 / 1e-24) / rate

    with a rate of 1 / (2 chi1) for gossip and eta for a2cid2, at the paper's constants
    (:class:`~gossipdp.graph.planning.Plan`), and for D-PSGD of -2 log(gamma) a round, accelerated
    2 arccosh(1 / gamma), where gamma is the second eigenvalue of its mixing matrix.

    Args:
        scenario: the run; its ``num_steps`` plays no part.
        method: its method.
        values_per_worker: d, the length of a row.
    """
    constants = scenario.make_constants()
    if method == "none" or not constants.edges:
        return Length(STEPS_WITHOUT_AGREEMENT, STEPS_WITHOUT_AGREEMENT)
    if method in ("dpsgd", "dpsgd-chebyshev"):
        gamma = second_eigenvalue(mixing_matrix(scenario.make_graph()))
        if gamma == 0.0:
            rate = math.inf
        elif method == "dpsgd":
            rate = -2.0 * math.log(gamma)
        else:
            rate = 2.0 * math.acosh(1.0 / gamma)
    elif method == "allreduce":
        rate = math.inf
    elif method == "gossip":
        rate = 1.0 / (2.0 * constants.chi1)
    else:
        rate = constants.eta
    needed = max(LEAST_STEPS, math.ceil(MARGIN * math.log(2.0 / TAIL_LOWEST) / rate))
    if method in SYNCHRONOUS:
        most, exchanges_per_step = MOST_VALUES["rounds"], float(len(constants.edges))
    else:
        exchanges_per_step = constants.exchanges_per_unit_time
        most = MOST_VALUES[scenario.fidelity if scenario.fidelity == "links" else _arithmetic()]
    cap = math.floor(most / (exchanges_per_step * max(values_per_worker, 64)))
    return Length(min(needed, max(LEAST_STEPS, cap)), needed)


def _arithmetic() -> str:
    return "numba" if importlib.util.find_spec("numba") else "torch"
