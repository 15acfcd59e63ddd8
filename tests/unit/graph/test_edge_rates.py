import math
from itertools import product

import networkx as nx
import numpy as np
import pytest

from gossipdp.graph import Constants, build_graph
from gossipdp.graph.edge_rates import FLOOR_SHARE, best_rates
from gossipdp.graph.rate_program import RateProgram
from gossipdp.graph.spectrum import dense_spectrum


def objective(goal, num_workers, edges, rates):
    lambda_2, resistances = dense_spectrum(num_workers, edges, np.array(rates))
    return lambda_2 if goal == "gossip" else math.sqrt(lambda_2 / resistances.max() / 2)


def brute_force(goal, graph):
    """The best value over a grid of feasible rates, refined around the best point."""
    num_workers, edges = len(graph), np.array(sorted(graph.edges))
    centre, width, best = np.full(len(edges), 0.5), 0.5, -math.inf
    for _ in range(9):
        axes = [np.linspace(max(1e-3, c - width), min(1.0, c + width), 7) for c in centre]
        for rates in product(*axes):
            if np.bincount(edges.ravel(), np.repeat(rates, 2)).max() <= 1.0 + 1e-12:
                value = objective(goal, num_workers, edges, rates)
                if value > best:
                    best, centre = value, np.array(rates)
        width *= 0.55
    return best


PAW = nx.Graph([(0, 1), (0, 2), (1, 2), (2, 3)])
SMALL = [
    build_graph("path", 3),
    build_graph("path", 4),
    build_graph("path", 5),
    build_graph("star", 4),
    build_graph("star", 5),
    PAW,
]


@pytest.mark.parametrize("goal", ["gossip", "a2cid2"])
@pytest.mark.parametrize("graph", SMALL, ids=["path3", "path4", "path5", "star4", "star5", "paw"])
def test_small_graphs_against_brute_force(graph, goal):
    best = brute_force(goal, graph)
    found = best_rates(graph, goal=goal)
    assert found.value >= best * (1 - 1.5e-3)
    assert found.bound >= best * (1 - 1e-9)
    assert found.gap < 2e-3


@pytest.mark.parametrize("goal", ["gossip", "a2cid2"])
@pytest.mark.parametrize(
    ("name", "num_workers"),
    [("ring", 12), ("complete", 9), ("star", 7), ("torus", 16), ("hypercube", 8), ("path", 2)],
)
def test_where_all_edges_are_alike_the_default_comes_back(name, num_workers, goal):
    found = best_rates(build_graph(name, num_workers), 2.0, goal=goal)
    assert found.best is found.default
    assert found.gain == 1.0
    assert found.gap < 1e-3


@pytest.mark.parametrize("goal", ["gossip", "a2cid2"])
@pytest.mark.parametrize(
    ("name", "num_workers", "least_gossip", "least_a2cid2"),
    [
        ("torus", 12, 1.199, 1.08),
        ("erdos-renyi", 24, 1.3, 1.2),
        ("random-regular", 24, 1.2, 1.05),
        ("exponential", 16, 1.3, 1.1),
    ],
)
def test_what_better_rates_gain(name, num_workers, least_gossip, least_a2cid2, goal):
    found = best_rates(build_graph(name, num_workers), 1.5, goal=goal)
    assert found.gain >= (least_gossip if goal == "gossip" else least_a2cid2)
    assert found.gap < 2e-3
    for worker in found.best.workers:
        assert found.best.worker_rate(worker) <= 1.5 * (1 + 1e-9)
    for best, default in zip(found.best.rates, found.default.rates, strict=True):
        assert best >= FLOOR_SHARE * default * 0.999
    # What is found is what Constants takes.
    again = Constants.of(build_graph(name, num_workers), 1.5, rates=found.by_edge)
    assert again.eta == pytest.approx(found.best.eta)


@pytest.mark.parametrize("goal", ["gossip", "a2cid2"])
def test_every_step_of_the_search_is_told(goal):
    steps = []
    best_rates(build_graph("torus", 12), goal=goal, on_evaluation=lambda: steps.append(1))
    assert len(steps) > 20


def test_the_bound_holds_for_random_rates():
    graph = build_graph("erdos-renyi", 10, seed=3)
    found = {goal: best_rates(graph, goal=goal) for goal in ("gossip", "a2cid2")}
    edges = np.array(found["gossip"].default.edges)
    random = np.random.default_rng(0)
    for _ in range(300):
        rates = random.dirichlet(np.full(len(edges), 0.7)) + 1e-4
        rates /= np.bincount(edges.ravel(), np.repeat(rates, 2)).max()
        for goal, result in found.items():
            assert objective(goal, 10, edges, rates) <= result.bound


def test_the_derivatives_of_the_barrier():
    graph = build_graph("erdos-renyi", 7, seed=1)
    constants = Constants.of(graph)
    program = RateProgram(7, np.array(constants.edges), 1e-3 * np.array(constants.rates))
    rates = 0.8 * np.array(constants.rates)
    lambda_2, resistances = dense_spectrum(7, program.edges, rates)
    point = np.concatenate([rates, [0.6 * lambda_2], [1.7 * resistances.max()]])
    weights, tau, step = (0.7, 1.3), 5.0, 1e-5

    def barrier(at):
        return tau * program._objective(at, weights) - np.log(program._slacks(at, weights)).sum()

    gradient, hessian = program._derivatives(point, tau, weights)
    for index, unit in enumerate(step * np.eye(len(point))):
        slope = (barrier(point + unit) - barrier(point - unit)) / (2 * step)
        assert gradient[index] == pytest.approx(slope, rel=1e-4, abs=1e-4)
        ahead, _ = program._derivatives(point + unit, tau, weights)
        behind, _ = program._derivatives(point - unit, tau, weights)
        np.testing.assert_allclose(
            hessian[index], (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-3
        )


def test_what_is_refused():
    with pytest.raises(ValueError, match="has 0 edges"):
        best_rates(build_graph("ring", 1))
    with pytest.raises(ValueError, match="use a sparser graph"):
        best_rates(build_graph("complete", 80))
    with pytest.raises(ValueError, match="'gossip' or 'a2cid2'"):
        best_rates(build_graph("ring", 4), goal="allreduce")
    with pytest.raises(ValueError, match="comm rate"):
        best_rates(build_graph("ring", 4), -1.0)
