"""Parameters on a GPU: the update beside the card's copies, and training with and without gossip.

    python benchmarks/gpu.py [--workers 2 4] [--rounds 5]

The update of an exchange, on the card alone and with the way of the snapshots through host memory;
then ResNet-18 on workers that share one card, in turns with and without exchanges. Where there is
no CUDA device it says so: both rows are missing. `--device cpu` runs the same script without one,
to see that it works; its figures say nothing of a card.

**Never run on a card so far.**
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.meeting import Meeting
from support.report import Missing, Report, Spread, Table, Target

from gossipdp import Counting, GossipDataParallel, launch
from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.device import ON, SWITCH
from gossipdp.dynamics.state import Segment, State
from gossipdp_lab.tasks.images import CIFAR_RESNET18_PARAMETERS, cifar_resnet18

ALPHA_TILDE = 1.3
COPY_SHARE = 0.8
# Read: both snapshots, pending, c; written: pending, c.
STREAMS_OF_AN_UPDATE, STREAMS_OF_A_COPY = 6, 2


def finish(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def median_ms(device: str, run: Callable[[], object], num_runs: int) -> float:
    """Return the median time of a run; the first run does not count."""
    times = []
    for _ in range(num_runs + 1):
        finish(device)
        started_s = time.perf_counter()
        run()
        finish(device)
        times.append(1e3 * (time.perf_counter() - started_s))
    return Spread.of(times[1:]).median


def measure_update(device: str, num_parameters: int, num_runs: int) -> dict[str, float]:
    """Milliseconds of a copy, of the update on the device alone, and of a whole exchange."""
    state = State([Segment(torch.randn(num_parameters, device=device), Role.TRAINED)])
    segment = state.segments[0]
    mine, peers, target = (torch.randn_like(segment.x) for _ in range(3))
    landed = [torch.randn(chunk.num_elements) for chunk in state.chunks]
    taken = [torch.empty(chunk.num_elements) for chunk in state.chunks]

    def on_the_device() -> None:
        for (chunk, one), (_, other) in zip(segment.split(mine), segment.split(peers), strict=True):
            update.exchange(chunk.pending, chunk.c, one, other, 0.05, 0.9, ALPHA_TILDE)

    def exchange() -> None:
        for chunk, out, other in zip(state.chunks, taken, landed, strict=True):
            chunk.snapshot(0.0, out)
            chunk.exchange(0.0, out, other, ALPHA_TILDE)

    def exchange_as_in_training() -> None:
        with state.device.gossip_thread():
            exchange()
        state.boundary(0.0, wait=True)

    copy_ms = median_ms(device, lambda: target.copy_(mine), num_runs)
    return {
        "copy_ms": copy_ms,
        "update_ms": median_ms(device, on_the_device, num_runs),
        "bound_ms": copy_ms * STREAMS_OF_AN_UPDATE / STREAMS_OF_A_COPY,
        "exchange_and_boundary_ms": median_ms(device, exchange_as_in_training, num_runs),
    }


@dataclass(frozen=True)
class Task:
    """Train in each worker: turns of ``turn_s`` without a wrapper and with one, by rounds."""

    device: str
    batch_size: int
    turn_s: float
    num_rounds: int
    meeting: Path


def run_worker(task: Task) -> dict[str, Any]:
    """Return each round's steps per second, without and with gossip, and the achieved comm rate."""
    rank = int(os.environ["RANK"])
    os.environ[SWITCH] = ON
    meeting = Meeting(task.meeting, rank)
    images = torch.randn(task.batch_size, 3, 32, 32, device=task.device)
    labels = torch.randint(10, (task.batch_size,), device=task.device)
    arms = {}
    for name in ("plain", "a2cid2"):
        net = cifar_resnet18().to(task.device)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
        wrapped = None
        if name == "a2cid2":
            wrapped = GossipDataParallel(
                net, optimizer, counting=Counting(samples_per_step=task.batch_size)
            )
        arms[name] = (wrapped or net, optimizer, wrapped)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(-1, task.num_rounds):  # the first warms up
        for name, (model, optimizer, _) in arms.items():
            finish(task.device)
            meeting.meet()
            started_s, num_steps = time.perf_counter(), 0
            while time.perf_counter() - started_s < task.turn_s:
                optimizer.zero_grad(set_to_none=True)
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                float(loss.detach())  # as a loop does that logs it
                num_steps += 1
            finish(task.device)
            if round_number >= 0:
                rates[name].append(num_steps / (time.perf_counter() - started_s))
    meeting.meet()
    gossip = arms["a2cid2"][2]
    assert gossip is not None
    stats = gossip.stats()
    meeting.meet()
    gossip.close()
    return {"rates": rates, "comm_rate": stats.achieved_comm_rate, "kernels": stats.kernels}


def measure_training(num_workers: int, task_options: dict[str, Any]) -> dict[str, Any]:
    """Return the steps per second over all workers, by round."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        Meeting.create(meeting, num_workers)
        task = Task(meeting=meeting, **task_options)
        found = launch(run_worker, world_size=num_workers, args=(task,), timeout_s=900.0)
    rates = {
        name: Spread.of(map(sum, zip(*(worker["rates"][name] for worker in found), strict=True)))
        for name in found[0]["rates"]
    }
    return {
        "steps_per_s": rates,
        "ratio": rates["a2cid2"].median / rates["plain"].median,
        "comm_rate": sum(worker["comm_rate"] for worker in found) / num_workers,
        "kernels": found[0]["kernels"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    options = parser.parse_args()
    is_trial = options.device == "cpu"
    name = "gpu_trial" if is_trial else "gpu"
    report = Report(name, "Parameters on a GPU", options.quick or is_trial)
    if not is_trial and not torch.cuda.is_available():
        why = "no CUDA device"
        report.missing += [
            Missing("update on a card, beside its copy bandwidth", why),
            Missing("ResNet-18 on workers that share a card", why),
        ]
        report.write({})
        return
    os.environ[SWITCH] = ON
    num_parameters = 300_000 if options.quick else CIFAR_RESNET18_PARAMETERS
    update = measure_update(options.device, num_parameters, options.rounds)
    card = "the CPU" if is_trial else torch.cuda.get_device_name()
    rows = [
        (key.removesuffix("_ms").replace("_", " "), f"{value:.2f}") for key, value in update.items()
    ]
    report.tables.append(Table(f"{num_parameters:,} parameters on {card}", ("", "ms"), rows))
    share = update["bound_ms"] / update["update_ms"]
    report.targets.append(Target("update, share of the copy bandwidth", share, COPY_SHARE, False))
    task_options = {
        "device": options.device,
        "batch_size": 4 if options.quick else options.batch_size,
        "turn_s": 0.5 if options.quick else 5.0,
        "num_rounds": 1 if options.quick else options.rounds,
    }
    training = {number: measure_training(number, task_options) for number in options.workers}
    report.tables.append(
        Table(
            f"ResNet-18 on {card}, batches of {task_options['batch_size']}, all workers together",
            ("workers", "steps/s, no wrapper", "steps/s, a2cid2", "ratio", "comm rate", "kernels"),
            [
                (
                    str(number),
                    each["steps_per_s"]["plain"].text(),
                    each["steps_per_s"]["a2cid2"].text(),
                    f"{each['ratio']:.3f}",
                    f"{each['comm_rate']:.2f}",
                    each["kernels"],
                )
                for number, each in training.items()
            ],
        )
    )
    report.write({"update": update, "training": training})


if __name__ == "__main__":
    main()
