"""Programs of sharded replicas' processes in tests, and what each process saw."""

import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from run_processes import wait_until_gone
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Checkpoints, Exchange, GossipDataParallel, PoisonedError
from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.parallel.views import views_of

NUM_STEPS = 12
ALPHA_TILDE = 0.8
BUDGET, BATCH = 400, 4
ENDLESS = 10**9


def make_net(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Over two processes its shards are uneven, and one process has none of the last bias."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def shard(net: nn.Sequential, mesh: DeviceMesh | None = None) -> nn.Sequential:
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(net: nn.Module) -> Tensor:
    """All parameters, gathered; a collective of the replica."""
    return torch.cat([whole(parameter.detach()).flatten() for parameter in net.parameters()])


def exchanged_by_hand(mesh: DeviceMesh, *, is_sharded: bool) -> Tensor:
    """Return x after steps and exchanges of two replicas in a fixed order, and a flow from c."""
    replica, part = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")
    num_parts = mesh.size(1)
    net = make_net(replica, torch.float64)
    if is_sharded:
        shard(net, mesh["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    flat = FlatParameters(net, [optimizer], views_of(net, [optimizer]), momentum=True)
    partners = mesh["replicate"].get_group()
    data = torch.Generator().manual_seed(10 + replica)
    for step in range(NUM_STEPS):
        batch = torch.randn(2 * num_parts, 6, dtype=torch.float64, generator=data)
        own = batch.chunk(num_parts)[part] if is_sharded else batch
        net(own).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        theta = 0.3 * step
        flat.check()
        flat.state.boundary(theta)
        for chunk in flat.state.chunks:
            mine = torch.empty_like(chunk.x)
            assert chunk.snapshot(theta, mine)
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine, group=partners)
            chunk.exchange(theta, mine, both[1 - replica], ALPHA_TILDE)
    flat.state.boundary(theta + 0.3)
    return values(net)


@dataclass
class Seen:
    """The observations of one process; ``facts``: whether what is named was so."""

    replica: int
    num_replicas: int
    steps: int
    seed: int
    exchanges: int = 0  # of its own shard
    samples: int = 0
    num_averaged: int = 0
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    facts: dict[str, Any] = field(default_factory=dict)

    def at_the_end(self, model: GossipDataParallel, net: nn.Module) -> Self:
        end = model.consolidate()
        self.samples, self.num_averaged, self.values = end.samples, end.world_size, values(net)
        return self


def loader(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), BATCH)


def step(model: GossipDataParallel, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    inputs, targets = batch
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrapped(
    seed: int, mesh: DeviceMesh | None = None, *, lr: float = 0.02, **options: Any
) -> tuple[GossipDataParallel, nn.Sequential, torch.optim.Optimizer]:
    """Shard a net over the replica's processes, and wrap it."""
    replica_mesh, shard_mesh = (None, None) if mesh is None else (mesh["replicate"], mesh["shard"])
    net = shard(make_net(seed), shard_mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    return GossipDataParallel(net, optimizer, mesh=replica_mesh, **options), net, optimizer


def train(mesh: DeviceMesh, directory: Path, save: str) -> Seen:
    """Run over gossip, from the wrapper to the consolidated model; ``save`` is a program."""
    exchange = Exchange(pace="strict", moments={"exp_avg": 1, "exp_avg_sq": 2})
    rank, saving = dist.get_rank(), Checkpoints(directory / "run", every_steps=5)
    model, net, optimizer = wrapped(
        rank, mesh, exchange=exchange, comm_rate=2.0, budget_samples=BUDGET, checkpoints=saving
    )
    seen = Seen(model.rank, model.world_size, 0, model.worker_seed)
    for batch in model.batches(loader(model.worker_seed)):
        step(model, optimizer, batch)
        seen.steps += 1
        if seen.steps == 6:
            look_at_average(model, net)
    seen.exchanges = model.stats().exchanges
    names: dict[str, Any] = {"model": model, "net": net, "optimizer": optimizer, "mesh": mesh}
    exec(save, names)
    seen.facts["saved"] = tensors_of(names["state"])
    return seen.at_the_end(model, net)


def look_at_average(model: GossipDataParallel, net: nn.Sequential) -> None:
    """Assert that within ``averaged()`` the forward pass is of it, and after it of the own."""
    inputs, (first, _, second) = torch.ones(3, 6), net

    def reshard() -> None:
        for layer in (first, second, net):
            layer.reshard()  # type: ignore[operator]

    with torch.no_grad():
        reshard()
        before = values(net)
        with model.averaged():
            forward = net(inputs)
            reshard()
            hidden = torch.tanh(inputs @ whole(first.weight).T + whole(first.bias))
            expected = hidden @ whole(second.weight).T + whole(second.bias)
        torch.testing.assert_close(forward, expected)
        assert torch.equal(values(net), before)


def tensors_of(state: Any) -> Tensor:
    """All tensors of a nested state, gathered, one after the other by the names of their places."""
    if isinstance(state, Tensor):
        return whole(state).flatten().float()
    if not isinstance(state, dict):
        return torch.empty(0)
    return torch.cat([torch.empty(0), *(tensors_of(state[name]) for name in sorted(state))])


def on_one_mesh(directory: Path, save: str, load: str) -> tuple[Tensor, Tensor, Seen]:
    """Two replicas of two processes in one world; ``save`` and ``load`` are of docs/shards.md."""
    torch.set_num_threads(1)
    os.chdir(directory)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = exchanged_by_hand(mesh, is_sharded=True)
    plain = exchanged_by_hand(mesh, is_sharded=False)
    seen = train(mesh, directory, save)
    seen.facts |= {"loaded": loaded(load), "resumed from": resumed(mesh, directory)}
    seen.facts |= {"stopped after": averaged_and_stopped(mesh)} | poisoned(mesh)
    dist.barrier()
    dist.destroy_process_group()
    return sharded, plain, seen


def loaded(load: str) -> tuple[Tensor, Tensor]:
    """Load a replica's checkpoint into shards over four processes, which train on as one."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    net = shard(make_net(99), mesh["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    names: dict[str, Any] = {"net": net, "optimizer": optimizer, "mesh": mesh}
    exec(load, names)
    state, held = optimizer.state_dict()["state"], dict(net.named_parameters())
    by_name = dict(zip(held, (state[index] for index in sorted(state)), strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.02]
    everything = tensors_of({"model": net.state_dict(), "optimizer": {"state": by_name}})
    parameters = values(net)
    model = GossipDataParallel(net, optimizer, mesh=mesh["replicate"])
    step(model, optimizer, next(iter(loader(model.worker_seed))))
    model.close()
    return everything, parameters


def resumed(mesh: DeviceMesh, directory: Path) -> int:
    """Go on from checkpoints of which one process lacks its newest."""
    if dist.get_rank() == 1:
        files = sorted((directory / "run" / "shard-1-of-2" / "worker-0").iterdir())
        files[-1].unlink()
    dist.barrier()
    saving = Checkpoints(directory / "run", resume="auto")
    model, _, optimizer = wrapped(99, mesh, budget_samples=BUDGET, checkpoints=saving)
    steps, state = model._worker.step_number, optimizer.state_dict()["state"]
    assert all(isinstance(each["exp_avg"], DTensor) for each in state.values())
    model.close()
    return steps


def averaged_and_stopped(mesh: DeviceMesh) -> int:
    """Replicas that do not exchange, so their average is known; then one process stops the run."""
    rank = dist.get_rank()
    model, net, optimizer = wrapped(rank, mesh, budget_samples=ENDLESS, comm_rate=1e-6)
    num_steps = 0
    for batch in model.batches(loader(model.worker_seed)):
        step(model, optimizer, batch)
        num_steps += 1
        if num_steps == 4:
            look_at_averages(model, net, mesh["replicate"].get_group())
        if (rank, num_steps) == (3, 6):
            model.stop()
    assert model.consolidate().world_size == 2
    return num_steps


def look_at_averages(
    model: GossipDataParallel, net: nn.Module, partners: dist.ProcessGroup
) -> None:
    """Assert that all that the wrapper gives as the average is the mean over the replicas."""
    own, names = values(net), [name for name, _ in net.named_parameters()]
    mean = own.clone()
    dist.all_reduce(mean, group=partners)
    mean /= 2
    assert (own - mean).norm() > 0.01
    with model.averaged():
        within, state = values(net), model.state_dict()
        torch.testing.assert_close(within, mean)
        parts = [whole(state[name].detach()).flatten() for name in names]
        assert torch.equal(torch.cat(parts), within)
    dist.barrier()  # nobody steps while another averages
    path = Path(f"averaged-{model.rank}.pt")
    model.save_averaged(path)
    dist.barrier()
    saved = torch.load(path, weights_only=True)
    torch.testing.assert_close(torch.cat([saved[name].flatten() for name in names]), mean)


def poisoned(mesh: DeviceMesh) -> dict[str, Any]:
    """Give one process of replica 1 a batch of NaN, which poisons the replica's parameters."""
    rank, num_steps = dist.get_rank(), 0
    strict = Exchange(pace="strict")
    model, net, optimizer = wrapped(
        rank, mesh, exchange=strict, comm_rate=2.0, budget_samples=BUDGET // 2
    )
    try:
        for inputs, targets in model.batches(loader(model.worker_seed)):
            factor = math.nan if (rank, num_steps) == (3, 5) else 1.0
            step(model, optimizer, (factor * inputs, targets))
            num_steps += 1
        assert model.consolidate().world_size == 1
    except PoisonedError:
        model.close()
        return {"poisoned at": num_steps}
    return {"healthy values": values(net)}


def until_asked(directory: Path) -> None:
    """Train until SIGTERM comes; one process is not done saving before its replica's other ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shard_number = dist.get_rank()
    saving = Checkpoints(directory / "run")
    model, _, optimizer = wrapped(shard_number, budget_samples=ENDLESS, checkpoints=saving)
    if (model.rank, shard_number) == (0, 1):
        model.also_checkpoint(slow=SlowToSave(directory / "0.0"))
    for number, batch in enumerate(model.batches(loader(model.worker_seed))):
        step(model, optimizer, batch)
        if number == 3:
            unfinished = directory / f"{model.rank}.{shard_number}.unfinished"
            unfinished.write_text(str(os.getpid()))
            unfinished.rename(directory / f"{model.rank}.{shard_number}")


@dataclass
class SlowToSave:
    """Is saved when a process has ended, whose number is in a file."""

    path: Path

    def state_dict(self) -> dict[str, Any]:
        if self.path.exists():  # not yet where it is named
            wait_until_gone([int(self.path.read_text())])
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def dying_replica() -> Seen:
    """Let a process of replica 1 be killed once both train; come back, it stops after 20 steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, net, optimizer = wrapped(dist.get_rank(), budget_samples=ENDLESS)
    seen = Seen(model.rank, model.world_size, 0, model.worker_seed)
    life = int(os.environ.get("GOSSIPDP_RESTARTS", "0"))
    seen.facts |= {"life": life, "began after": model._worker.step_number}
    for batch in model.batches(loader(model.worker_seed)):
        step(model, optimizer, batch)
        seen.steps += 1
        if (model.rank, dist.get_rank()) == (1, 1):
            do_others_train = model._worker.total_samples() > model.stats().samples
            if life == 0 and seen.steps >= 10 and do_others_train:
                os.kill(os.getpid(), signal.SIGKILL)
            if life == 1 and seen.steps == 20:
                model.stop()
        # They train slowly, so that the run lasts.
        time.sleep(0.02)
    seen.exchanges = model.stats().exchanges
    seen.facts["noticed"] = [notice.kind for notice in model.stats().noticed]
    seen.at_the_end(model, net)
    dist.barrier()
    dist.destroy_process_group()
    return seen
