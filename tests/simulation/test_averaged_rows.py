"""The rows that a simulated consolidation averages."""

from __future__ import annotations

import pytest
import torch
from simulated_faults.averaged_rows import AveragedRows

from gossipdp.protocol.actions import Commit
from gossipdp.protocol.messages import Epoch
from gossipdp.simulate.population import Population


def make_population() -> Population:
    population = Population(torch.arange(6.0).double().reshape(2, 3), 3, momentum=True)
    assert population.c is not None
    population.c += 2.0
    return population


def test_input_is_the_row_flowed_to_infinity() -> None:
    population = make_population()
    rows = AveragedRows(population, num_chunks=2)
    rows.prepare(0)
    assert rows.inputs[0].tolist() == [1.0, 2.0, 3.0]
    assert population.c is not None
    assert population.c[0].tolist() == [0.0, 0.0, 0.0]


def test_chunks_are_summed_divided_and_committed() -> None:
    population = make_population()
    rows = AveragedRows(population, num_chunks=2)
    drift = population.drift()  # of the momentum given above
    for rank in (0, 1):
        rows.prepare(rank)
    for chunk in (0, 1):
        rows.add(0, chunk, rows.chunk(1, chunk))
        rows.finish(0, chunk, 2)
        rows.take(1, chunk, rows.chunk(0, chunk))
    assert rows.squared_distance(0) == pytest.approx(3 * 1.5**2)
    assert not rows.is_same_everywhere([0, 1])
    for rank in (0, 1):
        rows.commit(rank, Commit(Epoch(1, 0, 0), 0.0, 2))
    assert rows.is_same_everywhere([0, 1])
    assert population.x[1].tolist() == [2.5, 3.5, 4.5]
    assert population.drift() == pytest.approx(drift, abs=1e-12)


@pytest.mark.parametrize("num_chunks", [0, 4])
def test_no_more_chunks_than_columns(num_chunks: int) -> None:
    with pytest.raises(ValueError, match=f"num_chunks is {num_chunks}; a row of 3"):
        AveragedRows(make_population(), num_chunks)
