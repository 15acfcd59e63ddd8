from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp_lab.simulate.ideal import PoissonEdges, run_ideal
from gossipdp_lab.simulate.objectives import Consensus
from gossipdp_lab.simulate.population import Population
from gossipdp_lab.simulate.scenario import ConstantTime, Scenario, SlowedTime
from gossipdp_lab.simulate.trace import Trace

NUM_WORKERS, DIMENSION, NUM_TRAINED = 8, 5, 4


def edges_of(
    population: Population, constants: Constants, edges_type: type = PoissonEdges, **changes: Any
) -> PoissonEdges:
    """Make edges under which rows are averaged, unless changed."""
    options = {"eta": 0.0, "alpha_tilde": 0.5, "is_released": False, "unit_s": 0.5, "seed": 3}
    return edges_type(constants, population, **(options | changes))


def star(dtype: torch.dtype = torch.float64, *, momentum: bool = True) -> Population:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(NUM_WORKERS, DIMENSION, generator=generator, dtype=torch.float64)
    return Population(start.to(dtype), NUM_TRAINED, momentum=momentum)


STAR = Constants.of(build_graph("star", NUM_WORKERS))


class Recorded(PoissonEdges):
    """Keeps what fired, and applies nothing."""

    def apply(self, times_s, edges) -> None:
        self.__dict__.setdefault("fired", []).extend(zip(times_s, edges, strict=True))


class ByUpdate(PoissonEdges):
    """Computes every exchange as a real worker does."""

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.eta_per_s = options["eta"] / options["unit_s"]
        self.alpha_tilde = options["alpha_tilde"]

    def apply(self, times_s, edges) -> None:
        population, alpha_tilde = self._population, self.alpha_tilde
        x = population.x
        ends = self._ends[edges].tolist()
        self.num_exchanges += len(ends)
        for phase, (i, j) in zip((self.eta_per_s * times_s).tolist(), ends, strict=True):
            unflowed = x[i].clone(), x[j].clone()
            population.flow(i, phase)
            population.flow(j, phase)
            live = x[i].clone(), x[j].clone()
            sent = unflowed if self._is_released else live
            population.apply(i, live[0], sent[1], alpha_tilde)
            population.apply(j, live[1], sent[0], alpha_tilde)


@pytest.mark.parametrize(
    ("momentum", "is_released", "dtype"),
    [
        (True, False, torch.float64),
        (True, False, torch.float32),
        (False, False, torch.float64),
        (True, True, torch.float64),
    ],
)
def test_the_compiled_loop_agrees_with_the_update_of_real_workers(momentum, is_released, dtype):
    """Those are proved equal to the paper's equation: test_population.py, test_dynamics.py."""
    results, counts = [], []
    for edges_type in (PoissonEdges, ByUpdate):
        population = star(dtype, momentum=momentum)
        rates = {"eta": STAR.eta, "alpha_tilde": STAR.alpha_tilde} if momentum else {}
        edges = edges_of(population, STAR, edges_type, is_released=is_released, **rates)
        for until_s in (1.0, 7.5, 20.0):
            edges.advance(until_s)
        for rank in range(NUM_WORKERS):
            population.flow(rank, rates.get("eta", 0.0) * 20.0 / 0.5)
        results.append(population.x)
        counts.append(edges.num_exchanges)
    assert counts[0] == counts[1] > 5
    tolerance = 1e-11 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


def test_edges_fire_at_their_rates_however_often_they_are_looked_at():
    # A triangle and a tail: rates of 1/2 on edge (0, 1) and of 1/3 on the three at worker 2.
    constants = Constants.of(nx.Graph([(0, 1), (0, 2), (1, 2), (2, 3)]))
    population = Population(torch.zeros(4, 1, dtype=torch.float64), 1, momentum=False)
    fired = []
    for looks in ([2000.0], list(np.linspace(1.0, 2000.0, 77))):
        recorded = edges_of(population, constants, Recorded, unit_s=0.1, seed=0)
        for until_s in looks:
            recorded.advance(until_s)
        fired.append(recorded.fired)
    assert fired[0] == fired[1]
    times_s, edges = zip(*fired[0], strict=True)
    assert list(times_s) == sorted(times_s)
    # 20,000 units of time: 30,000 exchanges, with a standard deviation of 173.
    assert len(edges) == pytest.approx(30_000, abs=600)
    assert np.mean(np.array(edges) == 0) == pytest.approx(1 / 3, abs=0.015)


def run(method: str, **settings: object) -> Trace:
    return run_ideal(Scenario(**settings), method, lambda share: None)  # type: ignore[arg-type]


# The decay rates of the design on 64 workers, simulated once more; spread about 5%.
@pytest.mark.parametrize(
    ("graph", "steps", "gossip", "a2cid2"),
    [("ring", 4000, 0.0048, 0.059), ("torus", 300, 0.148, 0.282), ("complete", 90, 0.515, 0.515)],
)
def test_decay_rates(graph, steps, gossip, a2cid2):
    for method, expected in (("gossip", gossip), ("a2cid2", a2cid2)):
        trace = run(
            method, graph=graph, num_workers=64, num_steps=steps, num_records=200, stop_below=1e-22
        )
        assert trace.decay_per_exchange() == pytest.approx(expected, rel=0.1)
        assert trace.records[-1].drift < 1e-13
        assert trace.achieved_comm_rate == pytest.approx(1.0, abs=0.08)


def test_the_decay_per_exchange_does_not_depend_on_the_comm_rate():
    rates = [
        run("a2cid2", comm_rate=comm_rate, num_steps=300 / comm_rate).decay_per_exchange()
        for comm_rate in (0.25, 1.0, 4.0)
    ]
    assert max(rates) < 1.1 * min(rates)


def test_the_same_seed_gives_the_same_trace():
    settings = {"num_steps": 20, "keep_timeline": True, "objective": Consensus(8)}
    settings |= {"compute_time": SlowedTime(ConstantTime(), {1: 4.0})}
    first, again, other = (run("a2cid2", seed=seed, **settings) for seed in (5, 5, 6))
    assert first.digest() == again.digest() != other.digest()
    assert first.worker_steps[1] in (4, 5, 6)
    assert first.worker_steps[2] in (19, 20, 21)
    assert {interval.activity for interval in first.intervals} == {"computing"}


def test_a_run_ends_below_the_asked_consensus_distance():
    trace = run("a2cid2", num_steps=10_000, num_records=1000, stop_below=1e-6)
    shares = trace.column("consensus_distance") / trace.records[0].consensus_distance
    assert shares[-1] < 1e-6 <= shares[-2]
    shares = []
    run_ideal(Scenario(num_steps=5, num_records=5), "gossip", shares.append)
    assert shares == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
