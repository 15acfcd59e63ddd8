from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gossipdp_lab.simulate.links import run_links
from gossipdp_lab.simulate.objectives import Consensus, Quadratic
from gossipdp_lab.simulate.scenario import Link, LinkModel, LognormalTime, Scenario
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


@pytest.mark.parametrize(("method", "scenario"), [("a2cid2", TRAINING), ("gossip", SMALL)])
def test_same_seed_same_digest(method, scenario):
    links = LinkModel(Link(0.01, bytes_per_s=2e3), jitter=0.5)
    busy = replace(scenario, compute_time=LognormalTime(spread=0.3), links=links)
    digest = run(busy, method).digest()
    assert run(busy, method).digest() == digest
    assert run(replace(busy, seed=1), method).digest() != digest


@pytest.mark.parametrize(
    ("scenario", "graph", "links"),
    [
        (SMALL, "ring", QUICK),
        (TRAINING, "star", LinkModel(Link(0.08, bytes_per_s=1e3), jitter=0.8)),
    ],
)
def test_the_mean_moves_only_by_gradient_steps(scenario, graph, links):
    trace = run(replace(scenario, graph=graph, links=links))
    assert trace.records[-1].exchanges > 6
    # Records fall into exchanges that one end has applied and the other has not.
    assert trace.column("drift").max() < 1e-12


def test_gossip_has_no_momentum_and_none_no_exchanges():
    gossip, none = run(SMALL, "gossip"), run(SMALL, "none")
    assert gossip.column("consensus_distance")[-1] < gossip.column("consensus_distance")[0]
    assert np.all(np.diff(gossip.column("consensus_distance")) <= 0)  # averaging never parts
    assert none.records[-1].exchanges == 0
    assert np.ptp(none.column("consensus_distance")) == 0


def test_the_trace_of_a_run():
    trace = run(SMALL)
    last = trace.records[-1]
    assert len(trace.records) == SMALL.num_records + 1
    assert last.time_s == pytest.approx(SMALL.num_steps * 0.1)
    # Every worker was caught in the middle of its first step, and ends 40 of them.
    assert trace.worker_steps == [40] * 8
    assert last.gradient_steps == sum(trace.worker_steps)
    assert trace.num_messages["Propose"] >= last.exchanges
    assert trace.num_messages["Accept"] >= last.exchanges
    assert last.idle_share == 0
    computing = [interval for interval in trace.intervals if interval.activity == "computing"]
    exchanging = [interval for interval in trace.intervals if interval.activity == "exchanging"]
    assert 0 <= len(exchanging) - 2 * last.exchanges <= 4  # one end may be ahead
    for rank in range(8):
        own = [interval for interval in computing if interval.rank == rank]
        assert all(one.end_s == other.start_s for one, other in pairwise(own))
        assert own[0].end_s < 0.1
    assert len({round(interval.end_s % 0.1, 6) for interval in computing}) == 8  # not in step


def test_bytes_of_a_row_unless_said_otherwise():
    links = LinkModel(Link(1e-4, bytes_per_s=1e3))
    rows = run(replace(SMALL, links=links))
    said = run(replace(SMALL, links=links, model_bytes=8 * 8))
    other = run(replace(SMALL, links=links, model_bytes=8))
    assert rows.digest() == said.digest() != other.digest()


def test_gradients_bring_the_workers_to_the_optimum():
    trace = run(replace(TRAINING, num_steps=120))
    assert trace.records[-1].loss < 0.1 * trace.records[0].loss
    decaying = run(replace(TRAINING, num_steps=120, schedule=learning_rate_factor))
    assert trace.records[-1].loss != decaying.records[-1].loss < 0.5 * trace.records[0].loss
    # Training steps do not wait for exchanges, however long these take.
    slow = run(replace(TRAINING, links=LinkModel(Link(1e-4, bytes_per_s=10.0))))
    assert slow.worker_steps == [40] * 8
