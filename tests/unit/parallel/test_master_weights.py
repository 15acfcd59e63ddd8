"""An optimizer that writes over what exchanges bring is found out; one that steps x is not."""

import pytest
import torch
from torch import nn

from gossipdp import GossipDataParallel
from gossipdp.errors import ModelChangedError


class WithMasters(torch.optim.SGD):
    """As in mixed precision: steps float32 copies, and writes them over the parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.state[parameter].setdefault("master", parameter.detach().float())
                master.sub_(parameter.grad.float(), alpha=group["lr"])
                with torch.no_grad():
                    parameter.copy_(master)


def train(make_optimizer, dtype: torch.dtype, steps: int = 40) -> None:
    """Single worker; what exchanges would bring is put into pending by hand."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64).to(dtype)
    optimizer = make_optimizer(net.parameters())
    model = GossipDataParallel(net, optimizer)
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 64, dtype=dtype)).square().mean().backward()
            for chunk in model._engine._state.chunks:
                chunk.pending.normal_(std=0.05)
                chunk.restored()
            optimizer.step()
    finally:
        model.close()


def test_master_weights_are_found_out():
    with pytest.raises(ModelChangedError, match="float32 master weights"):
        train(lambda parameters: WithMasters(parameters, lr=0.1), torch.bfloat16)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_steps_the_parameters_is_not(optimizer):
    train(lambda parameters: optimizer(parameters, lr=0.05), torch.bfloat16, steps=120)


def test_nobody_looks_at_float32():
    train(lambda parameters: WithMasters(parameters, lr=0.1), torch.float32)
