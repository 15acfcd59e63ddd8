"""Training loops that people write, on workers with unlike data: they mix, and end equal."""

import copy
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Exchange, GossipDataParallel

# One start runs most of the loops.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 40
BATCH = 16


def data_of(rank: int) -> TensorDataset:
    """Labels that follow another rule on each worker."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(64, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, 2 * rank : 2 * rank + 2].argmax(dim=1))


def loss_of(forward: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(forward(inputs), labels)


def wrap(net: nn.Module, optimizer: torch.optim.Optimizer, method: str) -> GossipDataParallel:
    """Exchanges at a rate of 4, waited for: the cores are few and the steps short."""
    return GossipDataParallel(
        net,
        optimizer,
        method=method,
        comm_rate=4.0,
        exchange=Exchange(pace="strict"),
        budget_samples=STEPS * BATCH * int(os.environ["WORLD_SIZE"]),
    )


def batches(model: GossipDataParallel) -> Iterator[Any]:
    loader = DataLoader(data_of(model.rank), batch_size=BATCH, shuffle=True)
    for batch in model.batches(loader):
        yield batch
        time.sleep(0.002)  # leaves the other worker time, as a GPU would


def make_net() -> nn.Sequential:
    torch.manual_seed(int(os.environ["RANK"]))
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as its best known implementation has it: by ``p.data =``."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float, **options: Any):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * group["rho"] / norm)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()

    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        self.first_step()
        self.zero_grad()
        with torch.enable_grad():
            closure()
        self.second_step()


def sam(method: str) -> tuple[nn.Module, GossipDataParallel]:
    net = make_net()
    optimizer = SAM(net.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    model = wrap(net, optimizer, method)
    for batch in batches(model):

        def closure(batch: Any = batch) -> None:
            loss_of(model, batch).backward()

        optimizer.zero_grad()
        optimizer.step(closure)
    return net, model


def lbfgs(method: str) -> tuple[nn.Module, GossipDataParallel]:
    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2, line_search_fn="strong_wolfe")
    model = wrap(net, optimizer, method)
    inputs, labels = data_of(model.rank).tensors
    for _ in batches(model):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, (inputs, labels))
            loss.backward()
            return loss

        optimizer.state.clear()  # curvature that was measured across an exchange makes it diverge
        optimizer.step(closure)
    return net, model


class Followed(nn.Module):
    """A network with its moving average, and with a copy that is renewed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.online = make_net()
        self.average = copy.deepcopy(self.online).requires_grad_(False)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def follow(self, step: int) -> None:
        for own, mean in zip(self.online.parameters(), self.average.parameters(), strict=True):
            mean.data.mul_(0.9).add_(own.data, alpha=0.1)
        if step % 10 == 0:
            self.target.load_state_dict(self.online.state_dict())

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.target(inputs)
        return self.online(inputs)


def followers(method: str) -> tuple[nn.Module, GossipDataParallel]:
    net = Followed()
    optimizer = torch.optim.AdamW(net.online.parameters(), lr=0.01)
    model = wrap(net, optimizer, method)
    is_shown = False
    for step, batch in enumerate(batches(model)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        net.follow(step)
        if step >= STEPS // 4 and model.rank == 0 and not is_shown:
            own = net.average[0].weight.clone()
            with model.averaged():  # shows the worker's own values just after an exchange
                is_shown = not torch.equal(net.average[0].weight, own)
            assert torch.equal(net.average[0].weight, own)
    assert is_shown or model.rank != 0
    return net, model


LOOPS = {each.__name__: each for each in (sam, lbfgs, followers)}


def run_loop(name: str, method: str) -> tuple[Tensor, Any, Any, float]:
    """Return the values of the average, the worker's counts, and the average's loss on all data."""
    net, model = LOOPS[name](method)
    stats, end = model.stats(), model.consolidate()
    values = torch.cat([value.double().flatten() for value in net.state_dict().values()])
    losses = [loss_of(net, data_of(rank).tensors) for rank in range(end.world_size)]
    return values, stats, end, float(torch.stack(losses).mean().detach())


def run_loops() -> dict[tuple[str, str], Any]:
    """Run every loop with and without exchanges, one after the other: one start serves all."""
    torch.set_num_threads(1)
    return {(name, way): run_loop(name, way) for name in LOOPS for way in ("gossip", "none")}


@pytest.fixture(scope="module")
def of_workers(workers: Callable) -> list[dict[tuple[str, str], Any]]:
    return workers(run_loops, 2, timeout_s=280)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_mixes_and_its_workers_end_equal(of_workers, name):
    values, stats, ends, losses = zip(*(each[name, "gossip"] for each in of_workers), strict=True)
    # 0.35 to 0.7 on the data of both; a run that diverges ends at thousands.
    assert max(losses) < 2.0, losses
    assert torch.equal(*values)
    assert torch.isfinite(values[0]).all()
    assert ends[0].samples >= STEPS * BATCH * 2
    # A target network has running means, which are exchanged: a load of them breaks off at most one
    # exchange, which both workers count.
    num_loads = sum(1 + each.gradient_steps // 10 for each in stats) if name == "followers" else 0
    assert sum(each.exchanges_failed for each in stats) <= 2 * num_loads
    # At rate 4 two workers meet four times a step of each.
    assert sum(each.exchanges_initiated for each in stats) > STEPS, stats
    apart = of_workers[0][name, "none"][2]
    assert ends[0].consensus_distance < apart.consensus_distance / 3
