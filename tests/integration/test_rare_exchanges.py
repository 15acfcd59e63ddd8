"""Exchanges hold real workers together against noise, however rare or slow they are."""

from typing import Any

import pytest
import torch
from torch import nn

from gossipdp import Counting, Exchange, GossipDataParallel, Network

pytestmark = pytest.mark.processes

LEARNING_RATE = 0.1


def walk(method: str, num_values: int, steps: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """Take gradient steps of white noise, another on each worker, then average.

    Without exchanges the squared distance of n workers to their mean is, in expectation,
    steps * rate^2 * num_values * (1 - 1/n).
    """
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(num_values))
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    model = GossipDataParallel(
        net, optimizer, method=method, counting=Counting(samples_per_step=1), **options
    )
    noise = torch.Generator().manual_seed(model.rank)
    net.weight.grad = torch.zeros(num_values)
    for _ in range(steps):
        net.weight.grad.normal_(generator=noise)
        optimizer.step()
    return model.consolidate(), model.stats()


def test_one_exchange_in_a_thousand_steps(workers):
    """Minutes may pass between two exchanges: nobody is taken for dead, and what comes, mixes."""
    n, steps = 3, 6_000
    options = {"graph": "ring", "comm_rate": 1e-3, "network": Network(timeout_s=2.0)}
    results = workers(walk, n, ("gossip", 64, steps, options))
    completed = sum(stats.exchanges_initiated for _, stats in results)
    # Each asks first within 2000 steps, then every 1000 to 3000: at least twice, at most 6
    # times. The last one of each may come too late to be completed.
    assert n <= completed <= n * 6
    assert all(not stats.noticed for _, stats in results)
    assert results[0][0].gradient_steps == n * steps
    assert results[0][0].world_size == n


def test_an_exchange_that_takes_longer_than_the_time_out(workers):
    """The time-out is for no progress. Here 8 MB at 4 MB/s take twice as long, and go well."""
    num_values = 2_000_000
    options = {
        "graph": "complete",
        "comm_rate": 0.5,
        "exchange": Exchange(pace="strict"),
        "network": Network(timeout_s=1.0, max_megabits_per_s=32),
    }
    results = workers(walk, 2, ("gossip", num_values, 12, options))
    for _, stats in results:
        assert stats.exchanges >= 1
        assert stats.exchanges_failed == 0
        assert not stats.noticed
        longest_s = max(each.ended_s - each.started_s for each in stats.recent_exchanges)
        assert longest_s > 1.5
