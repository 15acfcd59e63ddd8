"""What the processes of sharded replicas do in tests, and what each of them saw."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Checkpoints, GossipDataParallel
from gossipdp.parallel.flat_parameters import FlatParameters

NUM_STEPS = 12
ALPHA_TILDE = 0.8
BUDGET = 400
BATCH = 4


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
    """Two replicas train, and exchange after each step, in a fixed order; x and c at the end.

    Each replica sees the same batches, sharded or not: FSDP averages what its processes take.
    """
    replica, part = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")
    num_parts = mesh.size(1)
    net = make_net(replica, torch.float64)
    if is_sharded:
        shard(net, mesh["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    flat = FlatParameters(net, [optimizer], momentum=True)
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
    momenta = flat.named([segment.copy_momentum()[1] for segment in flat.state.segments])
    parameters = dict(net.named_parameters())
    gathered = [values(net)]
    for name in sorted(momenta):
        parameter = parameters[name].detach()
        if isinstance(parameter, DTensor):
            momentum = DTensor.from_local(
                momenta[name].contiguous(),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            gathered.append(momentum.full_tensor().flatten())
        else:
            gathered.append(momenta[name].flatten())
    return torch.cat(gathered)


@dataclass
class Seen:
    """What one process saw.

    Attributes:
        replica, num_replicas: ``rank`` and ``world_size``.
        steps, seed: gradient steps, and ``worker_seed``.
        exchanges: of its own shard.
        samples, num_averaged: as consolidated.
        values: all parameters after it.
        facts: whether what is named was so.
    """

    replica: int
    num_replicas: int
    steps: int
    seed: int
    exchanges: int = 0
    samples: int = 0
    num_averaged: int = 0
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    facts: dict[str, Any] = field(default_factory=dict)


def loader(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), BATCH)


def step(model: GossipDataParallel, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    inputs, targets = batch
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(mesh: DeviceMesh | None = None, directory: Path | None = None, **options: Any) -> Seen:
    """A run over gossip, from the wrapper to the consolidated model."""
    replica_mesh, shard_mesh = (None, None) if mesh is None else (mesh["replicate"], mesh["shard"])
    net = shard(make_net(dist.get_rank()), shard_mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    saving = Checkpoints() if directory is None else Checkpoints(directory / "run", every_steps=5)
    model = GossipDataParallel(
        net,
        optimizer,
        mesh=replica_mesh,
        budget_samples=BUDGET,
        pace="strict",
        comm_rate=2.0,
        exchange_moments={"exp_avg": 1, "exp_avg_sq": 2},
        checkpoints=saving,
        **options,
    )
    seen = Seen(model.rank, model.world_size, 0, model.worker_seed)
    for batch in model.batches(loader(model.worker_seed)):
        step(model, optimizer, batch)
        seen.steps += 1
        if seen.steps == 6:
            seen.facts |= look_at_average(model, net)
    seen.exchanges = model.stats().exchanges
    if directory is not None:
        group = None if shard_mesh is None else shard_mesh.get_group()
        state = {"model": model.state_dict()}
        place = directory / f"replica-{model.rank}"
        dcp.save(state, checkpoint_id=place, process_group=group)
        seen.facts["saved"] = torch.cat([whole(each).flatten() for each in state["model"].values()])
    end = model.consolidate()
    seen.samples, seen.num_averaged = end.samples, end.world_size
    seen.values = values(net)
    return seen


def look_at_average(model: GossipDataParallel, net: nn.Sequential) -> dict[str, bool]:
    """Within ``averaged()`` the forward pass is of other parameters, and after it of the own."""
    inputs = torch.ones(3, 6)

    def by_hand() -> Tensor:
        first, second = net[0], net[2]
        hidden = torch.tanh(inputs @ whole(first.weight).T + whole(first.bias))
        return hidden @ whole(second.weight).T + whole(second.bias)

    with torch.no_grad():
        for layer in (net[0], net[2], net):
            layer.reshard()  # type: ignore[operator]
        before = values(net)
        with model.averaged():
            within = values(net)
            forward, expected = net(inputs), None
            for layer in (net[0], net[2], net):
                layer.reshard()  # type: ignore[operator]
            expected = by_hand()
        after = values(net)
    return {
        "average differs": not torch.equal(within, before),
        "forward is of the average": torch.allclose(forward, expected, atol=1e-6),
        "own are back": torch.equal(after, before),
    }


def on_one_mesh(directory: Path) -> tuple[Tensor, Tensor, Seen, dict[str, Any]]:
    """Two replicas of two processes in one world; see the test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = exchanged_by_hand(mesh, is_sharded=True)
    plain = exchanged_by_hand(mesh, is_sharded=False)
    seen = train(mesh, directory)
    more = {"resharded": resharded(directory), **resumed(mesh, directory)}
    dist.barrier()
    dist.destroy_process_group()
    return sharded, plain, seen, more


def resharded(directory: Path) -> Tensor:
    """What replica 0 saved, loaded into shards over four processes."""
    net = shard(make_net(99), init_device_mesh("cpu", (4,)))
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=directory / "replica-0")
    net.load_state_dict(state["model"])
    return values(net)


def resumed(mesh: DeviceMesh, directory: Path) -> dict[str, Any]:
    """Go on from checkpoints of which one process lacks its newest."""
    if dist.get_rank() == 1:
        files = sorted((directory / "run" / "shard-1-of-2" / "worker-0").iterdir())
        files[-1].unlink()
    dist.barrier()
    net = shard(make_net(99), mesh["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    model = GossipDataParallel(
        net,
        optimizer,
        mesh=mesh["replicate"],
        budget_samples=BUDGET,
        checkpoints=Checkpoints(directory / "run", resume="auto"),
    )
    steps, state = model._engine.step_number, optimizer.state_dict()["state"]
    kinds = {type(each["exp_avg"]).__name__ for each in state.values()}
    model.close()
    return {"resumed from": steps, "moments": kinds}


# Deaths.


def dying_replica(directory: Path, num_deaths: int, results: Path | None = None) -> Seen:
    """Two replicas of two processes, each a world of its own; a process of replica 1 is killed.

    As often as ``num_deaths``; into ``results`` goes what each process ended with.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = shard(make_net(dist.get_rank()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    model = GossipDataParallel(net, optimizer, budget_samples=2 * BUDGET)
    seen = Seen(model.rank, model.world_size, 0, model.worker_seed)
    life = int(os.environ.get("GOSSIPDP_RESTARTS", "0"))
    seen.facts["life"] = life
    for batch in model.batches(loader(model.worker_seed)):
        step(model, optimizer, batch)
        seen.steps += 1
        if (model.rank, dist.get_rank(), seen.steps) == (1, 1, 10) and life < num_deaths:
            (directory / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        # The other replica trains slowly, so that the run lasts.
        time.sleep(0.02)
    seen.exchanges = model.stats().exchanges
    seen.facts["noticed"] = [notice.kind for notice in model.stats().noticed]
    end = model.consolidate()
    seen.samples, seen.num_averaged = end.samples, end.world_size
    seen.values = values(net)
    if results is not None:
        ended = {
            "values": seen.values,
            "samples": seen.samples,
            "num_averaged": seen.num_averaged,
        }
        torch.save(ended, results / f"{seen.replica}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()
    return seen


def three_by_two() -> Seen:
    """Three replicas of two processes, each a world of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = train()
    dist.barrier()
    dist.destroy_process_group()
    return seen
