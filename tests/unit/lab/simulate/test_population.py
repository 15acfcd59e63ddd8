"""Rows of the population follow the float64 reference of the dynamics."""

from __future__ import annotations

import pytest
import torch
from reference import MomentumState

from gossipdp_lab.simulate.population import Population

ETA, ALPHA_TILDE = 0.3, 1.7


def start(num_workers: int = 3, dimension: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_workers, dimension, generator=generator, dtype=torch.float64)


def test_flow_exchange_and_step_are_those_of_the_reference() -> None:
    population = Population(start(), 5, momentum=True)
    workers = [MomentumState(row, torch.zeros(5, dtype=torch.float64)) for row in start()]
    flowed = [0.0] * 3
    change = torch.ones(1, 5, dtype=torch.float64)
    for time, first, second in ((0.5, 0, 1), (0.7, 1, 2), (2.0, 0, 2), (2.1, 0, 1)):
        for rank in (first, second):
            population.flow(rank, ETA * time)
            workers[rank] = workers[rank].flow(ETA, time - flowed[rank])
            flowed[rank] = time
        mine, peers = population.x[first].clone(), population.x[second].clone()
        population.apply(first, mine, peers, ALPHA_TILDE)
        population.apply(second, peers, mine, ALPHA_TILDE)
        delta = workers[first].x - workers[second].x
        workers[first] = workers[first].exchange(delta, ALPHA_TILDE)
        workers[second] = workers[second].exchange(-delta, ALPHA_TILDE)
        population.step([first], change)
        workers[first] = workers[first].increment(change[0])
    assert population.c is not None
    for rank, worker in enumerate(workers):
        torch.testing.assert_close(population.x[rank], worker.x, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(population.c[rank], worker.c, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(population.mean(), sum(worker.z for worker in workers) / 3)
    assert population.drift() < 1e-14


def test_a_row_never_flows_back() -> None:
    population = Population(start(), 5, momentum=True)
    mine, peers = population.x[0].clone(), population.x[1].clone()
    population.apply(0, mine, peers, ALPHA_TILDE)
    population.flow(0, 0.5)
    x, c = population.x.clone(), population.c.clone()
    population.flow(0, 0.2)
    assert torch.equal(population.x, x)
    assert torch.equal(population.c, c)
    assert population.theta[0] == 0.5


def test_buffers_are_averaged_without_momentum() -> None:
    population = Population(start(), 3, momentum=True)
    mine, peers = population.x[0].clone(), population.x[1].clone()
    population.apply(0, mine, peers, ALPHA_TILDE)
    population.flow(0, 5.0)
    torch.testing.assert_close(population.x[0, 3:], (mine + peers)[3:] / 2)
    assert not torch.allclose(population.x[0, :3], (mine + peers)[:3] / 2)


def test_drift_sees_what_gradient_steps_did_not_do() -> None:
    population = Population(start(), 5, momentum=True)
    population.step([0, 2], torch.ones(2, 5, dtype=torch.float64))
    assert population.drift() < 1e-14
    population.x[1, 0] += 3.0
    assert population.drift() == pytest.approx(1.0)


def test_consensus_distance_is_over_trained_columns() -> None:
    x = torch.tensor([[0.0, 7.0], [2.0, -7.0]], dtype=torch.float64)
    assert Population(x, 1, momentum=False).consensus_distance() == pytest.approx(1.0)
