"""Moments that real processes exchange come together."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossipdp import Exchange, GossipDataParallel

pytestmark = pytest.mark.processes

NUM_STEPS = 60


def train(choice: Any) -> tuple[Tensor, Tensor, int]:
    """Return the moments, parameters and failed exchanges; data differ in size between workers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 700), nn.ReLU(), nn.Linear(700, 900))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.98))
    exchange = Exchange(moments=choice, pace="strict")
    model = GossipDataParallel(net, optimizer, graph="complete", exchange=exchange)
    torch.manual_seed(model.rank)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16) * (1.0 + model.rank)).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)  # leaves the other worker time, as a GPU would
    model.consolidate()
    moments = [optimizer.state[each]["exp_avg_sq"].flatten() for each in net.parameters()]
    parameters = [each.detach().flatten() for each in net.parameters()]
    return torch.cat(moments), torch.cat(parameters), model.stats().exchanges_failed


def spread(results: Any) -> float:
    """Return the standard deviation over workers as a share of their mean, over coordinates."""
    held = torch.stack([each for each, _, _ in results]).double()
    return float(held.std(dim=0).mean() / held.mean())


def test_second_moments_of_workers_with_different_data_come_together(workers):
    both = workers(lambda: (train(False), train({"exp_avg_sq": 1})), 2)
    apart, results = zip(*both, strict=True)
    assert spread(apart) > 0.5
    # In 60 steps of beta2 = 0.98 each worker's own data make 70% of what it would hold alone.
    assert spread(results) < 0.2 * spread(apart)
    for moments, parameters, num_failed in results:
        assert (moments >= 0).all()
        assert moments.isfinite().all()
        assert torch.equal(parameters, results[0][1])
        assert num_failed == 0
