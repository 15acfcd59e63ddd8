"""A worker process of memory.py: train, look at its memory, wrap, train, look."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.meeting import Meeting
from torch import Tensor, nn

from gossipdp import Counting, GossipDataParallel
from gossipdp_lab.baselines import leave
from gossipdp_lab.tasks.images import cifar_resnet18

NUM_STEPS_BEFORE, NUM_EXCHANGES, MOST_STEPS = 2, 4, 200
BATCH_SIZE = 2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class MemoryTask:
    """arm: ``plain``, ``a2cid2``, ``gossip``, ``ddp`` or ``ddp-bucket-view``."""

    arm: str
    meeting: Path


@dataclass(frozen=True)
class Memory:
    """Bytes of one process. tensors: of all storages that Python can reach."""

    pss: int
    rss: int
    private: int
    tensors: int

    def since(self, before: Memory) -> Memory:
        """Return the memory that was added."""
        return Memory(
            self.pss - before.pss,
            self.rss - before.rss,
            self.private - before.private,
            self.tensors - before.tensors,
        )


@dataclass(frozen=True)
class Added:
    """The measurements of one worker.

    bucket_bytes: of DDP's buckets, which Python cannot reach unless gradients are views of them.
    """

    memory: Memory
    bucket_bytes: int
    num_parameters: int
    num_buffer_values: int


def run_worker(task: MemoryTask) -> Added:
    """Return what wrapping and exchanging added to this process."""
    # Whatever is freed goes back to the kernel at once, so that a difference is what is held.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 64 << 10)
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meeting = Meeting(task.meeting, int(os.environ["RANK"]))
    net = cifar_resnet18()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    batch = torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(10, (BATCH_SIZE,))
    for _ in range(NUM_STEPS_BEFORE):
        _step(net, net, optimizer, batch)
    if task.arm.startswith("ddp"):
        dist.init_process_group("gloo")  # gloo's own memory is not DDP's
    before = look(libc, net)
    model, num_exchanges = _wrap(task.arm, net, optimizer)
    for step in range(MOST_STEPS):
        _step(model, net, optimizer, batch)
        meeting.say(num_exchanges())
        meeting.meet()
        if step >= NUM_STEPS_BEFORE and meeting.heard(0) >= NUM_EXCHANGES:
            break
        meeting.meet()  # nobody may say more before both have heard
    added = look(libc, net).since(before)
    bucket_bytes = _bucket_bytes(model)
    meeting.meet()
    if isinstance(model, GossipDataParallel):
        model.close()
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        leave()
    return Added(
        added,
        bucket_bytes,
        sum(parameter.numel() for parameter in net.parameters()),
        sum(buffer.numel() for buffer in net.buffers() if buffer.is_floating_point()),
    )


def _wrap(
    arm: str, net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Callable[[], int]]:
    """Return the model to train, and a function that counts its exchanges."""
    if arm in ("a2cid2", "gossip"):
        wrapped = GossipDataParallel(
            net, optimizer, method=arm, counting=Counting(samples_per_step=BATCH_SIZE)
        )  # type: ignore[arg-type]
        return wrapped, lambda: wrapped.stats().exchanges
    if arm.startswith("ddp"):
        net = nn.parallel.DistributedDataParallel(
            net, gradient_as_bucket_view=arm == "ddp-bucket-view"
        )
    return net, lambda: NUM_EXCHANGES


def _step(
    model: nn.Module, net: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    # Gradients stay in place, as buckets' views of them must.
    optimizer.zero_grad(set_to_none=False)
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def look(libc: Any, net: nn.Module) -> Memory:
    """Return the memory of this process now, after everything unused was given back."""
    gc.collect()
    libc.malloc_trim(0)
    sizes = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) << 10
    return Memory(
        sizes["Pss"],
        sizes["Rss"],
        sizes["Private_Dirty"] + sizes["Private_Clean"],
        _tensor_bytes(net),
    )


def _tensor_bytes(net: nn.Module) -> int:
    tensors: Iterable[Any] = (each for each in gc.get_objects() if _is_tensor(each))
    gradients = (p.grad for p in net.parameters() if p.grad is not None)
    storages = {}
    for tensor in (*tensors, *gradients):
        storage = tensor.untyped_storage()
        if storage.data_ptr():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _is_tensor(thing: object) -> bool:
    # type(), as isinstance() would call into proxies of all kinds.
    return issubclass(type(thing), Tensor) and thing.device.type == "cpu"  # type: ignore[attr-defined]


def load_kernels() -> None:
    """Compile the kernels, unless an earlier process has; what compiling takes is not held."""
    from gossipdp.dynamics.update import compile_loops

    compile_loops(torch.float32, torch.float32)


def _bucket_bytes(model: nn.Module) -> int:
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return 0
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return sum(int(size) for size in str(sizes).split(",") if size.strip())
