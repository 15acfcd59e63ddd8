"""Gradient steps: evaluated at their start, applied at their end, batched without a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gossipdp_lab.simulate.objectives import Evaluation, Gradients, GradientSource
from gossipdp_lab.simulate.optimizers import Sgd
from gossipdp_lab.simulate.population import Population, Training


class Halving(GradientSource):
    """Gradient x, one buffer column that counts steps; remembers who was asked with whom."""

    def __init__(self) -> None:
        self.start = torch.tensor([[8.0, 0.0], [16.0, 0.0], [32.0, 0.0]], dtype=torch.float64)
        self.num_trained = 1
        self.asked: list[list[int]] = []

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        self.asked.append(list(ranks))
        return Gradients(x[:, :1].clone(), torch.ones(len(x), 1, dtype=x.dtype), x[:, 0] ** 2)

    def evaluate(self, x: Tensor) -> Evaluation:
        return Evaluation(float(x[0]))


def make(
    decay_s: float | None = None, learning_rate: float = 0.5
) -> tuple[Halving, Population, Training]:
    source = Halving()
    population = Population(source.start, 1, momentum=False)
    return source, population, Training(source, Sgd(0.5), population, decay_s=decay_s)


def test_a_step_uses_the_row_at_its_start_and_adds_to_the_row_at_its_end() -> None:
    _, population, training = make()
    training.start_step(0, 0.0)
    population.x[0, 0] = 100.0  # an exchange meanwhile
    training.end_step(0)
    assert population.x[0, 0] == 100.0 - 0.5 * 8.0
    assert training.steps == [1, 0, 0]


def test_all_steps_under_way_are_evaluated_together() -> None:
    source, population, training = make()
    for rank in range(3):
        training.start_step(rank, 0.0)
    training.end_step(1)
    training.start_step(1, 0.0)
    training.end_step(0)
    training.end_step(2)
    training.end_step(1)
    assert source.asked == [[0, 1, 2], [1]]
    assert population.x[:, 0].tolist() == [4.0, 4.0, 16.0]
    assert population.x[:, 1].tolist() == [1.0, 2.0, 1.0]


def test_the_time_scales_the_learning_rate_of_each_step() -> None:
    _, population, training = make(decay_s=20.0)
    training.start_step(0, 20.0)
    training.start_step(1, 1.0)
    training.end_step(0)
    training.end_step(1)
    assert population.x[:2, 0].tolist() == pytest.approx([8.0 - 0.01 * 4.0, 16.0 - 8.0])


def test_the_mean_loss_is_that_since_the_last_look() -> None:
    _, _, training = make()
    assert math.isnan(training.take_loss())
    training.start_step(0, 0.0)
    training.start_step(1, 0.0)
    training.end_step(0)
    assert training.take_loss() == (8.0**2 + 16.0**2) / 2
    assert math.isnan(training.take_loss())


def test_without_gradients_steps_are_counted() -> None:
    population = Population(Halving().start, 1, momentum=False)
    training = Training(None, Sgd(), population)
    training.start_step(2, 0.0)
    training.end_step(2)
    assert training.steps == [0, 0, 1]
    assert population.x.equal(Halving().start)
