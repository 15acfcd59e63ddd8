"""The front door: one scenario, one method, one trace."""

from __future__ import annotations

import time
from collections.abc import Callable

from gossipdp.simulate.ideal import run_ideal
from gossipdp.simulate.links import run_links
from gossipdp.simulate.one_thread import one_thread
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.synchronous import run_allreduce, run_dpsgd
from gossipdp.simulate.trace import Trace

Progress = Callable[[float], None]
"""Is told from time to time which share of the run is done, 0 to 1."""

ASYNCHRONOUS = ("a2cid2", "gossip", "none", "released")
SYNCHRONOUS = ("allreduce", "dpsgd", "dpsgd-chebyshev")
METHODS = ASYNCHRONOUS + SYNCHRONOUS


def simulate(scenario: Scenario, method: str, on_progress: Progress | None = None) -> Trace:
    """Simulate one run.

    =================  ==========================================================================
    a2cid2             accelerated asynchronous gossip
    gossip             plain asynchronous pairwise averaging: eta = 0
    none               no exchanges
    released           a2cid2 with the exchange of the authors' released code, for comparison
                       only: each end subtracts its own live, flowed value from what the other
                       sent before flowing, so that the two deltas are not negatives of each other
    allreduce          synchronous: gradients averaged over all by a ring all-reduce at each step
    dpsgd              synchronous: each round averages with all neighbours, Metropolis weights
    dpsgd-chebyshev    the same, accelerated by a Chebyshev recursion
    =================  ==========================================================================

    Raises:
        ValueError: the method is unknown, or the scenario's graph or rates are not valid.

    Example:
        >>> from gossipdp.simulate import Scenario, simulate
        >>> trace = simulate(Scenario(graph="ring", num_workers=16, num_steps=50), "a2cid2")
        >>> trace.records[-1].consensus_distance < 1e-3 * trace.records[0].consensus_distance
        True
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}; choose one of {', '.join(METHODS)}")
    on_progress = on_progress or (lambda share: None)
    started = time.perf_counter()
    with one_thread():
        if method == "allreduce":
            trace = run_allreduce(scenario, on_progress)
        elif method in SYNCHRONOUS:
            trace = run_dpsgd(scenario, on_progress, chebyshev=method == "dpsgd-chebyshev")
        elif scenario.fidelity == "ideal":
            trace = run_ideal(scenario, method, on_progress)
        else:
            trace = run_links(scenario, method, on_progress)
    trace.wall_s = time.perf_counter() - started
    return trace
