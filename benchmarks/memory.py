"""The memory that gossip takes, beside DistributedDataParallel's.

    python benchmarks/memory.py [--rounds 3]

Four workers on a ring (on a complete graph A2CiD2 would be plain gossip, without a momentum) train
a ResNet-18 of 11.2M parameters, first alone, then wrapped. The difference of the process's memory
(PSS: pages shared with others count in parts) is what the wrapper holds. Every row is a run of its
own. The first trains on without a wrapper: it says how well this can be measured.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from support.meeting import Meeting
from support.report import Report, Spread, Table, asked, interleaved
from torch import Tensor, nn

from gossipdp import Counting, GossipDataParallel, launch
from gossipdp.dynamics.update import compile_loops
from gossipdp.protocol.worker import Method
from gossipdp_lab.baselines import leave
from gossipdp_lab.tasks.resnet import cifar_resnet18

NUM_STEPS_BEFORE, NUM_EXCHANGES, MOST_STEPS = 2, 4, 200
NUM_WORKERS, BATCH_SIZE = 4, 2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


ARMS: dict[str, tuple[str, str, dict[str, str]]] = {
    "plain": ("no wrapper", "plain", {}),
    "a2cid2": ("gossipdp, a2cid2", "a2cid2", {"GOSSIPDP_KERNELS": "torch"}),
    "gossip": ("gossipdp, gossip", "gossip", {"GOSSIPDP_KERNELS": "torch"}),
    "a2cid2-numba": ("gossipdp, a2cid2, compiled kernels", "a2cid2", {"GOSSIPDP_KERNELS": "numba"}),
    "ddp": ("DDP (gloo)", "ddp", {}),
    "ddp-bucket-view": ("DDP (gloo), gradient_as_bucket_view", "ddp-bucket-view", {}),
}
"""By key: the row's name, what runs, and variables of the workers."""

WANTED_BYTES = {"a2cid2": 8.0, "gossip": 4.0, "a2cid2-numba": 8.0}
"""A parameter: c and pending, 4 bytes each; plain averaging has no c."""


def run_worker(arm: str, meeting_path: Path) -> tuple[int, int]:
    """Return the bytes that wrapping and exchanging added to this process, and the parameters."""
    # Whatever is freed goes back to the kernel at once, so that a difference is what is held.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 64 << 10)
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meeting = Meeting(meeting_path, int(os.environ["RANK"]))
    net = cifar_resnet18()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    batch = torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(10, (BATCH_SIZE,))
    for _ in range(NUM_STEPS_BEFORE):
        _step(net, net, optimizer, batch)
    if arm.startswith("ddp"):
        dist.init_process_group("gloo")  # gloo's own memory is not DDP's
    before = pss(libc)
    model, num_exchanges = _wrap(arm, net, optimizer)
    for step in range(MOST_STEPS):
        _step(model, net, optimizer, batch)
        meeting.say(num_exchanges())
        meeting.meet()
        if step >= NUM_STEPS_BEFORE and meeting.heard(0) >= NUM_EXCHANGES:
            break
        meeting.meet()  # nobody may say more before both have heard
    added = pss(libc) - before
    meeting.meet()
    if isinstance(model, GossipDataParallel):
        model.close()
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        leave()
    return added, sum(each.numel() for each in net.parameters())


def _wrap(
    arm: str, net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Callable[[], int]]:
    """Return the model to train, and a function that counts its exchanges."""
    if arm in ("a2cid2", "gossip"):
        wrapped = GossipDataParallel(
            net,
            optimizer,
            method=cast(Method, arm),
            graph="ring",
            counting=Counting(samples_per_step=BATCH_SIZE),
        )
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


def pss(libc: Any) -> int:
    """Return the memory of this process now, after everything unused was given back."""
    gc.collect()
    libc.malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes << 10


def measure(key: str) -> list[tuple[int, int]]:
    _, arm, variables = ARMS[key]
    with tempfile.TemporaryDirectory() as folder:
        Meeting.create(meeting := Path(folder) / "meeting", NUM_WORKERS)
        return launch(
            run_worker, NUM_WORKERS, (arm, meeting), environment=variables, timeout_s=300.0
        )


def summary(key: str, runs: list[list[tuple[int, int]]], drift: float) -> dict[str, Any]:
    """Return the figures of the table; drift: bytes that a process gains without a wrapper."""
    own = [added - drift for run in runs for added, _ in run]
    parameters = runs[0][0][1]
    extra_mb = Spread.of(value / 1e6 for value in own)
    wanted_mb = WANTED_BYTES.get(key, math.nan) * parameters / 1e6
    return {
        "pss_mb": extra_mb,
        "bytes_per_parameter": Spread.of(value / parameters for value in own),
        "wanted_mb": wanted_mb,
        "constant_mb": extra_mb.median - wanted_mb,
        "num_parameters": parameters,
    }


def table(found: dict[str, dict[str, Any]]) -> Table:
    rows = [
        (
            ARMS[key][0],
            each["pss_mb"].text(".1f"),
            each["bytes_per_parameter"].text(".2f"),
            f"{each['wanted_mb']:.1f}" if key in WANTED_BYTES else "",
            f"{each['constant_mb']:.1f}" if key in WANTED_BYTES else "",
        )
        for key, each in found.items()
    ]
    return Table(
        "Extra memory of a process, ResNet-18 of 11.2M parameters, float32",
        ("", "extra MB", "bytes a parameter", "c + pending, MB", "the rest, MB"),
        rows,
        "Extra MB: PSS after wrapping and exchanging, less PSS before, less what the first row "
        "gained without a wrapper; medians over runs and workers, least and greatest. Compiled "
        "kernels: LLVM, which loads them, is in the rest.",
    )


def main() -> None:
    quick, rounds = asked(__doc__, rounds=3)
    report = Report("memory", "How much memory does gossip take, beside DDP?", quick)
    # What compiling takes is not held.
    launch(compile_loops, 1, (torch.float32, torch.float32))
    runs = interleaved(list(ARMS), rounds, measure)
    drift = Spread.of(float(added) for run in runs["plain"] for added, _ in run).median
    found = {key: summary(key, runs[key], 0.0 if key == "plain" else drift) for key in ARMS}
    report.tables.append(table(found))
    report.write({"rows": found, "runs": runs})


if __name__ == "__main__":
    main()
