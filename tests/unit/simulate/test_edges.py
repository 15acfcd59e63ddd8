"""Poisson edges: rates, and both kinds of arithmetic against the reference."""

from __future__ import annotations

import importlib.util

import networkx as nx
import numpy as np
import pytest
import torch
from reference import PaperState

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.simulate.ideal import PoissonEdges
from gossipdp.simulate.population import Population

NUM_WORKERS, DIMENSION, NUM_TRAINED = 8, 5, 4
ARITHMETIC = [
    "torch",
    pytest.param(
        "numba",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("numba") is None, reason="numba is not installed"
        ),
    ),
]


def make(
    arithmetic: str, *, momentum: bool = True, is_released: bool = False, dtype=torch.float64
) -> tuple[Population, PoissonEdges, Constants]:
    constants = Constants.of(build_graph("star", NUM_WORKERS))
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(NUM_WORKERS, DIMENSION, generator=generator, dtype=torch.float64)
    population = Population(start.to(dtype), NUM_TRAINED, momentum=momentum)
    edges = PoissonEdges(
        constants,
        population,
        unit_s=0.5,
        eta=constants.eta if momentum else 0.0,
        alpha_tilde=constants.alpha_tilde if momentum else 0.5,
        is_released=is_released,
        seed=3,
    )
    edges.arithmetic = arithmetic
    return population, edges, constants


class Recorded(PoissonEdges):
    """Keeps what fired, and applies nothing."""

    def _apply(self, times_s, edges) -> None:
        self.__dict__.setdefault("fired", []).extend(zip(times_s, edges, strict=True))


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_exchanges_are_those_of_the_paper_s_equation(arithmetic: str) -> None:
    population, edges, constants = make(arithmetic)
    start = population.x.clone()
    recorded = Recorded(
        constants, population, unit_s=0.5, eta=0.0, alpha_tilde=0.5, is_released=False, seed=3
    )
    recorded.advance(10.0)
    workers = [PaperState(row[:NUM_TRAINED], row[:NUM_TRAINED]) for row in start]
    flowed = [0.0] * NUM_WORKERS
    for time_s, edge in recorded.fired:
        time = time_s / 0.5
        i, j = constants.edges[edge]
        for rank in (i, j):
            workers[rank] = workers[rank].flow(constants.eta, time - flowed[rank])
            flowed[rank] = time
        delta = workers[i].x - workers[j].x
        workers[i] = workers[i].exchange(delta, constants.alpha_tilde)
        workers[j] = workers[j].exchange(-delta, constants.alpha_tilde)
    edges.advance(10.0)
    assert edges.num_exchanges == len(recorded.fired) > 5
    for rank, worker in enumerate(workers):
        torch.testing.assert_close(
            population.x[rank, :NUM_TRAINED], worker.x, rtol=1e-11, atol=1e-11
        )


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("momentum", "is_released"), [(True, False), (False, False), (True, True)])
def test_numba_and_torch_agree(momentum: bool, is_released: bool, dtype: torch.dtype) -> None:
    results = []
    for arithmetic in ("numba", "torch"):
        population, edges, _ = make(
            arithmetic, momentum=momentum, is_released=is_released, dtype=dtype
        )
        for until_s in (1.0, 7.5, 20.0):
            edges.advance(until_s)
        population.flow_all(edges.phase(20.0))
        results.append(population.x)
    tolerance = 1e-11 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


def test_edges_fire_at_their_rates_however_often_they_are_looked_at() -> None:
    # A triangle and a tail: rates of 1/2 on edge (0, 1) and of 1/3 on the three at worker 2.
    constants = Constants.of(nx.Graph([(0, 1), (0, 2), (1, 2), (2, 3)]))
    population = Population(torch.zeros(4, 1, dtype=torch.float64), 1, momentum=False)
    fired = []
    for looks in ([2000.0], list(np.linspace(1.0, 2000.0, 77))):
        recorded = Recorded(
            constants, population, unit_s=0.1, eta=0.0, alpha_tilde=0.5, is_released=False, seed=0
        )
        for until_s in looks:
            recorded.advance(until_s)
        fired.append(recorded.fired)
    assert fired[0] == fired[1]
    times_s, edges = zip(*fired[0], strict=True)
    assert list(times_s) == sorted(times_s)
    # 20,000 units of time: 30,000 exchanges, with a standard deviation of 173.
    assert len(edges) == pytest.approx(30_000, abs=600)
    assert np.mean(np.array(edges) == 0) == pytest.approx(1 / 3, abs=0.015)


def test_one_worker_has_no_exchanges() -> None:
    constants = Constants.of(build_graph("ring", 1))
    population = Population(torch.zeros(1, 1, dtype=torch.float64), 1, momentum=True)
    edges = PoissonEdges(
        constants, population, unit_s=1.0, eta=0.0, alpha_tilde=0.5, is_released=False, seed=0
    )
    edges.advance(1e9)
    assert edges.num_exchanges == 0
