"""Poisson edges: rates, and both kinds of arithmetic against the reference."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch
from reference import PaperState

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp_lab.simulate.ideal import PoissonEdges
from gossipdp_lab.simulate.optimizers import Sgd
from gossipdp_lab.simulate.population import Population, Training

NUM_WORKERS, DIMENSION, NUM_TRAINED = 8, 5, 4


def make(
    *,
    momentum: bool = True,
    is_released: bool = False,
    dtype=torch.float64,
    edges_type=PoissonEdges,
) -> tuple[Population, PoissonEdges, Constants]:
    constants = Constants.of(build_graph("star", NUM_WORKERS))
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(NUM_WORKERS, DIMENSION, generator=generator, dtype=torch.float64)
    population = Population(start.to(dtype), NUM_TRAINED, momentum=momentum)
    edges = edges_type(
        constants,
        Training(None, Sgd(), population),
        unit_s=0.5,
        eta=constants.eta if momentum else 0.0,
        alpha_tilde=constants.alpha_tilde if momentum else 0.5,
        is_released=is_released,
        seed=3,
    )
    return population, edges, constants


class Recorded(PoissonEdges):
    """Keeps what fired, and applies nothing."""

    def apply(self, times_s, edges) -> None:
        self.__dict__.setdefault("fired", []).extend(zip(times_s, edges, strict=True))


class ByUpdate(PoissonEdges):
    """Computes every exchange as a real worker does."""

    def apply(self, times_s, edges) -> None:
        population, alpha_tilde = self._population, self._excess + 0.5
        x = population.x
        ends = self._ends[edges].tolist()
        for phase, (i, j) in zip((self._eta_per_s * times_s).tolist(), ends, strict=True):
            unflowed = x[i].clone(), x[j].clone()
            population.flow(i, phase)
            population.flow(j, phase)
            live = x[i].clone(), x[j].clone()
            sent = unflowed if self._is_released else live
            population.apply(i, live[0], sent[1], alpha_tilde)
            population.apply(j, live[1], sent[0], alpha_tilde)


def test_exchanges_are_those_of_the_paper_s_equation() -> None:
    population, edges, constants = make()
    start = population.x.clone()
    recorded = Recorded(
        constants,
        Training(None, Sgd(), population),
        unit_s=0.5,
        eta=0.0,
        alpha_tilde=0.5,
        is_released=False,
        seed=3,
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("momentum", "is_released"), [(True, False), (False, False), (True, True)])
def test_the_compiled_loop_agrees_with_the_update_of_real_workers(
    momentum: bool, is_released: bool, dtype: torch.dtype
) -> None:
    results = []
    for edges_type in (PoissonEdges, ByUpdate):
        population, edges, _ = make(
            momentum=momentum, is_released=is_released, dtype=dtype, edges_type=edges_type
        )
        for until_s in (1.0, 7.5, 20.0):
            edges.advance(until_s)
        for rank in range(NUM_WORKERS):
            population.flow(rank, edges.phase(20.0))
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
            constants,
            Training(None, Sgd(), population),
            unit_s=0.1,
            eta=0.0,
            alpha_tilde=0.5,
            is_released=False,
            seed=0,
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
        constants,
        Training(None, Sgd(), population),
        unit_s=1.0,
        eta=0.0,
        alpha_tilde=0.5,
        is_released=False,
        seed=0,
    )
    edges.advance(1e9)
    assert edges.num_exchanges == 0
