"""The cost of fewer bytes: each wire format trains the digits on four real workers.

A ring of four workers, no two with the same images, so that the loss on all images depends on what
they exchange. The links are TCP (a cap that nothing reaches keeps them from sharing memory), so
what is counted has crossed a socket. Formats take turns within each seed. Per format: loss and
accuracy of the final average, bytes at the socket for each exchange, repeats in bfloat16, CPU time
of the gossip threads. Writes benchmarks/results/wire_formats.{json,md}.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.report import Missing, Report, Table, Target, interleaved

FORMATS = ("full", "bfloat16", "lattice8")


@dataclass(frozen=True)
class Run:
    """One run; sums over its workers, from the first gradient step to the last."""

    wire_format: str
    training_loss: float
    test_accuracy: float
    consensus_distance: float
    edge_distance: float
    exchanges: int
    bytes_sent: int
    chunks_repeated: int
    gossip_cpu_s: float
    seconds: float

    @property
    def bytes_per_exchange(self) -> float:
        """Bytes that one worker sends in one exchange; an exchange has two workers."""
        return self.bytes_sent / self.exchanges


def work(wire_format: str, samples: int, seed: int, pause_s: float) -> dict[str, Any]:
    """Train in one worker process."""
    import torch

    from gossipdp import GossipDataParallel, Network
    from gossipdp_lab.tasks.digits import Digits
    from gossipdp_lab.tasks.workload import learning_rate_factor

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    workload = Digits(disjoint=True)
    net = workload.make_model()
    optimizer = workload.make_optimizer(net)
    model = GossipDataParallel(
        net,
        optimizer,
        graph="ring",
        comm_rate=1,
        budget_samples=samples,
        seed=seed,
        wire_format=wire_format,  # type: ignore[arg-type]
        network=Network(shared_memory="off"),
    )
    loader = workload.train_loader(model.rank, model.world_size, seed)
    peaks = [group["lr"] for group in optimizer.param_groups]
    (gossip,) = (t for t in threading.enumerate() if t.name.startswith("gossipdp-"))
    before, cpu_before_s, started_s = model.stats(), cpu_s(gossip), time.perf_counter()
    for batch in model.batches(loader):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor(model.progress())
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        time.sleep(pause_s)
    after, cpu_after_s, ended_s = model.stats(), cpu_s(gossip), time.perf_counter()
    consolidated = model.consolidate()
    return {
        "training_loss": workload.training_loss(net),
        "test_accuracy": workload.evaluate(net),
        "consensus_distance": consolidated.consensus_distance,
        "edge_distance": after.edge_distance,
        "exchanges": after.exchanges - before.exchanges,
        "bytes_sent": after.bytes_sent - before.bytes_sent,
        "chunks_repeated": after.chunks_repeated - before.chunks_repeated,
        "gossip_cpu_s": cpu_after_s - cpu_before_s,
        "seconds": ended_s - started_s,
    }


def cpu_s(thread: threading.Thread) -> float:
    """CPU seconds that a thread of this process has used (Linux)."""
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def run(wire_format: str, samples: int, seed: int, pause_s: float) -> Run:
    """One run of four workers."""
    from gossipdp import launch

    found = launch(work, 4, (wire_format, samples, seed, pause_s), timeout_s=300)
    summed = ("exchanges", "bytes_sent", "chunks_repeated", "gossip_cpu_s")
    return Run(
        wire_format,
        **{name: sum(each[name] for each in found) for name in summed},
        **{name: value for name, value in found[0].items() if name not in summed},
    )


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def row(name: str, runs: list[Run], reference: list[Run]) -> list[str]:
    """One format's row."""
    exchanges = sum(each.exchanges for each in runs)
    per_exchange = statistics.mean(each.bytes_per_exchange for each in runs)
    of_reference = statistics.mean(each.bytes_per_exchange for each in reference)
    cpu_ms = 1e3 * sum(each.gossip_cpu_s for each in runs) / exchanges
    loss, loss_error = mean_and_error([each.training_loss for each in runs])
    accuracy, accuracy_error = mean_and_error([each.test_accuracy for each in runs])
    return [
        name,
        f"{loss:.5f} ± {loss_error:.5f}",
        f"{accuracy:.4f} ± {accuracy_error:.4f}",
        f"{statistics.median(each.consensus_distance for each in runs):.3g}",
        f"{per_exchange / 1e3:.1f}",
        f"{per_exchange / of_reference:.3f}",
        f"{sum(each.chunks_repeated for each in runs) / exchanges:.4f}",
        f"{cpu_ms:.2f}",
        f"{exchanges // len(runs)}",
    ]


def targets(runs: dict[str, list[Run]]) -> list[Target]:
    """Loss within two standard errors of the parameters' own; a half and a quarter of the bytes."""
    found = []
    mean, error = mean_and_error([each.training_loss for each in runs["full"]])
    size = statistics.mean(each.bytes_per_exchange for each in runs["full"])
    for name, share in (("bfloat16", 0.5), ("lattice8", 0.25)):
        its_mean, its_error = mean_and_error([each.training_loss for each in runs[name]])
        worse = (its_mean - mean) / math.hypot(error, its_error)
        found.append(Target(f"{name}: loss above, in standard errors of the difference", worse, 2))
        its_size = statistics.mean(each.bytes_per_exchange for each in runs[name])
        found.append(Target(f"{name}: bytes, of the wanted share", its_size / size / share, 1.1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=32_000, help="of all workers, each run")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="of each step, as of a device")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    options = parser.parse_args()
    seeds, samples = (2, 1_280) if options.quick else (options.seeds, options.samples)
    report = Report("wire_formats", "Wire formats: what fewer bytes cost", quick=options.quick)
    if not Path("/proc/self/schedstat").exists():
        report.missing.append(Missing("all", "the CPU time of a thread is read from Linux's /proc"))
        report.write({})
        return
    counts = dict.fromkeys(FORMATS, 0)

    def measure(name: str) -> Run:
        seed, counts[name] = counts[name], counts[name] + 1
        return run(name, samples, seed, options.pause_ms / 1e3)

    runs = interleaved(FORMATS, seeds, measure)
    report.tables.append(
        Table(
            "Digits, 4 workers on a ring, disjoint data",
            (
                "wire format",
                "training loss",
                "test accuracy",
                "consensus distance",
                "kB an exchange and worker",
                "of parameters",
                "repeats an exchange",
                "gossip CPU, ms an exchange and worker",
                "exchanges a run",
            ),
            [row(name, runs[name], runs["full"]) for name in FORMATS],
            f"Loss and accuracy of the final average: mean and standard error over {seeds} seeds. "
            "Bytes: all that the workers' sockets sent while they trained, headers, pairing and "
            "heartbeats included. A gradient step waits "
            f"{options.pause_ms:g} ms, as for a device, and its arithmetic shares the cores.",
        )
    )
    report.targets += targets(runs)
    report.write(runs)


if __name__ == "__main__":
    main()
