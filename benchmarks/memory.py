"""The memory that gossip takes, beside DistributedDataParallel's.

    python benchmarks/memory.py [--rounds 3]

Two workers train a ResNet-18 of 11.2M parameters, first alone, then wrapped; the difference of the
process's memory (PSS: pages shared with others count in parts) is what the wrapper holds. Wrapping
twice counts twice, so every row is a run of its own. The first row trains on without a wrapper: it
says how well this can be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from memory_worker import Added, MemoryTask, load_kernels, run_worker
from support.meeting import Meeting
from support.report import Missing, Report, Spread, Table, Target, interleaved

from gossipdp import launch

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

CONSTANT_MB = 16.0
"""Bytes that may come on top, whatever the model: a window of chunks, scratch, links, a thread."""


def measure(key: str) -> list[Added]:
    """One run of two workers."""
    _, arm, variables = ARMS[key]
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        Meeting.create(meeting, 2)
        return launch(
            run_worker,
            world_size=2,
            args=(MemoryTask(arm, meeting),),
            environment=variables,
            timeout_s=300.0,
        )


def summary(key: str, runs: list[list[Added]], drift: float) -> dict[str, Any]:
    """Return the figures of the table; drift: bytes that a process gains without a wrapper."""
    workers = [worker for run in runs for worker in run]
    parameters = workers[0].num_parameters
    counted = workers[0].memory.tensors
    if key == "ddp":
        counted += workers[0].bucket_bytes  # which no Python object holds
    own = [each.memory.pss - drift for each in workers]
    wanted = WANTED_BYTES.get(key)
    pss = Spread.of(value / 1e6 for value in own)
    return {
        "pss_mb": pss,
        "bytes_per_parameter": Spread.of(value / parameters for value in own),
        "rss_mb": Spread.of(each.memory.rss / 1e6 for each in workers),
        "private_mb": Spread.of(each.memory.private / 1e6 for each in workers),
        "tensors_mb": counted / 1e6,
        "tensor_bytes_per_parameter": counted / parameters,
        "wanted_mb": None if wanted is None else wanted * parameters / 1e6,
        "constant_mb": None if wanted is None else pss.median - wanted * parameters / 1e6,
        "num_parameters": parameters,
    }


def table(found: dict[str, dict[str, Any]]) -> Table:
    """One row a way to train."""
    rows = []
    for key, each in found.items():
        rows.append(
            (
                ARMS[key][0],
                each["pss_mb"].text(".1f"),
                each["bytes_per_parameter"].text(".2f"),
                f"{each['tensors_mb']:.1f}",
                f"{each['tensor_bytes_per_parameter']:.2f}",
                "" if each["wanted_mb"] is None else f"{each['wanted_mb']:.1f}",
                "" if each["constant_mb"] is None else f"{each['constant_mb']:.1f}",
            )
        )
    head = (
        "",
        "extra MB",
        "bytes a parameter",
        "tensors, MB",
        "bytes a parameter",
        "c + pending, MB",
        "the rest, MB",
    )
    return Table(
        "Extra memory of a process, ResNet-18 of 11.2M parameters, float32",
        head,
        rows,
        "Extra MB: PSS after wrapping and exchanging, less PSS before, less what the first row "
        "gained without a wrapper; medians over runs and workers, least and greatest. Tensors: "
        "storages that Python can reach, and DDP's buckets. Compiled kernels: LLVM, "
        "which loads them, is in the rest.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of each row")
    options = parser.parse_args()
    report = Report("memory", "How much memory does gossip take, beside DDP?", options.quick)
    keys = list(ARMS)
    if importlib.util.find_spec("numba") is None:
        keys.remove("a2cid2-numba")
        report.missing.append(Missing(ARMS["a2cid2-numba"][0], "numba is not installed"))
    else:
        launch(load_kernels, world_size=1)
    runs = interleaved(keys, 1 if options.quick else options.rounds, measure)
    drift = Spread.of(float(worker.memory.pss) for run in runs["plain"] for worker in run).median
    found = {key: summary(key, runs[key], 0.0 if key == "plain" else drift) for key in keys}
    report.tables.append(table(found))
    for key in ("a2cid2", "gossip"):
        title = f"{ARMS[key][0]}: MB beyond {'c and ' if key != 'gossip' else ''}pending"
        report.targets.append(Target(title, found[key]["constant_mb"], CONSTANT_MB))
    report.write({"rows": found, "runs": runs})


if __name__ == "__main__":
    main()
