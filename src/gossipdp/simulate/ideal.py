"""The ``ideal`` fidelity: the paper's model, in which edges fire as Poisson processes."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossipdp.graph.constants import Constants
from gossipdp.simulate.engine import Engine
from gossipdp.simulate.population import Population, Training
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.trace import Interval, Recorder, Trace

EVENTS_AT_ONCE = 8192


def run_ideal(scenario: Scenario, method: str, on_progress: Callable[[float], None]) -> Trace:
    """Simulate a2cid2, gossip, none or released with instantaneous exchanges.

    Edges fire at rate lambda_ij per unit of time, whatever the workers do; eta is that of the
    comm rate asked for, as in the paper's section 3, since here it is met exactly. Gradient steps
    take the scenario's compute times, in place of the paper's Poisson clock.

    Where nobody takes gradients (consensus), steps are not simulated but counted: one a worker
    in each unit of time.
    """
    return _IdealRun(scenario, method, on_progress).run()


class _IdealRun:
    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        self._scenario = scenario
        constants = scenario.make_constants()
        num_workers = scenario.num_workers
        self._unit_s = scenario.compute_time.nominal_s
        begun = scenario.objective.begin(num_workers, scenario.seed)
        source = begun if scenario.objective.has_gradients else None
        has_momentum = method in ("a2cid2", "released")
        self._population = Population(begun.start, begun.num_trained, momentum=has_momentum)
        self._training = Training(source, scenario.optimizer, self._population)
        self._recorder = Recorder(scenario, method, self._population, source, on_progress)
        self._exchanges = method != "none"
        self._edges = PoissonEdges(
            constants,
            self._population,
            unit_s=self._unit_s,
            eta=constants.eta * scenario.eta_factor if has_momentum else 0.0,
            alpha_tilde=0.5 + (constants.alpha_tilde - 0.5) * scenario.alpha_tilde_factor,
            is_released=method == "released",
            seed=scenario.seed,
        )
        self._engine = Engine()
        self._draw_step_s = scenario.compute_time.begin(scenario.seed)
        self._takes_steps = source is not None or scenario.keep_timeline

    def run(self) -> Trace:
        engine, recorder = self._engine, self._recorder
        if self._takes_steps:
            # Workers are not in step: each is caught somewhere in the middle of its first one.
            offsets = Random(f"{self._scenario.seed} offsets")
            for rank in range(self._scenario.num_workers):
                self._start_step(rank, offsets.random())
        while True:
            engine.run(until=recorder.next_s)
            self._look(engine.now)
            self._population.flow_all(self._edges.phase(engine.now))
            goes_on = recorder.record(
                exchanges=self._edges.num_exchanges,
                gradient_steps=self._num_steps(),
                batch_loss=self._training.take_loss(),
            )
            if not goes_on:
                break
        trace = recorder.trace
        trace.worker_steps = list(self._training.steps)
        trace.worker_exchanges = self._edges.worker_exchanges.tolist()
        trace.num_events = self._edges.num_exchanges + engine.num_events
        trace.arithmetic = self._edges.arithmetic
        return trace

    def _look(self, now_s: float) -> None:
        """Bring the exchanges up to date."""
        if self._exchanges:
            self._edges.advance(now_s)

    def _num_steps(self) -> int:
        if self._takes_steps:
            return sum(self._training.steps)
        return round(self._scenario.num_workers * self._engine.now / self._unit_s)

    def _start_step(self, rank: int, share_left: float = 1.0) -> None:
        now_s = self._engine.now
        self._look(now_s)
        self._population.flow(rank, self._edges.phase(now_s))
        progress = now_s / self._recorder.end_s if self._scenario.learning_rate_decay else None
        self._training.start_step(rank, progress)
        end_s = now_s + share_left * self._draw_step_s(rank)
        self._engine.at(end_s, partial(self._end_step, rank))
        self._recorder.interval(Interval(rank, "computing", now_s, end_s))

    def _end_step(self, rank: int) -> None:
        self._look(self._engine.now)
        self._training.end_step(rank)
        self._start_step(rank)


class PoissonEdges:
    """Exchanges of all edges, applied in the order of their times.

    Edge (i, j) fires as a Poisson process of rate lambda_ij per unit of time. Both ends flow to
    the phase of that moment, then average: the dynamics of the paper's equation (4), exactly.

    Exchanges are applied in blocks, by :meth:`advance`, whenever somebody looks at the state.
    They are computed by numba where it is installed and by the torch kernels else, to the same
    values but for rounding.

    Args:
        constants: the graph with its rates.
        population: the state that exchanges change.
        unit_s: the unit of time, in seconds.
        eta: mixing speed per unit of time; 0 for plain gossip.
        alpha_tilde: gain of an exchange on the momentum copy.
        is_released: exchange as the authors' released code does: each end subtracts its own
            flowed value from the other's value before it flowed.
        seed: of the times.
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
        self.worker_exchanges = np.zeros(population.num_workers, dtype=np.int64)
        self.arithmetic = "numba" if importlib.util.find_spec("numba") else "torch"
        self._population = population
        self._eta_per_s = eta / unit_s
        self._alpha_tilde = alpha_tilde
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
        """The phase of all workers at a moment."""
        return self._eta_per_s * time_s

    def advance(self, until_s: float) -> None:
        """Apply every exchange up to and including ``until_s``."""
        while self._mean_gap_s < np.inf:
            due = int(np.searchsorted(self._times_s, until_s, side="right"))
            if due:
                self._apply(self._times_s[:due], self._edges[:due])
                self._times_s, self._edges = self._times_s[due:], self._edges[due:]
            if len(self._times_s):
                return
            self._draw()

    def _draw(self) -> None:
        gaps_s = self._random.exponential(self._mean_gap_s, EVENTS_AT_ONCE)
        self._times_s = self._drawn_to_s + np.cumsum(gaps_s)
        self._drawn_to_s = float(self._times_s[-1])
        drawn = np.searchsorted(self._cumulative, self._random.random(EVENTS_AT_ONCE))
        # Rounding may leave the last of the cumulative shares just below 1.
        self._edges = np.minimum(drawn, len(self._ends) - 1)

    def _apply(self, times_s: NDArray[np.float64], edges: NDArray[np.int64]) -> None:
        ends = self._ends[edges]
        apply = _numba_exchanges() if self.arithmetic == "numba" else None
        phases = self._eta_per_s * times_s
        if apply is None:
            self._apply_by_torch(phases, ends)
        else:
            population = self._population
            x = population.x.numpy()
            has_c = population.c is not None
            c = population.c.numpy() if population.c is not None else x[:, :0]
            excess = self._alpha_tilde - 0.5
            apply(
                x, c, population.theta, phases, ends, excess, population.num_trained, has_c,
                self._is_released,
            )  # fmt: skip
        self.num_exchanges += len(edges)
        self.worker_exchanges += np.bincount(ends.ravel(), minlength=len(self.worker_exchanges))

    def _apply_by_torch(self, phases: NDArray[np.float64], ends: NDArray[np.int64]) -> None:
        population, alpha_tilde = self._population, self._alpha_tilde
        x = population.x
        for phase, (i, j) in zip(phases.tolist(), ends.tolist(), strict=True):
            if self._is_released:
                sent_by_i, sent_by_j = x[i].clone(), x[j].clone()
            population.flow(i, phase)
            population.flow(j, phase)
            live_i, live_j = x[i].clone(), x[j].clone()
            if not self._is_released:
                sent_by_i, sent_by_j = live_i, live_j
            population.apply(i, live_i, sent_by_j, alpha_tilde)
            population.apply(j, live_j, sent_by_i, alpha_tilde)


Exchanges = Callable[..., None]


@functools.cache
def _numba_exchanges() -> Exchanges:
    """The same as a compiled loop; compiled at its first call."""
    import numba

    def exchanges(  # noqa: PLR0917
        x: Any,
        c: Any,
        theta: Any,
        phases: Any,
        ends: Any,
        excess: float,
        num_trained: int,
        has_c: bool,
        is_released: bool,
    ) -> None:
        for event in range(len(phases)):
            i, j = ends[event, 0], ends[event, 1]
            phase = phases[event]
            s_i = np.exp(-2.0 * (phase - theta[i]))
            s_j = np.exp(-2.0 * (phase - theta[j]))
            theta[i] = phase
            theta[j] = phase
            for column in range(x.shape[1]):
                sent_by_i, sent_by_j = x[i, column], x[j, column]
                live_i, live_j = sent_by_i, sent_by_j
                if has_c and column < num_trained:
                    live_i += 0.5 * (1.0 - s_i) * c[i, column]
                    live_j += 0.5 * (1.0 - s_j) * c[j, column]
                if not is_released:
                    sent_by_i, sent_by_j = live_i, live_j
                delta_i, delta_j = live_i - sent_by_j, live_j - sent_by_i
                x[i, column] = live_i - 0.5 * delta_i
                x[j, column] = live_j - 0.5 * delta_j
                if has_c and column < num_trained:
                    c[i, column] = s_i * c[i, column] - excess * delta_i
                    c[j, column] = s_j * c[j, column] - excess * delta_j

    compiled: Exchanges = numba.njit(exchanges)
    return compiled
