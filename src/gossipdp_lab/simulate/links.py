"""The ``links`` fidelity: the real protocol, messages and transfers that take their time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gossipdp.dynamics.phase import Phase
from gossipdp.protocol.actions import Begin
from gossipdp.protocol.messages import ExchangeId
from gossipdp.protocol.worker import Method
from gossipdp_lab.simulate.network import Conditions, Payload, VirtualNetwork, make_workers
from gossipdp_lab.simulate.population import Training
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.trace import Activity, Recorder, Trace

TIMEOUT_STEPS = 50.0
TIMEOUT_LATENCIES = 20.0


def run_links(scenario: Scenario, method: str, on_progress: Callable[[float], None]) -> Trace:
    """Simulate a2cid2, gossip or none over links.

    Workers are real protocols, with the phases, rates and constants of real workers; they exchange
    the rows of a population (:class:`CarriedRows`). Links and step times enter as they are given:
    nothing is fitted. The records show the rows as they are, flowed to each worker's last boundary
    or exchange.

    Raises:
        ValueError: the scenario's graph or rates are not valid.
    """
    constants, links = scenario.make_constants(), scenario.links
    has_momentum = method == "a2cid2"
    protocol_method: dict[str, Method] = {"gossip": "gossip", "none": "none"}
    training = Training.of(scenario, momentum=has_momentum)
    # In proportion to the runtime's 5 s for steps of 0.1 s, so that the unit of time has no effect.
    # Over links of a long latency it is longer: the first heartbeats arrive late.
    longest_s = max(link.latency_s for link in (links.every, *links.overrides.values()))
    workers = make_workers(
        constants,
        seed=scenario.seed,
        method=protocol_method.get(method, "a2cid2"),
        policy_type=scenario.neighbour_policy,
        timeout_s=TIMEOUT_STEPS * scenario.compute_time.step_s + TIMEOUT_LATENCIES * longest_s,
        sets_own_rate=scenario.comm_rate == "auto",
        moments_due=training.moments_due,
    )
    recorder = Recorder(scenario, method, training, on_progress)
    # eta and the worker's rate both scale with the comm rate. A phase uses only their ratio, which
    # is that at comm rate 1.
    eta = constants.eta if has_momentum else 0.0
    phases = {rank: Phase(eta, constants.worker_rate(rank)) for rank in constants.workers}
    rows = CarriedRows(training, phases, interval=recorder.interval)
    row = training.population.x[0]
    row_bytes = row.numel() * row.element_size()
    network = VirtualNetwork(
        workers,
        constants.edges,
        Conditions(
            latency_s=links.latency_s,
            transfer_s=links.begin(scenario.seed, scenario.model_bytes or row_bytes),
            step_s=scenario.begin_steps(),
        ),
        rows,
    )
    goes_on = True
    while goes_on:
        network.engine.run(until=recorder.next_s)
        rows.settle_drift()
        goes_on = recorder.record(
            exchanges=network.num_exchanges, gradient_steps=sum(training.steps)
        )
    trace = recorder.trace
    trace.worker_steps = training.steps
    trace.models_sent = rows.models_sent
    trace.num_messages = dict(network.num_messages)
    return trace


@dataclass(slots=True)
class _Open:
    """An exchange that a worker is in."""

    begin: Begin
    began_s: float
    snapshot: Tensor
    moments: list[Tensor | None]
    """The corrected ones that this end sends; None for one that its optimizer has not made yet."""


class CarriedRows(Payload):
    """The rows of a population, one a worker, that are trained and exchanged.

    As on a real worker, an exchange freezes the phase at its start and the row flows to it; one
    snapshot then travels, and delta is computed from the same snapshot. A step boundary applies the
    gradient step, then flows the row to the phase. The optimizer's moments travel along as the
    protocol says, as v / (1 - beta^t): when the peer's arrive, each end takes the mean of those and
    its own present ones. A worker that has none, zeros alone, or one that is not finite takes none,
    and neither does its peer.
    Between boundaries the row is x + pending of a real worker; the gradient under way is that of
    the row's value when its step began.

    ``interval`` gets each activity of each worker.
    """

    def __init__(
        self,
        training: Training,
        phases: Mapping[int, Phase],
        *,
        interval: Callable[[int, Activity, float, float], None] = lambda *interval: None,
    ) -> None:
        self.population: Final = training.population
        self.phases: Final = phases
        self._training: Final = training
        self._interval: Final = interval
        self.models_sent = 0.0
        self._open: dict[int, _Open] = {}
        self._halves: dict[ExchangeId, Tensor] = {}
        """Changes of the sum of x + c/2 by exchanges that one end alone has applied."""

    def step_started(self, rank: int, now_s: float, end_s: float) -> None:
        self._training.start_step(rank, now_s)
        self._interval(rank, "computing", now_s, end_s)

    def step_ended(self, rank: int, now_s: float) -> None:
        self._training.end_step(rank)
        self.population.flow(rank, self.phases[rank].at(now_s))

    def exchange_began(
        self, rank: int, begin: Begin, now_s: float
    ) -> tuple[Tensor, list[Tensor | None]]:
        row = self.population.x[rank]
        theta = self.phases[rank].start_exchange(now_s)
        self.population.flow(rank, theta)
        snapshot = row.clone()
        travelling = self._training.travelling(rank, begin.moments)
        moments = [
            moment / mass if mass and bool(moment.any() and moment.isfinite().all()) else None
            for moment, mass in travelling
        ]
        self._open[rank] = _Open(begin, now_s, snapshot, moments)
        self.models_sent += self.models(begin)
        return snapshot, moments

    def models(self, begin: Begin) -> float:
        travelling = self._training.travelling(0, begin.moments)
        width = sum(moment.numel() for moment, _ in travelling)
        return 1.0 + width / self.population.x.shape[1]

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        assert isinstance(data, tuple)
        peers, peers_moments = data
        exchange, population = self._open[rank], self.population
        alpha_tilde = exchange.begin.alpha_tilde
        mine = exchange.snapshot
        population.apply(rank, mine, peers, alpha_tilde)
        travelling = self._training.travelling(rank, exchange.begin.moments)
        for (moment, mass), sent, theirs in zip(
            travelling, exchange.moments, peers_moments, strict=True
        ):
            if sent is not None and theirs is not None:
                moment.add_(theirs, alpha=mass).mul_(0.5)
        if self._halves.pop(id, None) is None:
            gain = 0.5 if population.c is None else 0.5 + 0.5 * (alpha_tilde - 0.5)
            self._halves[id] = (mine - peers)[: population.num_trained].double() * -gain

    def exchange_ended(
        self, rank: int, id: ExchangeId, now_s: float, *, is_withdrawn: bool = False
    ) -> None:
        exchange = self._open.pop(rank)
        self.phases[rank].end_exchange(now_s, is_withdrawn=is_withdrawn)
        self._interval(rank, "exchanging", exchange.began_s, now_s)

    def settle_drift(self) -> None:
        """Set the population's ``half_applied`` to the change by exchanges under way."""
        total = torch.zeros_like(self.population.half_applied)
        for half in self._halves.values():
            total += half
        self.population.half_applied = total
