"""The ``links`` fidelity: the real protocol, messages and transfers that take their time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, final

import torch
from torch import Tensor

from gossipdp.dynamics.phase import Phase
from gossipdp.graph.constants import Constants
from gossipdp.protocol.actions import Begin, Rebuilt
from gossipdp.protocol.messages import ExchangeId
from gossipdp.protocol.worker import Method, WorkerProtocol
from gossipdp.simulate.engine import Engine
from gossipdp.simulate.network import Network, make_workers
from gossipdp.simulate.population import Population, Training
from gossipdp.simulate.scenario import Scenario, StepTimes
from gossipdp.simulate.trace import Interval, Recorder, Trace
from gossipdp.simulate.traffic import Conditions, Payload

TIMEOUT_STEPS = 50.0
TIMEOUT_LATENCIES = 20.0


def run_links(scenario: Scenario, method: str, on_progress: Callable[[float], None]) -> Trace:
    """Simulate a2cid2, gossip, none or released over links.

    Workers are real protocols, with the phases, rates and constants of real workers; what they
    exchange are the rows of a population (:class:`CarriedRows`).
    Links, step times and measured durations enter as they are given: nothing is fitted.

    Workers are not in step: each is caught somewhere in the middle of its first step, by the seed.
    The records show the rows as they stand, flowed to each worker's last boundary or exchange.

    Raises:
        ValueError: the scenario's graph or rates are not valid.
    """
    workers = _make_protocols(scenario, scenario.make_constants(), method)
    return run_protocols(scenario, method, workers, on_progress)


def run_protocols(
    scenario: Scenario,
    method: str,
    workers: dict[int, WorkerProtocol],
    on_progress: Callable[[float], None],
) -> Trace:
    """As :func:`run_links`, with protocols that the caller has made: one a rank, not yet run."""
    constants = scenario.make_constants()
    has_momentum = method in ("a2cid2", "released")
    begun = scenario.objective.begin(scenario.num_workers, scenario.seed)
    source = begun if scenario.objective.has_gradients else None
    population = Population(begun.start, begun.num_trained, momentum=has_momentum)
    training = Training(source, scenario.optimizer, population)
    recorder = Recorder(scenario, method, population, source, on_progress)
    # eta and the worker's rate both scale with the comm rate: their ratio, which is all that a
    # phase takes of them, is that at comm rate 1.
    eta = constants.eta * scenario.eta_factor if has_momentum else 0.0
    rows = CarriedRows(
        population,
        training,
        {rank: Phase(eta, constants.worker_rate(rank)) for rank in constants.workers},
        is_released=method == "released",
        progress=(lambda now_s: now_s / recorder.end_s) if scenario.learning_rate_decay else None,
        interval=recorder.interval,
    )
    row_bytes = begun.start.shape[1] * begun.start.element_size()
    network = Network(
        Engine(),
        workers,
        constants.edges,
        Conditions(
            latency_s=scenario.links.latency_s,
            transfer_s=scenario.links.begin(scenario.seed, scenario.model_bytes or row_bytes),
            step_s=_caught_in_a_step(scenario),
        ),
        rows,
    )
    while True:
        network.engine.run(until=recorder.next_s)
        rows.settle_drift()
        goes_on = recorder.record(
            exchanges=network.num_exchanges,
            gradient_steps=sum(training.steps),
            batch_loss=training.take_loss(),
        )
        if not goes_on:
            break
    trace = recorder.trace
    trace.worker_steps = list(training.steps)
    protocols = [workers[rank] for rank in sorted(workers)]
    trace.worker_requests = [protocol.exchanges_initiated for protocol in protocols]
    trace.worker_exchanges = [
        protocol.exchanges_initiated + protocol.exchanges_answered for protocol in protocols
    ]
    trace.num_events = network.engine.num_events
    trace.num_messages = dict(network.num_messages)
    return trace


def _make_protocols(
    scenario: Scenario, constants: Constants, method: str
) -> dict[int, WorkerProtocol]:
    protocol_methods: dict[str, Method] = {
        "a2cid2": "a2cid2",
        "released": "a2cid2",
        "gossip": "gossip",
        "none": "none",
    }
    workers = make_workers(
        constants,
        seed=scenario.seed,
        method=protocol_methods[method],
        policy_name=scenario.neighbour_policy,
        timeout_s=_timeout_s(scenario),
    )
    for worker in workers.values():
        worker.pairing.alpha_tilde = 0.5 + (worker.alpha_tilde - 0.5) * scenario.alpha_tilde_factor
    return workers


def _timeout_s(scenario: Scenario) -> float:
    """The runtime's 5 s for steps of 0.1 s, and in proportion: so the unit of time plays no part.

    Over links of a long latency it is longer: heartbeats take their time to start arriving.
    """
    links = scenario.links
    longest_s = max(link.latency_s for link in (links.every, *links.overrides.values()))
    return TIMEOUT_STEPS * scenario.compute_time.nominal_s + TIMEOUT_LATENCIES * longest_s


def _caught_in_a_step(scenario: Scenario) -> StepTimes:
    """The step times, of which each worker's first is only what is left of one."""
    draw_s = scenario.compute_time.begin(scenario.seed)
    source = Random(f"{scenario.seed} offsets")
    left = {rank: source.random() for rank in range(scenario.num_workers)}
    return lambda rank: left.pop(rank, 1.0) * draw_s(rank)


@dataclass(slots=True)
class _Open:
    """An exchange that a worker is in."""

    id: ExchangeId
    alpha_tilde: float
    began_s: float
    snapshot: Tensor
    has_applied: bool = False


@dataclass(slots=True)
class _Half:
    """An exchange that one end has applied and the other has not."""

    mine: Tensor
    peers: Tensor
    alpha_tilde: float


@final
class CarriedRows(Payload):
    """Each worker holds a row of ``population``, trains it and exchanges it.

    As on a real worker: an exchange freezes the phase at its start, the row flows to it, and its
    snapshot is both what travels and what delta is computed from. A step boundary applies the
    gradient step, then flows the row to the phase. Between boundaries the row is x + pending of a
    real worker; the gradient that is under way was begun at the row's value then.

    The released exchange, for comparison only: what travels is the row before it flowed; delta is
    the live row when the data arrive, flowed and with the steps taken meanwhile, minus that.

    Args:
        population: the rows.
        training: their gradient steps.
        phases: the phase of each rank.
        is_released: exchange as the authors' released code does.
        progress: the share of the run that is over, for the learning rate; None: a constant rate.
        interval: told what each worker did when.
    """

    def __init__(
        self,
        population: Population,
        training: Training,
        phases: Mapping[int, Phase],
        *,
        is_released: bool = False,
        progress: Callable[[float], float] | None = None,
        interval: Callable[[Interval], None] = lambda interval: None,
    ) -> None:
        self.num_torn = 0
        """Exchanges that one end applied and the other never will."""
        self.torn = torch.zeros(population.num_trained, dtype=torch.float64)
        """What those did to the sum of x + c/2 over the workers."""
        self._population: Final = population
        self._training: Final = training
        self._phases: Final = phases
        self._is_released: Final = is_released
        self._progress: Final = progress
        self._interval: Final = interval
        self._open: dict[int, _Open] = {}
        self._halves: dict[ExchangeId, _Half] = {}

    def step_started(self, rank: int, now_s: float, end_s: float) -> None:
        progress = None if self._progress is None else self._progress(now_s)
        self._training.start_step(rank, progress)
        self._interval(Interval(rank, "computing", now_s, end_s))

    def step_ended(self, rank: int, now_s: float) -> None:
        self._training.end_step(rank)
        self._population.flow(rank, self._phases[rank].at(now_s))

    def exchange_began(self, rank: int, begin: Begin, now_s: float) -> Tensor:
        row = self._population.x[rank]
        theta = self._phases[rank].start_exchange(now_s)
        unflowed = row.clone() if self._is_released else None
        self._population.flow(rank, theta)
        snapshot = row.clone() if unflowed is None else unflowed
        self._open[rank] = _Open(begin.id, begin.alpha_tilde, now_s, snapshot)
        return snapshot

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        assert isinstance(data, Tensor)
        exchange = self._open[rank]
        mine = self._population.x[rank].clone() if self._is_released else exchange.snapshot
        self._population.apply(rank, mine, data, exchange.alpha_tilde)
        exchange.has_applied = True
        if self._halves.pop(id, None) is None:
            self._halves[id] = _Half(mine, data, exchange.alpha_tilde)

    def exchange_ended(self, rank: int, id: ExchangeId, now_s: float) -> None:
        exchange = self._open.pop(rank)
        self._phases[rank].end_exchange(now_s)
        self._interval(Interval(rank, "exchanging", exchange.began_s, now_s))
        if not exchange.has_applied and (half := self._halves.pop(id, None)) is not None:
            self.num_torn += 1
            self.torn += self._change(half)

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        self._phases[rank].set_speed(graph.eta, graph.worker_rate, now_s)

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        self._population.take_over(rank, peer)

    def settle_drift(self) -> None:
        """Tell the population what exchanges under way did to its mean at one end so far."""
        total = torch.zeros_like(self.torn)
        for half in self._halves.values():
            total += self._change(half)
        self._population.half_applied = total

    def _change(self, half: _Half) -> Tensor:
        """What one end's part of an exchange did to the sum of x + c/2."""
        gain = 0.5
        if self._population.c is not None:
            gain += 0.5 * (half.alpha_tilde - 0.5)
        delta = (half.mine - half.peers)[: self._population.num_trained]
        return delta.double() * -gain
