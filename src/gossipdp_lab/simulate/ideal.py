"""The ``ideal`` fidelity: the paper's edges, which fire as Poisson processes, without delay.

Gradients are not the paper's Poisson events: a worker takes one step after another, each as long as
the scenario's compute time says, by default all equally long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossipdp.graph.constants import Constants
from gossipdp_lab.simulate.network import Engine
from gossipdp_lab.simulate.population import Population, Training
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.trace import Recorder, Trace

EVENTS_AT_ONCE = 8192


def run_ideal(scenario: Scenario, method: str, on_progress: Callable[[float], None]) -> Trace:
    """Simulate a2cid2, gossip, none or released with instantaneous exchanges.

    Edges fire at rate lambda_ij per unit of time, whatever the workers do. The comm rate is met
    exactly here, so eta is that of the scenario's rate, as in the paper's section 3. Gradients are
    evaluated at the start of a step, and applied at its end.

    Without gradients (consensus) steps are not simulated but counted: one a worker in each unit of
    time.
    """
    has_momentum = method in ("a2cid2", "released")
    training = Training.of(scenario, momentum=has_momentum)
    population = training.population
    recorder = Recorder(scenario, method, training, on_progress)
    unit_s, num_workers = scenario.compute_time.step_s, scenario.num_workers
    constants = scenario.make_constants()
    edges = PoissonEdges(
        constants,
        population,
        unit_s=unit_s,
        eta=constants.eta if has_momentum else 0.0,
        alpha_tilde=constants.alpha_tilde,
        is_released=method == "released",
        seed=scenario.seed,
    )
    engine = Engine()
    draw_step_s = scenario.begin_steps()

    def look() -> None:
        """Bring the exchanges up to date."""
        if method != "none":
            edges.advance(engine.now)

    def start_step(rank: int) -> None:
        now_s = engine.now
        look()
        population.flow(rank, edges.phase(now_s))
        training.start_step(rank, now_s)
        end_s = now_s + draw_step_s(rank)
        engine.at(end_s, partial(end_step, rank))
        recorder.interval(rank, "computing", now_s, end_s)

    def end_step(rank: int) -> None:
        look()
        training.end_step(rank)
        start_step(rank)

    takes_steps = training.source is not None or scenario.keep_timeline
    for rank in range(num_workers if takes_steps else 0):
        start_step(rank)
    goes_on = True
    while goes_on:
        engine.run(until=recorder.next_s)
        look()
        for rank in range(num_workers):
            population.flow(rank, edges.phase(engine.now))
        counted = round(num_workers * engine.now / unit_s)
        goes_on = recorder.record(
            exchanges=edges.num_exchanges,
            gradient_steps=sum(training.steps) if takes_steps else counted,
        )
    trace = recorder.trace
    trace.worker_steps = training.steps
    trace.models_sent = 2.0 * edges.num_exchanges
    return trace


class PoissonEdges:
    """Exchanges of all edges, applied in the order of their times.

    Edge (i, j) fires as a Poisson process of rate lambda_ij per unit of time. Both ends flow to
    the phase of that moment, then average: the dynamics of the paper's equation (4), exactly.
    Exchanges are applied in blocks, by :meth:`advance`, before the state is read.

    ``unit_s`` is the unit of time, ``eta`` the mixing speed per unit. With ``is_released`` each end
    subtracts its own flowed value from the other's value before it flowed.
    """

    def __init__(
        self,
        constants: Constants,
        population: Population,
        *,
        unit_s: float,
        eta: float,
        alpha_tilde: float,
        is_released: bool,
        seed: int,
    ) -> None:
        self.num_exchanges = 0
        self._population = population
        self._eta_per_s = eta / unit_s
        self._excess = alpha_tilde - 0.5
        self._is_released = is_released
        self._random = np.random.default_rng([seed, 1])  # the start values are of [seed]
        self._ends = np.array(constants.edges, dtype=np.int64).reshape(-1, 2)
        rates = np.array(constants.rates)
        self._cumulative = np.cumsum(rates) / rates.sum() if len(rates) else rates
        self._mean_gap_s = unit_s / rates.sum() if len(rates) else np.inf
        self._drawn_to_s = 0.0
        self._times_s: NDArray[np.float64] = np.empty(0)
        self._edges: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def phase(self, time_s: float) -> float:
        """Return the phase of all workers at a moment."""
        return self._eta_per_s * time_s

    def advance(self, until_s: float) -> None:
        """Apply every exchange up to and including ``until_s``."""
        while self._mean_gap_s < np.inf:
            due = int(np.searchsorted(self._times_s, until_s, side="right"))
            if due:
                self.apply(self._times_s[:due], self._edges[:due])
                self._times_s, self._edges = self._times_s[due:], self._edges[due:]
            if len(self._times_s):
                return
            gaps_s = self._random.exponential(self._mean_gap_s, EVENTS_AT_ONCE)
            self._times_s = self._drawn_to_s + np.cumsum(gaps_s)
            self._drawn_to_s = float(self._times_s[-1])
            drawn = np.searchsorted(self._cumulative, self._random.random(EVENTS_AT_ONCE))
            # Rounding may leave the last of the cumulative shares just below 1.
            self._edges = np.minimum(drawn, len(self._ends) - 1)

    def apply(self, times_s: NDArray[np.float64], edges: NDArray[np.int64]) -> None:
        """Apply exchanges of these edges at these times."""
        ends, phases = self._ends[edges], self._eta_per_s * times_s
        population = self._population
        x = population.x.numpy()
        c = x[:, :0] if population.c is None else population.c.numpy()
        exchange = _compiled_exchanges()
        exchange(x, c, population.theta, phases, ends, self._excess, self._is_released)
        self.num_exchanges += len(edges)


def exchanges(  # noqa: PLR0917
    x: Any, c: Any, theta: Any, phases: Any, ends: Any, excess: float, is_released: bool
) -> None:
    """Flow and exchange, event by event, as compiled by numba; buffers have no column in ``c``.

    This is the only arithmetic of x and c beside :mod:`gossipdp.dynamics.update`; a test compares
    the two. An exchange of two short rows takes 3.7 microseconds here, and 74 by calls of that.
    """
    for event in range(len(phases)):
        i, j = ends[event, 0], ends[event, 1]
        s_i = np.exp(-2.0 * (phases[event] - theta[i]))
        s_j = np.exp(-2.0 * (phases[event] - theta[j]))
        theta[i] = theta[j] = phases[event]
        for column in range(x.shape[1]):
            has_c = column < c.shape[1]
            sent_by_i, sent_by_j = x[i, column], x[j, column]
            live_i, live_j = sent_by_i, sent_by_j
            if has_c:
                live_i += 0.5 * (1.0 - s_i) * c[i, column]
                live_j += 0.5 * (1.0 - s_j) * c[j, column]
            if not is_released:
                sent_by_i, sent_by_j = live_i, live_j
            delta_i, delta_j = live_i - sent_by_j, live_j - sent_by_i
            x[i, column] = live_i - 0.5 * delta_i
            x[j, column] = live_j - 0.5 * delta_j
            if has_c:
                c[i, column] = s_i * c[i, column] - excess * delta_i
                c[j, column] = s_j * c[j, column] - excess * delta_j


@functools.cache
def _compiled_exchanges() -> Any:
    """Return the compiled loop, kept on disk if a place can be written."""
    import numba  # takes a third of a second

    try:
        return numba.njit(exchanges, cache=True)
    except RuntimeError:
        return numba.njit(exchanges)
