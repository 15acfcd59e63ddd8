"""Under Accelerate, on one worker."""

from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")

from gossipdp.integrations.accelerate import gossip_data_parallel  # noqa: E402


def train(wrapped: bool, **arguments: Any) -> tuple[dict[str, torch.Tensor], Any]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **arguments)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=8, shuffle=True)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    model = net
    if wrapped:
        model = gossip_data_parallel(accelerator, net, optimizer)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(model(batch).square().mean())
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    stats = None
    if wrapped:
        model.consolidate()
        stats = model.stats()
    return net.state_dict(), stats


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [({}, 10), ({"gradient_accumulation_steps": 2}, 6), ({"mixed_precision": "bf16"}, 10)],
)
def test_one_worker_is_the_loop_alone(arguments: dict[str, Any], steps: int) -> None:
    alone, _ = train(False, **arguments)
    with_us, stats = train(True, **arguments)
    assert all(torch.equal(alone[name], with_us[name]) for name in alone)
    assert (stats.gradient_steps, stats.samples) == (steps, 80)
