"""Exchanged moments between real processes, in shared memory and over TCP."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossipdp import Exchange, GossipDataParallel, Network

pytestmark = pytest.mark.processes

NUM_STEPS = 60


def make(**options: Any) -> tuple[GossipDataParallel, torch.optim.Optimizer]:
    """Make a net of three chunks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 700), nn.ReLU(), nn.Linear(700, 900))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.98))
    return GossipDataParallel(net, optimizer, graph="complete", **options), optimizer


def step(model: GossipDataParallel, optimizer: torch.optim.Optimizer, scale: float) -> None:
    """On data that differ in size between workers, and so do their second moments."""
    optimizer.zero_grad()
    model(torch.randn(8, 16) * scale).square().mean().backward()
    optimizer.step()
    time.sleep(0.005)  # leaves the other workers time, as a GPU would


def moments(model: GossipDataParallel, optimizer: torch.optim.Optimizer) -> Tensor:
    parameters = model.module.parameters()
    return torch.cat([optimizer.state[each]["exp_avg_sq"].flatten() for each in parameters])


def train(choice: Any, options: dict[str, Any]) -> Any:
    """Train; return the moments at the end, parameters and statistics."""
    network = Network(**options.pop("network", {}))
    model, optimizer = make(
        exchange=Exchange(moments=choice, pace="strict"), network=network, **options
    )
    torch.manual_seed(model.rank)
    for _ in range(NUM_STEPS):
        step(model, optimizer, 1.0 + model.rank)
    model.consolidate()
    parameters = torch.cat([each.detach().flatten() for each in model.module.parameters()])
    return moments(model, optimizer), parameters, model.stats()


def spread(results: Any) -> float:
    """Return the standard deviation over workers as a share of their mean, over coordinates."""
    held = torch.stack([each for each, _, _ in results]).double()
    return float(held.std(dim=0).mean() / held.mean())


CASES = {
    "memory": {},
    "TCP": {"network": {"shared_memory": "off"}},
    "lattice8, gossip": {"wire_format": "lattice8", "method": "gossip"},
}


@pytest.fixture(scope="module")
def spread_alone(workers: Callable) -> float:
    """Return the spread of workers that exchange parameters, and no moments."""
    return spread(workers(train, 2, (False, {})))


@pytest.mark.parametrize("case", CASES)
def test_second_moments_of_workers_with_different_data_come_together(workers, spread_alone, case):
    results = workers(train, 2, ({"exp_avg_sq": 1}, CASES[case]))
    assert spread_alone > 0.5
    # In 60 steps of beta2 = 0.98 each worker's own data make 70% of what it would hold alone.
    assert spread(results) < 0.2 * spread_alone
    assert all((held >= 0).all() and held.isfinite().all() for held, _, _ in results)
    assert all(torch.equal(parameters, results[0][1]) for _, parameters, _ in results)
    assert sum(stats.exchanges_failed for _, _, stats in results) == 0


def test_seldom_exchanged_moments_cost_few_bytes(workers, spread_alone):
    results = workers(train, 2, ({"exp_avg_sq": 8}, {"network": {"shared_memory": "off"}}))
    num_floats = results[0][1].numel()
    num_bytes = sum(stats.bytes_sent for _, _, stats in results)
    exchanges = sum(stats.exchanges for _, _, stats in results)
    # One model each way, 1/8 more, the start parameters, the averages at the end, and messages.
    assert spread(results) < 0.6 * spread_alone
    assert num_bytes / (4 * num_floats) < 1.3 * exchanges + 10
