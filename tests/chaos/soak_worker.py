"""The training script of ``soak.py``: one worker, which keeps a diary of its steps.

It trains until there is a file ``end``, which holds how many workers are in the run then.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from known_average import consolidate_openly
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Checkpoints, GossipDataParallel, Network

DESCRIPTORS = 256
BATCH = 16
PASS_SAMPLES = 2048
STEPS_PER_CHECKPOINT = 400
PAUSE_S = 0.04


def make_net() -> nn.Module:
    layers = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(512, 10))


def batches(rank: int) -> Iterator[Tensor]:
    """Yield batches for ever; every fourth worker has a loader process of its own for each pass."""
    generator = torch.Generator().manual_seed(rank)
    data = TensorDataset(torch.randn(PASS_SAMPLES, 64, generator=generator))
    while True:
        for (inputs,) in DataLoader(data, BATCH, shuffle=True, num_workers=int(rank % 4 == 1)):
            yield inputs


def open_things() -> tuple[Counter[str], list[str]]:
    """Return the kinds of this process's descriptors and the names of its threads."""
    gc.collect()
    kinds = Counter[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of this look itself
            kinds[os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0]] += 1
    tasks = Path("/proc/self/task").iterdir()
    return kinds, sorted((task / "comm").read_text().strip() for task in tasks)


def main(directory: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    kinds, threads = open_things()
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    saving = Checkpoints(directory / "checkpoints", every_steps=STEPS_PER_CHECKPOINT)
    options = {"network": Network(start_timeout_s=300), "checkpoints": saving}
    model = GossipDataParallel(net, optimizer, graph="ring", **options)  # it has momentum
    name = f"{model.rank}-{os.getpid()}"
    asked = directory / f"asked-{model.rank}"
    has_exchanged = False
    stream = batches(model.rank)
    with (directory / f"diary-{name}").open("ab", buffering=0) as diary:
        for inputs in stream:
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
            optimizer.zero_grad()
            loss.backward()
            # Before the step: nobody ever hears of one that is not in the diary.
            diary.write(f"{time.monotonic():.3f}\n".encode())
            optimizer.step()
            time.sleep(PAUSE_S)
            if not has_exchanged and model.stats().exchanges:
                has_exchanged = True
                (directory / f"life-{name}").touch()
            if asked.exists():
                with model.averaged():
                    is_finite = all(bool(each.isfinite().all()) for each in net.parameters())
                assert is_finite
                asked.replace(directory / f"averaged-{name}-{time.monotonic():.0f}")
            if (directory / "end").exists():
                break
    del stream, inputs, loss  # what came from a loader's process holds a descriptor
    result = consolidate_openly(model, directory, int((directory / "end").read_text()))
    rank, stats = model.rank, model.stats()
    del model, optimizer
    kinds_left, threads_left = open_things()
    end = {
        "consolidated": asdict(result),
        "exchanges": stats.exchanges,
        "exchanges_failed": stats.exchanges_failed,
        "descriptors_left": dict(kinds_left - kinds),
        "threads_left": list((Counter(threads_left) - Counter(threads)).elements()),
    }
    (directory / f"ended-{rank}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
