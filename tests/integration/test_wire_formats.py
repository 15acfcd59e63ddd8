"""Wire formats between real processes, in shared memory and over TCP."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from gossipdp import Exchange, GossipDataParallel, Network

pytestmark = pytest.mark.processes


def train(wire_format: str, options: dict[str, Any]) -> Any:
    """Train a net of three chunks and BatchNorm, from different data on each worker."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 700), nn.BatchNorm1d(700), nn.ReLU(), nn.Linear(700, 900))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = GossipDataParallel(
        net,
        optimizer,
        wire_format=wire_format,
        exchange=Exchange(pace="strict"),
        network=Network(**options),
    )
    torch.manual_seed(model.rank)
    for _ in range(50):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)  # leaves the other workers time, as a GPU would
    stats = model.stats()
    consolidated = model.consolidate()
    return torch.cat([value.flatten() for value in net.state_dict().values()]), stats, consolidated


@pytest.mark.parametrize(
    ("num_workers", "options"), [(2, {}), (4, {"max_bytes_per_s": 4e9})], ids=["memory", "TCP"]
)
def test_a_code_of_8_bits_trains_real_workers(workers, num_workers, options):
    results = workers(train, num_workers, ("lattice8", options))
    ends, stats, outcomes = zip(*results, strict=True)
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert torch.isfinite(ends[0]).all()
    assert len({outcome.consensus_distance for outcome in outcomes}) == 1
    assert sum(each.exchanges_failed for each in stats) == 0
    assert sum(each.exchanges for each in stats) >= 10
    # The first exchange of two workers finds out how far apart they are.
    repeated = sum(each.chunks_repeated for each in stats)
    assert 0 < repeated < 0.5 * sum(each.chunks_exchanged for each in stats)
