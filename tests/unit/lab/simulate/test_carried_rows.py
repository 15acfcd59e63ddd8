"""Rows on a network whose links are cut: what is lost is counted, and nothing else is."""

from functools import partial

import pytest
import torch
from reference import MomentumState
from simulated_faults.rows import FaultyRows

from gossipdp.dynamics.phase import Phase
from gossipdp.protocol.actions import Begin
from gossipdp.protocol.messages import ExchangeId
from gossipdp_lab.simulate.population import Population, Training

DIMENSION = 5


def make_population(num_workers: int) -> Population:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(num_workers, DIMENSION, generator=generator, dtype=torch.float64)
    return Population(start, DIMENSION, momentum=True)


def make_rows(population: Population, eta: float, *, is_released: bool = False) -> FaultyRows:
    phases = {rank: Phase(eta, 1.0) for rank in range(len(population.x))}
    training = Training(None, partial(torch.optim.SGD, lr=0.1), population)
    return FaultyRows(training, phases, is_released=is_released)


def begin(rank: int, counter: int) -> Begin:
    return Begin(1 - rank, ExchangeId(0, 0, counter), 0.9, initiator=rank == 0)


@pytest.mark.parametrize("is_released", [False, True])
def test_exchanges_are_those_of_the_reference(is_released: bool) -> None:
    """Two workers, exchanges a second apart, a period each: after the second, eta a flow."""
    eta = 0.3
    population = make_population(2)
    rows = make_rows(population, eta, is_released=is_released)
    states = [MomentumState(row.clone(), torch.zeros_like(row)) for row in population.x]
    for counter in range(6):
        now_s = float(counter)
        sent = {rank: rows.exchange_began(rank, begin(rank, counter), now_s) for rank in (0, 1)}
        unflowed = [state.x for state in states]
        if counter >= 2:  # the first exchange starts the clock, the second gives it its period
            states = [state.flow(eta, 1.0) for state in states]
        there = unflowed if is_released else [state.x for state in states]
        deltas = [states[0].x - there[1], states[1].x - there[0]]
        for rank in (0, 1):
            rows.data_arrived(rank, ExchangeId(0, 0, counter), sent[1 - rank], now_s)
            rows.exchange_ended(rank, ExchangeId(0, 0, counter), now_s)
            states[rank] = states[rank].exchange(deltas[rank], 0.9)
        for rank in (0, 1):
            torch.testing.assert_close(population.x[rank], states[rank].x)
            assert population.c is not None
            torch.testing.assert_close(population.c[rank], states[rank].c)
    if not is_released:
        assert population.drift() < 1e-14


def test_an_exchange_freezes_the_phase_and_a_boundary_flows() -> None:
    population = make_population(2)
    rows = make_rows(population, eta=0.3)
    for counter in range(2):
        sent = {r: rows.exchange_began(r, begin(r, counter), float(counter)) for r in (0, 1)}
        for rank in (0, 1):
            rows.data_arrived(rank, ExchangeId(0, 0, counter), sent[1 - rank], float(counter))
            if counter == 0 or rank == 1:
                rows.exchange_ended(rank, ExchangeId(0, 0, counter), float(counter))
    rows.step_ended(0, 1.5)  # in its exchange still
    rows.step_ended(1, 1.5)
    assert population.theta[0] == 0.0
    assert population.theta[1] == pytest.approx(0.15)
