from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import pytest
import torch
from reference import MomentumState
from torch import Tensor

from gossipdp_lab.simulate.objectives import Evaluation, Gradients, GradientSource
from gossipdp_lab.simulate.population import Population, RowOptimizers, Training

ETA, ALPHA_TILDE = 0.3, 1.7


def start(num_workers: int = 3, dimension: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_workers, dimension, generator=generator, dtype=torch.float64)


def test_flow_exchange_and_step_are_those_of_the_reference():
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


def test_a_row_never_flows_back():
    population = Population(start(), 5, momentum=True)
    mine, peers = population.x[0].clone(), population.x[1].clone()
    population.apply(0, mine, peers, ALPHA_TILDE)
    population.flow(0, 0.5)
    x, c = population.x.clone(), population.c.clone()
    population.flow(0, 0.2)
    assert torch.equal(population.x, x)
    assert torch.equal(population.c, c)
    assert population.theta[0] == 0.5


def test_buffers_are_averaged_without_momentum():
    population = Population(start(), 3, momentum=True)
    mine, peers = population.x[0].clone(), population.x[1].clone()
    population.apply(0, mine, peers, ALPHA_TILDE)
    population.flow(0, 5.0)
    torch.testing.assert_close(population.x[0, 3:], (mine + peers)[3:] / 2)
    assert not torch.allclose(population.x[0, :3], (mine + peers)[:3] / 2)


def test_drift_sees_what_gradient_steps_did_not_do():
    population = Population(start(), 5, momentum=True)
    population.step([0, 2], torch.ones(2, 5, dtype=torch.float64))
    assert population.drift() < 1e-14
    population.x[1, 0] += 3.0
    assert population.drift() == pytest.approx(1.0)


def test_consensus_distance_is_over_trained_columns():
    x = torch.tensor([[0.0, 7.0], [2.0, -7.0]], dtype=torch.float64)
    assert Population(x, 1, momentum=False).consensus_distance() == pytest.approx(1.0)


class Halving(GradientSource):
    """Gradient x, one buffer column that counts steps; keeps the ranks of each call."""

    def __init__(self) -> None:
        self.start = torch.tensor([[8.0, 0.0], [16.0, 0.0], [32.0, 0.0]], dtype=torch.float64)
        self.num_trained = 1
        self.asked: list[list[int]] = []

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        self.asked.append(list(ranks))
        return Gradients(x[:, :1].clone(), torch.ones(len(x), 1, dtype=x.dtype))

    def evaluate(self, x: Tensor) -> Evaluation:
        return Evaluation(float(x[0]))


def make(
    schedule: Callable[[float], float] | None = None, end_s: float = 1.0
) -> tuple[Halving, Population, Training]:
    source = Halving()
    population = Population(source.start, 1, momentum=False)
    optimizer = partial(torch.optim.SGD, lr=0.5)
    training = Training(source, optimizer, population, schedule=schedule, end_s=end_s)
    return source, population, training


def test_a_step_uses_the_row_at_its_start_and_adds_to_the_row_at_its_end():
    _, population, training = make()
    training.start_step(0, 0.0)
    population.x[0, 0] = 100.0  # an exchange meanwhile
    training.end_step(0)
    assert population.x[0, 0] == 100.0 - 0.5 * 8.0
    assert training.steps == [1, 0, 0]


def test_all_steps_under_way_are_evaluated_together():
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


def test_the_time_scales_the_learning_rate_of_each_step():
    _, population, training = make(schedule=lambda share: 1.0 - share / 2, end_s=20.0)
    training.start_step(0, 25.0)  # as at the end
    training.start_step(1, 0.0)
    training.start_step(2, 10.0)
    for rank in range(3):
        training.end_step(rank)
    expected = [8.0 - 0.5 * 4.0, 16.0 - 8.0, 32.0 - 0.75 * 16.0]
    assert population.x[:, 0].tolist() == pytest.approx(expected)


def in_two_halves(rows: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    (row,) = rows
    return [torch.optim.AdamW([row[2:].view(2, 2)], lr=0.01), torch.optim.SGD([row[:2]], lr=0.1)]


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.05, momentum=0.8, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95), weight_decay=0.3),
        in_two_halves,
    ],
)
def test_rows_that_step_at_different_times_are_those_of_torch(make):
    num_workers, dimension = 4, 6
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_workers, dimension, generator=generator, dtype=torch.float64)
    rows = [row.clone() for row in x]
    gradients_of = [torch.zeros(dimension, dtype=torch.float64) for _ in rows]
    alone = []
    for row, gradient in zip(rows, gradients_of, strict=True):
        made = make([row])
        alone.append(made if isinstance(made, list) else [made])
        for group in (group for optimizer in alone[-1] for group in optimizer.param_groups):
            for values in group["params"]:
                begin = values.storage_offset()
                values.grad = gradient[begin : begin + values.numel()].view_as(values)
    optimizers = RowOptimizers(make, x)
    random = Random(0)
    for _ in range(30):
        ranks = random.sample(range(num_workers), random.randint(1, num_workers))
        gradients = torch.randn(len(ranks), dimension, generator=generator, dtype=torch.float64)
        given = x[ranks], gradients.clone()
        x[ranks] += optimizers.changes(ranks, *given, factor=0.5)
        assert torch.equal(given[1], gradients)
        for place, rank in enumerate(ranks):
            gradients_of[rank].copy_(gradients[place])
            for optimizer in alone[rank]:
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("initial_lr", group["lr"]) * 0.5
                optimizer.step()
    torch.testing.assert_close(x, torch.stack(rows), rtol=1e-12, atol=1e-12)


def test_an_optimizer_that_does_not_begin_with_zeros_is_refused():
    with pytest.raises(ValueError, match="NAdam begins with another 'mu_product'"):
        RowOptimizers(torch.optim.NAdam, torch.zeros(2, 3))
