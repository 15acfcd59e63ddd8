"""Replicas larger than one process: their shards, and the numbers that their processes share.

FSDP2 (``torch.distributed.fsdp.fully_shard``) gives each process of a replica one part of every
parameter. The processes of all replicas that hold the same part make a gossip network of their own:
its rank is the replica's number, its world size the number of replicas. So a replica is a worker to
every count, rate and graph, and each shard is exchanged alone, with the same shard of another
replica. Networks need not agree on partners or moments: the mean of x + c/2 is conserved value by
value, and each value mixes at the rate of the graph (benchmarks/NOTES.md).

The processes of a replica must agree where a loop ends, since FSDP's collectives wait for all of
them. So after each gradient step they add up a few numbers (:meth:`Replica.agree`). All answers to
a script (progress, budget, ``stop()``) come from these numbers: the same on all processes, at the
same step. If a process is gone, this sum fails at once, which ends the rest of its replica.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gossipdp.errors import PeerLostError
from gossipdp.launcher.environment import Environment
from gossipdp.parallel.options import Checkpoints, PathLike

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_dtensor(tensor: Tensor) -> "DTensor | None":
    """Return the tensor if it is a DTensor; import that module only if it might be one."""
    if type(tensor) in (Tensor, nn.Parameter):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """Return a tensor's values in this process: itself, or a DTensor's own part, not copied."""
    sharded = as_dtensor(tensor)
    if sharded is None:
        return tensor
    with torch.no_grad():  # with gradients it would be a node of the graph
        return sharded.to_local()


def as_sharded(like: Tensor, values: Tensor) -> Tensor:
    """Return ``values``, this process's part, as a tensor of the kind of ``like``, not copied."""
    sharded = as_dtensor(like)
    if sharded is None:
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def reshard(module: nn.Module) -> None:
    """Free gathered parameters: FSDP would use them again though the shards have changed."""
    if "torch.distributed.fsdp" not in sys.modules:
        return  # nothing is sharded by it
    from torch.distributed.fsdp import FSDPModule

    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


class Agreed(NamedTuple):
    """Facts that all processes of a replica share since its last gradient step.

    Attributes:
        samples: of that step, all processes together.
        others_samples: of the other replicas, as the first shard had heard.
        is_stopped: a worker has called ``stop()``.
        is_poisoned: a process of this replica holds NaN or infinity.
        is_ending: a process of this replica was asked to end (SIGTERM).
        is_lead: the first shard's network takes this replica for the lead.
    """

    samples: int = 0
    others_samples: int = 0
    is_stopped: bool = False
    is_poisoned: bool = False
    is_ending: bool = False
    is_lead: bool = False


class Replica:
    """The replica of this process: that process, or the processes that hold its shards.

    Main thread only. All processes of a replica make the same calls in the same order. Each call
    that shares numbers raises PeerLostError if another process of the replica is gone.

    Attributes:
        environment: this process in the network of its shard: ``rank`` is the replica's number,
            ``world_size`` the number of replicas.
    """

    def __init__(self, environment: Environment, group: dist.ProcessGroup | None = None) -> None:
        self.environment, self._group = environment, group

    @classmethod
    def of(cls, module: nn.Module, mesh: DeviceMesh | None, environment: Environment) -> "Replica":
        """Return the replica to which this process belongs.

        Args:
            module: sharded already, if at all.
            mesh: the dimension of replicas, where one ``torch.distributed`` world holds them all;
                None, or of size 1, where that world is one replica, or there is none.
        """
        reshard(module)
        ranks = _ranks_of(module)
        if not ranks:
            if mesh is not None or environment.num_shards > 1:
                what = "mesh=" if mesh is not None else "--nproc-per-replica"
                raise ValueError(
                    f"{what} is for a model whose parameters are sharded over processes, and no "
                    "parameter of this one is: call fully_shard(module) before you wrap it"
                )
            return cls(environment)
        if mesh is not None and (environment.num_shards == 1 or mesh.size() > 1):
            return cls._of_mesh(ranks, mesh, environment)
        if len(ranks) == 1 and environment.num_shards == 1:
            return cls(environment)
        if environment.num_shards == 1:
            raise ValueError(
                f"the model is sharded over {len(ranks)} processes, and nothing says which of them "
                "make a replica: start with `gossipdp run -n N --nproc-per-replica "
                f"{len(ranks)} train.py`, or shard over one dimension of a device mesh and give "
                "the other, as in mesh=mesh['replicate']"
            )
        if len(ranks) != environment.num_shards:
            raise ValueError(
                f"the model is sharded over {len(ranks)} processes, and a replica has "
                f"{environment.num_shards} (--nproc-per-replica): give both the same number"
            )
        return cls(environment, _group(ranks))

    @classmethod
    def _of_mesh(cls, ranks: list[int], mesh: DeviceMesh, environment: Environment) -> "Replica":
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise ValueError(
                f"mesh is {mesh!r}: give the one dimension of a device mesh along which the "
                "replicas lie, as in mesh['replicate']"
            )
        if environment.num_shards > 1 or environment.is_joining:
            raise ValueError(
                "with --nproc-per-replica, or when a worker is started again, torch.distributed "
                "holds one replica only: shard over all of its processes and leave out mesh="
            )
        if set(ranks) & set(mesh.mesh.flatten().tolist()) != {dist.get_rank()}:
            raise ValueError(
                "the model is sharded over the dimension that mesh= gives, or over no dimension of "
                "the same mesh: shard it over the other one, as in "
                "fully_shard(module, mesh=mesh['shard']) with mesh=mesh['replicate']"
            )
        environment = dataclasses.replace(
            environment,
            rank=mesh.get_local_rank(),
            world_size=mesh.size(),
            shard=ranks.index(dist.get_rank()),
            num_shards=len(ranks),
            agent_store=True,  # someone hosts it, since the mesh's world was made in it
        )
        return cls(environment, _group(ranks) if len(ranks) > 1 else None)

    @property
    def is_sharded(self) -> bool:
        return self._group is not None

    def own_files(self, saving: Checkpoints) -> Checkpoints:
        """Return where this process saves and resumes: with shards, in a directory of its own."""
        shard, num_shards = self.environment.shard, self.environment.num_shards

        def own_place(path: PathLike | None) -> PathLike | None:
            if path is None:
                return None
            sizes = (each.name.rpartition("-")[2] for each in Path(path).glob("shard-*-of-*"))
            others = {int(size) for size in sizes if size.isdecimal()} - {num_shards}
            if num_shards > 1 and any(Path(path).glob("worker-*")):
                others.add(1)
            if others:
                raise ValueError(
                    f"{str(path)!r} holds checkpoints of replicas of {min(others)} processes, and "
                    f"here a replica has {num_shards}: choose another directory. To go on with "
                    "another number of shards, load what torch.distributed.checkpoint saved "
                    "(docs/shards.md)"
                )
            return path if num_shards == 1 else Path(path) / f"shard-{shard}-of-{num_shards}"

        directory, resume = saving.directory, saving.resume
        own_resume = resume if resume == "auto" else own_place(resume)
        return dataclasses.replace(saving, directory=own_place(directory), resume=own_resume)

    def agree(self, own: Agreed) -> Agreed:
        """Add up the facts of all processes of the replica; ``own`` if there is only this one."""
        samples, others, is_stopped, is_poisoned, is_ending, is_lead = self.gather(*own)
        return Agreed(
            samples=int(sum(samples)),
            others_samples=int(others[0]),
            is_stopped=any(is_stopped),
            is_poisoned=any(is_poisoned),
            is_ending=any(is_ending),
            is_lead=bool(is_lead[0]),
        )

    def first_says(self, number: int) -> int:
        """Return the number of the replica's first process."""
        return int(next(self.gather(number))[0])

    def gather(self, *values: float) -> Iterator[tuple[float, ...]]:
        """Return each value as all processes of the replica give it, by shard."""
        if self._group is None:
            return ((value,) for value in values)
        size = self.environment.num_shards, len(values)
        rows = torch.zeros(size, dtype=torch.float64, device="cpu")
        rows[self.environment.shard] = rows.new_tensor(values)
        try:
            dist.all_reduce(rows, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(
                "another process of this replica has ended, so this one, which holds shard "
                f"{self.environment.shard}, cannot go on: look at the other's output "
                f"({str(error).splitlines()[0][:200]})"
            ) from error
        return (tuple(column) for column in rows.T.tolist())


def _group(ranks: list[int]) -> dist.ProcessGroup:
    """Make a CPU group for a replica's few numbers: gloo sees at once if a process is gone."""
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return group


def _ranks_of(module: nn.Module) -> list[int]:
    """Return the processes over which the module is sharded, this one included; [] if it is not.

    Raises:
        ValueError: several of them hold the same trained parameter: each exchanges its own part
            alone, so the copies would drift apart. Or something else than FSDP has split it.
    """
    named = [(name, as_dtensor(parameter)) for name, parameter in module.named_parameters()]
    sharded = {name: held for name, held in named if held is not None}
    meshes = {name: held.device_mesh for name, held in sharded.items()}
    ranks = sorted({rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()})
    if len(ranks) <= 1:
        return ranks
    from torch.distributed.fsdp import FSDPModule

    placements = {  # along the dimensions of several processes
        name: [
            each for size, each in zip(meshes[name].shape, held.placements, strict=True) if size > 1
        ]
        for name, held in sharded.items()
    }
    has_fsdp = any(isinstance(each, FSDPModule) for each in module.modules())
    splits = [sum(not each.is_replicate() for each in along) for along in placements.values()]
    if not has_fsdp or max(splits) > 1:
        raise ValueError(
            "the model's parameters are split by something else than fully_shard, such as tensor "
            "parallelism (parallelize_module): its processes train on the same samples and copy "
            "some parameters, and gossip between such replicas is not supported. Shard with "
            "fully_shard over one dimension of a device mesh, and leave out the other"
        )
    for name, parameter in module.named_parameters():
        is_split = name in meshes and meshes[name].size() == len(ranks)
        is_whole = any(
            each.is_replicate() or each.is_partial() for each in placements.get(name, ())
        )
        if parameter.requires_grad and (is_whole or not is_split):
            raise ValueError(
                f"parameter {name!r} is not split over all {len(ranks)} processes of the replica. "
                "Each process exchanges its own part alone, so copies would drift apart: shard the "
                "whole module with fully_shard, and give a dimension that only copies to mesh="
            )
    return ranks
