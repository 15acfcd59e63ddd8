"""Runs over links: determinism, conservation, effects of the scenario, content of the trace."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gossipdp_lab.simulate.links import run_links
from gossipdp_lab.simulate.objectives import Consensus, Quadratic
from gossipdp_lab.simulate.scenario import (
    ConstantTime,
    Link,
    LinkModel,
    LognormalTime,
    Scenario,
    SlowedTime,
)
from gossipdp_lab.simulate.trace import Trace
from gossipdp_lab.tasks.workload import learning_rate_factor

QUICK = LinkModel(Link(latency_s=1e-4))
SMALL = Scenario(
    graph="ring",
    num_workers=8,
    objective=Consensus(dimension=8),
    fidelity="links",
    links=QUICK,
    num_steps=40,
    num_records=20,
    keep_timeline=True,
)
TRAINING = replace(SMALL, objective=Quadratic(dimension=6))


def run(scenario: Scenario, method: str = "a2cid2") -> Trace:
    return run_links(scenario, method, lambda share: None)


@pytest.mark.parametrize(
    ("method", "scenario"),
    [("a2cid2", TRAINING), ("gossip", SMALL), ("released", SMALL)],
)
def test_same_seed_same_digest(method: str, scenario: Scenario) -> None:
    busy = replace(
        scenario,
        compute_time=LognormalTime(spread=0.3),
        links=LinkModel(Link(0.01, bytes_per_s=2e3), jitter=0.5),
    )
    digest = run(busy, method).digest()
    assert run(busy, method).digest() == digest
    assert run(replace(busy, seed=1), method).digest() != digest


@pytest.mark.parametrize(
    ("scenario", "graph", "links"),
    [
        (SMALL, "ring", QUICK),
        (TRAINING, "star", LinkModel(Link(0.08, bytes_per_s=1e3), jitter=0.8)),
        (TRAINING, "star", LinkModel(durations_s=[0.02, 0.3])),
    ],
)
def test_the_mean_moves_only_by_gradient_steps(
    scenario: Scenario, graph: str, links: LinkModel
) -> None:
    trace = run(replace(scenario, graph=graph, links=links))
    assert trace.records[-1].exchanges > 10
    # Records fall into exchanges that one end has applied and the other has not.
    assert trace.column("drift").max() < 1e-12


def test_gossip_has_no_momentum_and_none_no_exchanges() -> None:
    gossip, none = run(SMALL, "gossip"), run(SMALL, "none")
    assert gossip.column("consensus_distance")[-1] < gossip.column("consensus_distance")[0]
    assert np.all(np.diff(gossip.column("consensus_distance")) <= 0)  # averaging never parts
    assert none.records[-1].exchanges == 0
    assert np.ptp(none.column("consensus_distance")) == 0


def test_the_trace_of_a_run() -> None:
    trace = run(SMALL)
    last = trace.records[-1]
    assert len(trace.records) == SMALL.num_records + 1
    assert last.time_s == pytest.approx(SMALL.num_steps * 0.1)
    # Every worker was caught in the middle of its first step, and ends 40 of them.
    assert trace.worker_steps == [40] * 8
    assert last.gradient_steps == sum(trace.worker_steps)
    assert sum(trace.worker_requests) <= last.exchanges + 4
    assert 0 <= sum(trace.worker_exchanges) - 2 * last.exchanges <= 4  # one end may be ahead
    assert trace.num_messages["Propose"] >= last.exchanges
    assert trace.num_messages["Accept"] >= last.exchanges
    assert trace.num_events > sum(trace.num_messages.values())
    assert last.idle_share == 0
    computing = [interval for interval in trace.intervals if interval.activity == "computing"]
    exchanging = [interval for interval in trace.intervals if interval.activity == "exchanging"]
    assert len(exchanging) == sum(trace.worker_exchanges)
    for rank in range(8):
        own = [interval for interval in computing if interval.rank == rank]
        assert all(one.end_s == other.start_s for one, other in pairwise(own))
        assert own[0].end_s < 0.1
    assert len({round(interval.end_s % 0.1, 6) for interval in computing}) == 8  # not in step


def test_a_run_ends_below_the_asked_consensus_distance() -> None:
    shares: list[float] = []
    scenario = replace(SMALL, num_steps=200, num_records=100, stop_below=1e-3)
    trace = run_links(scenario, "a2cid2", shares.append)
    distances = trace.column("consensus_distance")
    assert distances[-1] < 1e-3 * distances[0] <= distances[-2]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_slow_worker_asks_seldom_and_answers() -> None:
    scenario = replace(SMALL, compute_time=SlowedTime(ConstantTime(0.1), {2: 5.0}), num_steps=200)
    trace = run(scenario)
    assert trace.worker_steps[2] == pytest.approx(40, abs=1)
    assert trace.worker_requests[2] < 0.4 * trace.worker_requests[6]
    assert trace.worker_exchanges[2] - trace.worker_requests[2] > 2 * trace.worker_requests[2]


def test_bytes_of_a_row_unless_said_otherwise() -> None:
    links = LinkModel(Link(1e-4, bytes_per_s=1e3))
    rows = run(replace(SMALL, links=links))
    said = run(replace(SMALL, links=links, model_bytes=8 * 8))
    other = run(replace(SMALL, links=links, model_bytes=8))
    assert rows.digest() == said.digest() != other.digest()


def test_without_the_excess_of_alpha_tilde_it_is_gossip() -> None:
    unaccelerated = run(replace(SMALL, alpha_tilde_factor=0.0), "a2cid2")
    gossip = run(SMALL, "gossip")
    assert np.allclose(
        unaccelerated.column("consensus_distance"), gossip.column("consensus_distance"), rtol=1e-12
    )
    # The factors change the arithmetic alone, not who meets whom.
    plain, tuned = run(SMALL), run(replace(SMALL, eta_factor=0.25))
    assert plain.intervals == tuned.intervals
    assert plain.column("consensus_distance")[-1] != tuned.column("consensus_distance")[-1]


def test_gradients_bring_the_workers_to_the_optimum() -> None:
    trace = run(replace(TRAINING, num_steps=120))
    assert trace.records[-1].loss < 0.1 * trace.records[0].loss
    decaying = run(replace(TRAINING, num_steps=120, schedule=learning_rate_factor))
    assert trace.records[-1].loss != decaying.records[-1].loss < 0.5 * trace.records[0].loss
    # Training steps do not wait for exchanges, however long these take.
    slow = run(replace(TRAINING, links=LinkModel(Link(1e-4, bytes_per_s=10.0))))
    assert slow.worker_steps == [40] * 8
