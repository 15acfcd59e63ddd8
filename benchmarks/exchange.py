"""The speed of exchanges on one machine, side by side with gloo.

    python benchmarks/exchange.py                  writes benchmarks/results/exchange.{json,md}
    python benchmarks/exchange.py --json PATH      writes the figures to PATH alone

Two processes, each pinned to a core of its own: wants two quiet cores.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import tyro
from support.exchange_worker import NUM_ADDRESSES, work
from support.provenance import Provenance
from support.report import Report, Spread, Table, run_script

from gossipdp.links.tls import make_tls_files
from gossipdp.rules import at_least_1, check_flags, number, option, output_file

# The order of the table, and what each is.
CONTENDERS = {
    "shared_memory": "shared memory, writing the values there included",
    "tcp": "a TCP link",
    "tls": "a TCP link through TLS",
    "gloo": "gloo, send then receive",
    "gloo_at_once": "gloo, isend and irecv",
}
QUICK_MEGABYTES = 2.0


@dataclass(frozen=True)
class ExchangeBenchmark:
    """Measure how fast two processes exchange parameters, beside gloo.

    Two processes, each pinned to a core, give each other as many megabytes at once. Every way
    takes its turn in every round, and what each round has brought is verified. GB/s is per
    direction, over the wall time of the slower process.
    """

    megabytes: float = option(45.0, partial(number, least=1.0))
    """Megabytes that each process gives the other in a round."""

    rounds: int = option(5, at_least_1)
    """Timed rounds; one more before them warms up."""

    json: Path | None = option(None, output_file)
    """Write the results to this file instead of benchmarks/results."""

    quick: bool = False
    """Little data, to see that it works; results go to runs/benchmarks."""


def main() -> None:
    benchmark = tyro.cli(ExchangeBenchmark, config=(tyro.conf.FlagCreatePairsOff,))
    report = Report("exchange", "Exchange between two processes", quick=benchmark.quick)
    result = measure(benchmark)
    rows = [
        (row["text"], Spread.of(row["gbps"]).text(), f"{row['median_cpu_ms']:.0f}")
        for row in result["rows"]
    ]
    report.tables.append(
        Table(
            f"{result['configuration']['megabytes']:g} MB of float32 each way",
            ("", "GB/s each way", "CPU ms"),
            rows,
            f"Medians of {benchmark.rounds} interleaved rounds (least to greatest), one more "
            "uncounted; GB/s over the wall time of the slower process, CPU time of that process. "
            "What every round brought was verified.",
        )
    )
    report.write(result, benchmark.json)


def measure(benchmark: ExchangeBenchmark) -> dict[str, Any]:
    """Return the content of ``--json``.

    Raises:
        ValueError: Bad input, before any process starts.
        RuntimeError: A process failed; it has said why.
    """
    check_flags(benchmark)
    started_s, load = time.monotonic(), os.getloadavg()[0]
    megabytes = QUICK_MEGABYTES if benchmark.quick else benchmark.megabytes
    num_values = int(megabytes * 1e6) // 4
    rows = []
    for name, found in timings(num_values, benchmark.rounds).items():
        speeds = [4e-9 * num_values / wall_s for wall_s, _ in found]
        cpu_ms = [1e3 * cpu_s for _, cpu_s in found]
        rows.append(
            {
                "name": name,
                "text": CONTENDERS[name],
                "gbps": speeds,
                "median_gbps": statistics.median(speeds),
                "median_cpu_ms": statistics.median(cpu_ms),
            }
        )
    return {
        **{f"{row['name']}_gbps": row["median_gbps"] for row in rows},
        "rows": rows,
        "load": load,
        "configuration": {"megabytes": megabytes, "rounds": benchmark.rounds},
        "provenance": msgspec.structs.asdict(Provenance.here(time.monotonic() - started_s)),
    }


def timings(num_values: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall s, CPU s) of the slower process, per contender and round."""
    context = get_context("spawn")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as directory:
        make_tls_files(directory)
        try:
            for rank in range(2):
                ours, theirs = context.Pipe()
                task = (rank, theirs, num_values, Path(directory))
                process = context.Process(target=work, args=task, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            for _ in range(NUM_ADDRESSES):
                _tell(pipes, *reversed(_hear(pipes)))
            _hear(pipes)
            for round_number in range(num_rounds + 1):
                for name, times in found.items():
                    _tell(pipes, *[(name, round_number)] * 2)
                    _hear(pipes)
                    _tell(pipes, "go", "go")
                    slower = max(_hear(pipes))
                    if round_number:
                        times.append(slower)
            _tell(pipes, "stop", "stop")
            for process in processes:
                process.join()
                # The last round, too, is verified before a process ends.
                if process.exitcode != 0:
                    raise RuntimeError("a process of the benchmark failed; see above")
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    return found


def _tell(pipes: list[Connection], *messages: object) -> None:
    for pipe, message in zip(pipes, messages, strict=True):
        pipe.send(message)


def _hear(pipes: list[Connection]) -> list[Any]:
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        raise RuntimeError("a process of the benchmark failed; see above") from None


if __name__ == "__main__":
    run_script(main)
