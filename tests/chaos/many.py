"""``make many``: 64 real processes on whatever cores there are, once, whole, and what that takes.

    .venv/bin/python tests/chaos/many.py                     64 workers
    .venv/bin/python tests/chaos/many.py --workers 16

They start, train until each has exchanged, stand still, and consolidate. The average is the float64
mean of what they held. Workers are forked from a server that has imported torch once.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import cloudpickle
import known_average
import psutil
import torch
import waiting
from known_average import consolidate_what_is_kept, inputs_in, wrong_end, wrong_steps
from rich.console import Console
from rich.table import Table
from torch import nn

import gossipdp
from gossipdp import Consolidated, GossipDataParallel, Network, WorkerFailedError, launch

SCRIPT = "tests/chaos/many.py"
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
BATCH = 8
# Each worker's own memory, with a wide margin.
BYTES_PER_WORKER = 200 << 20


@dataclass(frozen=True)
class End:
    """One worker's report; times are in seconds, by the one clock of the machine."""

    rank: int
    joined_s: float
    exchanged_s: float
    all_exchanged_s: float
    stood_s: float
    ended_s: float
    steps: int
    exchanges: int
    memory_mb: float
    descriptors: int
    consolidated: Consolidated


def train(directory: Path, num_workers: int, timeout_s: float) -> End:
    """Train until all have exchanged, stand still, consolidate."""
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model = GossipDataParallel(
        net,
        optimizer,
        graph="exponential",
        network=Network(timeout_s=timeout_s, start_timeout_s=600),
    )
    joined_s = time.monotonic()
    exchanged_s = 0.0
    steps = 0
    generator = torch.Generator().manual_seed(model.rank)
    while len(list(directory.glob("exchanged-*"))) < num_workers:
        inputs = torch.randn(BATCH, 64, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if not exchanged_s and model.stats().exchanges:
            exchanged_s = time.monotonic()
            (directory / f"exchanged-{model.rank}").touch()
        time.sleep(0.05)
    all_exchanged_s = time.monotonic()
    own = psutil.Process()
    memory_mb = own.memory_full_info().pss / 2**20
    descriptors = own.num_fds()
    result = consolidate_what_is_kept(model, directory, num_workers)
    stood_s = max(path.stat().st_mtime for path in directory.glob("input-*.pt"))
    ended_s = time.monotonic()
    torch.save(model.state_dict(), directory / f"result-{model.rank}.pt")
    return End(
        rank=model.rank,
        joined_s=joined_s,
        exchanged_s=exchanged_s,
        all_exchanged_s=all_exchanged_s,
        stood_s=stood_s - time.time() + time.monotonic(),
        ended_s=ended_s,
        steps=steps,
        exchanges=model.stats().exchanges,
        memory_mb=memory_mb,
        descriptors=descriptors,
        consolidated=result,
    )


def problems_of(ends: list[End], directory: Path) -> list[str]:
    """Return what is wrong with the run's end."""
    results = {
        end.rank: torch.load(directory / f"result-{end.rank}.pt", weights_only=True) for end in ends
    }
    consolidated = {end.rank: end.consolidated for end in ends}
    problems = wrong_end(inputs_in(directory), results, consolidated, NAMES)
    diaries = {end.rank: [(end.steps, end.steps)] for end in ends}
    for end in ends:
        told = end.consolidated.gradient_steps_by_rank
        problems += [f"worker {end.rank} tells {line}" for line in wrong_steps(told, diaries)]
        if end.consolidated.samples != BATCH * sum(each.steps for each in ends):
            problems.append(f"worker {end.rank} tells {end.consolidated.samples} samples")
    return problems


def figures_of(ends: list[End], began_s: float, closed_s: float) -> dict[str, float]:
    """Return what it took; of times that of the last worker."""
    start_s = max(end.joined_s for end in ends)
    exchanged_s = max(end.all_exchanged_s for end in ends)
    stood_s = max(end.stood_s for end in ends)
    memory = [end.memory_mb for end in ends]
    return {
        "start, s": start_s - began_s,
        "until each has exchanged, s": exchanged_s - start_s,
        "until all stand still, s": stood_s - exchanged_s,
        "consolidate(), s": max(end.ended_s for end in ends) - stood_s,
        "from there to the last process's end, s": closed_s - max(end.ended_s for end in ends),
        "exchanges of a worker, mean": sum(end.exchanges for end in ends) / len(ends),
        "steps of a worker, mean": sum(end.steps for end in ends) / len(ends),
        "memory of a worker, mean, MB (PSS)": sum(memory) / len(ends),
        "memory of all, GB (PSS)": sum(memory) / 1024,
        "descriptors of a worker, most": float(max(end.descriptors for end in ends)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=64, help="how many")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of silence, as of Network")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for all of it")
    parser.add_argument("--results", type=Path, default=Path("runs/many.json"), help="JSON file")
    arguments = parser.parse_args()
    available, needed = psutil.virtual_memory().available, arguments.workers * BYTES_PER_WORKER
    if available < needed:
        print(
            f"{arguments.workers} workers take up to {needed >> 20} MB; {available >> 20} are free"
        )
        return 2
    for module in (known_average, waiting):  # they are on no worker's import path
        cloudpickle.register_pickle_by_value(module)
    os.environ["OMP_NUM_THREADS"] = "1"
    problems: list[str] = []
    figures: dict[str, float] = {}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        words = directory, arguments.workers, arguments.timeout_s
        try:
            ends = launch(train, arguments.workers, words, timeout_s=arguments.limit_s)
        except WorkerFailedError as error:
            problems.append(str(error))
        else:
            figures = figures_of(ends, began_s, time.monotonic())
            problems += problems_of(ends, directory)
    table = Table("what it took", title=f"{arguments.workers} workers, {os.cpu_count()} cores")
    table.add_column("", justify="right")
    for label, value in figures.items():
        table.add_row(label, f"{value:.1f}")
    Console().print(table)
    results: dict[str, Any] = {
        "command": f"python {SCRIPT} --workers {arguments.workers}",
        "version": gossipdp.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}",
        "load_average": os.getloadavg()[0],
        "timeout_s": arguments.timeout_s,
        "figures": figures,
        "workers": [asdict(end) for end in ends] if figures else [],
        "problems": problems,
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(problems)} problems; written to {arguments.results}")
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
