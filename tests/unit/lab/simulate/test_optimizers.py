"""Optimizers over rows: the same numbers as torch.optim, whenever each row steps."""

from functools import partial
from random import Random

import pytest
import torch

from gossipdp_lab.simulate.population import RowOptimizers


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
