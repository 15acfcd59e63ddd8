"""``gossipdp bench exchange``: how fast two workers of one machine exchange, side by side."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gossipdp.cli.output_files import check_output

# The order of the table, and what each is.
CONTENDERS = {
    "shared_memory": "shared memory, writing the values there included",
    "tcp": "a TCP link",
    "bare_socket": "a bare poll loop over a TCP socket",
    "gloo": "gloo, send then receive",
    "gloo_at_once": "gloo, isend and irecv",
    "shared_memory_with_update": "whole exchange over shared memory",
    "tcp_with_update": "whole exchange over TCP",
    "gloo_with_update": "gloo, send then receive, and the same update",
}


@dataclass(frozen=True)
class ExchangeBenchmark:
    """Measure how fast two processes exchange parameters, beside gloo and a bare socket.

    Two processes, each pinned to a core, give each other as many megabytes at once. Every way
    takes its turn in every round, and what each round has brought is verified. GB/s is per
    direction, over the wall time of the slower process.
    """

    megabytes: float = 45.0
    """What each process gives the other in a round, in MB."""

    rounds: int = 5
    """Timed rounds; one more before them warms up."""

    json: Path | None = None
    """Also write the results to this file."""


def run(benchmark: ExchangeBenchmark) -> int:
    """Measure, show a table and write the file; returns the exit status.

    Raises:
        ValueError: Bad input, before any process starts.
        RuntimeError: A process failed; it has said why.
    """
    check_output("--json", benchmark.json)
    result = measure(benchmark, "gossipdp bench exchange")
    lines = [f"{'GB/s each way':>14} {'least':>6} {'most':>6} {'CPU ms':>7}"]
    for row in result["rows"]:
        speeds = row["gbps"]
        lines.append(
            f"{row['median_gbps']:14.2f} {min(speeds):6.2f} {max(speeds):6.2f} "
            f"{row['median_cpu_ms']:7.1f}  {row['text']}"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    if benchmark.json is not None:
        benchmark.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(benchmark: ExchangeBenchmark, command: str) -> dict[str, Any]:
    """What ``--json`` writes; ``command`` is how it was called.

    Raises as :func:`run`.
    """
    if benchmark.megabytes < 1:
        raise ValueError(f"--megabytes is {benchmark.megabytes:g}; at least 1 is needed")
    if benchmark.rounds < 1:
        raise ValueError(f"--rounds is {benchmark.rounds}; at least 1 is needed")
    import msgspec

    from gossipdp.reproduce.stored import Provenance

    started_s, load = time.monotonic(), os.getloadavg()[0]
    num_values = int(benchmark.megabytes * 1e6) // 4
    rows = []
    for name, found in _timings(num_values, benchmark.rounds).items():
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
    provenance = Provenance.here(command, time.monotonic() - started_s)
    return {
        **{f"{row['name']}_gbps": row["median_gbps"] for row in rows},
        "rows": rows,
        "load": load,
        "configuration": {"megabytes": benchmark.megabytes, "rounds": benchmark.rounds},
        "provenance": msgspec.structs.asdict(provenance),
    }


def _timings(num_values: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall s, CPU s) of the slower process, per contender and round."""
    from gossipdp.cli.bench_exchange_worker import NUM_ADDRESSES, work

    context = get_context("spawn")
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(2):
                ours, theirs = context.Pipe()
                task = (rank, theirs, num_values, str(Path(directory) / "store"))
                process = context.Process(target=work, args=task, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            for _ in range(NUM_ADDRESSES):
                _tell(pipes, *reversed(_hear(pipes)))
            _hear(pipes)
            for round_number in range(num_rounds + 1):
                for name, found in timings.items():
                    _tell(pipes, *[(name, round_number)] * 2)
                    _hear(pipes)
                    _tell(pipes, "go", "go")
                    slower = max(_hear(pipes))
                    if round_number:
                        found.append(slower)
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
    return timings


def _tell(pipes: list[Connection], *messages: object) -> None:
    for pipe, message in zip(pipes, messages, strict=True):
        pipe.send(message)


def _hear(pipes: list[Connection]) -> list[Any]:
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        raise RuntimeError("a process of the benchmark failed; see above") from None
