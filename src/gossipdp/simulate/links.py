"""The ``links`` fidelity: the real protocol, messages and transfers that take their time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gossipdp.dynamics.phase import Phase
from gossipdp.graph.constants import Constants
from gossipdp.protocol.worker import Method, WorkerProtocol
from gossipdp.simulate.carried_rows import CarriedRows
from gossipdp.simulate.compute_time import StepTimes
from gossipdp.simulate.conditions import Conditions
from gossipdp.simulate.engine import Engine
from gossipdp.simulate.network import Network, make_workers
from gossipdp.simulate.population import Population
from gossipdp.simulate.recorder import Recorder
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.trace import Trace
from gossipdp.simulate.training import Training

TIMEOUT_STEPS = 50.0
TIMEOUT_LATENCIES = 20.0


def run_links(scenario: Scenario, method: str, on_progress: Callable[[float], None]) -> Trace:
    """Simulate a2cid2, gossip, none or released over links.

    Workers are real protocols, with the phases, rates and constants of real workers; what they
    exchange are the rows of a population (:class:`~gossipdp.simulate.carried_rows.CarriedRows`).
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
        keeps_records=False,
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
