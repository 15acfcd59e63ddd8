"""Optimizers over rows: the same numbers as torch.optim, whenever each row steps."""

from random import Random

import pytest
import torch
from torch import Tensor

from gossipdp_lab.simulate.optimizers import AdamW, RowOptimizer, Sgd


def torch_optimizer(settings: RowOptimizer, row: Tensor) -> torch.optim.Optimizer:
    if isinstance(settings, Sgd):
        return torch.optim.SGD(
            [row],
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
    assert isinstance(settings, AdamW)
    return torch.optim.AdamW(
        [row],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


SETTINGS = [
    Sgd(0.1),
    Sgd(0.05, momentum=0.8, weight_decay=0.1),
    AdamW(0.01, betas=(0.8, 0.95), epsilon=1e-4, weight_decay=0.3),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_step_at_different_times_are_those_of_torch(
    settings: RowOptimizer, dtype: torch.dtype
) -> None:
    num_workers, dimension = 4, 6
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_workers, dimension, generator=generator, dtype=dtype)
    rows = [row.clone().requires_grad_() for row in x]
    optimizers = [torch_optimizer(settings, row) for row in rows]
    state = settings.begin(x)
    random = Random(0)
    for _ in range(30):
        ranks = random.sample(range(num_workers), random.randint(1, num_workers))
        gradients = torch.randn(len(ranks), dimension, generator=generator, dtype=dtype)
        # Some schedules multiply all rates alike, others each worker's by its own factor.
        factors = torch.rand(len(ranks), 1, generator=generator, dtype=dtype)
        if random.random() < 0.5:
            factor: float | Tensor = float(factors[0])
            factors = factors[:1].expand(len(ranks), 1)
        else:
            factor = factors
        change = settings.changes(state, ranks, x[ranks], gradients, factor)
        assert change.dtype == dtype
        x[ranks] += change
        for place, rank in enumerate(ranks):
            for group in optimizers[rank].param_groups:
                group["lr"] = settings.learning_rate * float(factors[place])  # type: ignore[attr-defined]
            rows[rank].grad = gradients[place].clone()
            optimizers[rank].step()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(x, torch.stack(rows).detach(), rtol=tolerance, atol=tolerance)


def test_nothing_that_was_passed_is_changed() -> None:
    for settings in SETTINGS:
        x, gradients = torch.ones(2, 3), torch.ones(2, 3)
        state = settings.begin(x)
        first = settings.changes(state, [0, 1], x, gradients, 1.0)
        kept = first.clone()
        settings.changes(state, [1, 0], x, gradients, 1.0)
        assert torch.equal(x, torch.ones(2, 3))
        assert torch.equal(gradients, torch.ones(2, 3))
        assert torch.equal(first, kept)
