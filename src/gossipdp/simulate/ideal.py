"""The ``ideal`` fidelity: the paper's model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from gossipdp.simulate.edges import PoissonEdges
from gossipdp.simulate.engine import Engine
from gossipdp.simulate.population import Population
from gossipdp.simulate.recorder import Recorder
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.trace import Interval, Trace
from gossipdp.simulate.training import Training

RECORD_PRIORITY = 1  # after the steps of the same moment


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
