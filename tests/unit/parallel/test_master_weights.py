"""An optimizer that writes over what exchanges bring is found out; one that steps x is not."""

import pytest
import torch
from torch import nn

from gossipdp import GossipDataParallel, OuterStep
from gossipdp.dynamics.chunks import Role, Segment, State
from gossipdp.errors import ModelChangedError
from gossipdp.parallel.flat_parameters import MasterWeights


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


@pytest.mark.parametrize(
    ("outer", "num_steps"),
    [(OuterStep(0.0, 0.5, 1), 2), (OuterStep(0.0, 0.7, 1), 3), (OuterStep(0.5, 0.3, 1), 2)],
)
def test_nor_is_an_outer_step_that_slows_down(outer: OuterStep, num_steps: int) -> None:
    """It takes back a share of the last steps, and so resembles the opposite of the next."""
    torch.manual_seed(0)
    segment = Segment(
        torch.zeros(4096, dtype=torch.bfloat16), Role.TRAINED, momentum=False, outer=outer
    )
    state = State([segment])
    (chunk,) = state.chunks
    watch = MasterWeights(state)
    gradient = 0.01 * torch.randn(4096)
    for step in range(200):
        segment.x.sub_((gradient + 0.005 * torch.randn(4096)).bfloat16())
        watch.stepped(0)
        state.boundary(0.0)
        watch.bounded(0)
        if step % num_steps == 0:
            chunk.outer_step()
            out = torch.empty_like(segment.x)
            assert chunk.snapshot(0.0, out)
            chunk.exchange(0.0, out, out.clone(), 0.5)  # the peer has come as far


def test_nobody_looks_at_float32():
    train(lambda parameters: WithMasters(parameters, lr=0.1), torch.float32)
