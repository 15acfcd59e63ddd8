"""The arithmetic of an exchange beside the speed of memory, in one process on one core.

    python benchmarks/update.py                    writes benchmarks/results/update.{json,md}
    python benchmarks/update.py --json PATH        writes the figures to PATH alone

Wants a quiet machine: all is measured on one core, but memory is shared by all of them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import tyro
from support.provenance import Provenance
from support.report import Report, Spread, Table, run_script
from torch import Tensor

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.dynamics.update import KERNELS, choose_kernels
from gossipdp.parallel.flat_parameters import chunk_bytes_for
from gossipdp.rules import at_least_1, check_flags, option, output_file

QUICK_PARAMETERS = 300_000
ETA, ALPHA_TILDE = 0.3, 1.3
"""Those of a ring of about ten; their values do not change how long it takes."""


@dataclass(frozen=True)
class UpdateBenchmark:
    """Measure the arithmetic of an exchange, in one process on one core.

    Flow, snapshot, difference and averaging of a whole model, in the library's chunks, with each
    arithmetic there is; beside a plain copy, and beside the operations of the paper's released
    code. The runs are interleaved.
    """

    parameters: int = option(11_250_000, at_least_1)
    """Number of parameters."""

    runs: int = option(5, at_least_1)
    """Measurements of each; the figures are medians."""

    json: Path | None = option(None, output_file)
    """Write the results to this file instead of benchmarks/results."""

    quick: bool = False
    """A small model, to see that it works; results go to runs/benchmarks."""


def main() -> None:
    benchmark = tyro.cli(UpdateBenchmark, config=(tyro.conf.FlagCreatePairsOff,))
    report = Report("update", "The arithmetic of an exchange", quick=benchmark.quick)
    result = measure(benchmark)
    rows = [
        (row["name"], Spread.of(row["runs_ms"]).text(), f"{row['over_copy_bound']:.2f}")
        for row in result["rows"]
    ]
    rows.append(("copy bound", f"{result['copy_bound_ms']:.2f}", "1.00"))
    report.tables.append(
        Table(
            f"{result['configuration']['parameters']:,} parameters, one core, one thread",
            ("", "ms", "over the copy bound"),
            rows,
            f"Medians of {benchmark.runs} interleaved runs (least to greatest), one more "
            f"uncounted. The copy moves {result['copy_gb_per_s']:.1f} GB/s, read and written. The "
            f"copy bound is the time of that copy for the bytes of one update. The library "
            f"computes with {result['kernels']}.",
        )
    )
    report.write(result, benchmark.json)


def measure(benchmark: UpdateBenchmark) -> dict[str, Any]:
    """All figures, as ``--json`` writes them.

    Raises:
        ValueError: There is nothing to measure.
    """
    check_flags(benchmark)
    started_s = time.monotonic()
    num_parameters = QUICK_PARAMETERS if benchmark.quick else benchmark.parameters
    runs = UpdateRuns(num_parameters)
    rows = runs.measure(benchmark.runs)
    name = runs.kernels
    medians = {row.name: row.median_ms for row in rows}
    update_ms = medians[f"{name}: one pass"]
    copy_ms = min(row.median_ms for row in rows if row.name.startswith("copy"))
    copy_bound_ms = copy_ms * runs.bound_bytes / runs.copied_bytes
    return {
        "update_ms": update_ms,
        "copy_bound_ms": copy_bound_ms,
        "released_sequence_ms": medians["released code's sequence"],
        "update_over_copy_bound": update_ms / copy_bound_ms,
        "released_over_update": medians["released code's sequence"] / update_ms,
        "copy_gb_per_s": runs.copied_bytes / copy_ms / 1e6,
        "kernels": name,
        "core": runs.core,
        "rows": [
            {
                **asdict(row),
                "median_ms": row.median_ms,
                "over_copy_bound": row.median_ms / copy_bound_ms,
            }
            for row in rows
        ],
        "configuration": {
            "parameters": num_parameters,
            "runs": benchmark.runs,
        },
        "provenance": msgspec.structs.asdict(Provenance.here(time.monotonic() - started_s)),
    }


@dataclass(frozen=True)
class Row:
    """One thing that was measured: the milliseconds of each run, in the order of the runs."""

    name: str
    runs_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median of the runs."""
        return statistics.median(self.runs_ms)


class UpdateRuns:
    """The state of a worker for each arithmetic, a peer's snapshots, and what is done with them.

    Every run passes over the whole state, several times the size of the caches, so each begins
    with the data in memory. Snapshots go to a place of their own for every chunk, not to the few
    slots that an exchange uses over and over: that is what the copy bound counts.

    Attributes:
        kernels: what the library chooses here.
        core: the one that all is measured on.
        copied_bytes: read and written by the copy of one model.
        bound_bytes: x, c, pending and the peer's snapshot read once; c, pending and the snapshot
            written once.
    """

    def __init__(self, num_parameters: int) -> None:
        self.kernels = choose_kernels(num_parameters)
        self.core = max(os.sched_getaffinity(0))
        self.copied_bytes, self.bound_bytes = 2 * 4 * num_parameters, 7 * 4 * num_parameters
        generator = torch.Generator().manual_seed(0)

        def random() -> Tensor:
            return torch.randn(num_parameters, generator=generator)

        self._random = random
        self._peers, self._snapshots = random(), random()

    def measure(self, num_runs: int) -> list[Row]:
        """Measure everything ``num_runs`` times in turn, after one round that is not counted."""
        with _one_core(self.core):
            cases = dict(self._cases())
            times_ms: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(num_runs + 1):
                for name, work in cases.items():
                    started_s = time.perf_counter()
                    work()
                    times_ms[name].append(1e3 * (time.perf_counter() - started_s))
        return [Row(name, tuple(times[1:])) for name, times in times_ms.items()]

    def _cases(self) -> Iterator[tuple[str, Callable[[], object]]]:
        source, target = self._peers, self._random()
        yield "copy, torch", lambda: target.copy_(source)
        from_bytes, to_bytes = (t.view(torch.uint8).numpy().data for t in (source, target))

        def copy_bytes() -> None:
            to_bytes[:] = from_bytes

        yield "copy, C library", copy_bytes
        for name in KERNELS:
            worker = _Worker(self._random(), name, self._snapshots, self._peers)
            yield f"{name}: one pass", worker.one_pass
        yield "released code's sequence", Released(self._random(), self._peers).exchange


class _Worker:
    """One worker's state, as the library drives it; its phase moves on before each run."""

    def __init__(self, x: Tensor, kernels: str, snapshots: Tensor, peers: Tensor) -> None:
        segment = Segment(x, Role.TRAINED, chunk_bytes=chunk_bytes_for(x.nbytes))
        self._state = State([segment])
        self._state.compile(kernels)
        self._theta = 0.0
        self._chunks = [
            (chunk, snapshot, peer)
            for (chunk, snapshot), (_, peer) in zip(
                segment.split(snapshots), segment.split(peers), strict=True
            )
        ]
        self.one_pass()

    def one_pass(self) -> None:
        """Take each snapshot and exchange it at once: the peer's snapshots are there already."""
        self._theta += ETA
        for chunk, snapshot, peers in self._chunks:
            chunk.snapshot_and_exchange(self._theta, snapshot, peers, ALPHA_TILDE)


class Released:
    """The operations of the paper's released code at an exchange, on one flat tensor.

    It holds (x, x_tilde). After both have sent x: matrix exponential of the flow, a clone of x,
    both mixed in place; then x_tilde moves by alpha_tilde times the difference, and x to the mean.
    """

    def __init__(self, x: Tensor, peers: Tensor) -> None:
        self.x, self.x_tilde = x, x.clone()
        self._peers = peers
        self._generator = ETA * torch.tensor([[-1.0, 1.0], [1.0, -1.0]])

    def exchange(self) -> None:
        """One exchange, one period after the last."""
        (stays, comes), (goes, stays_tilde) = torch.linalg.matrix_exp(self._generator).tolist()
        before = self.x.clone()
        self.x.mul_(stays).add_(self.x_tilde, alpha=comes)
        self.x_tilde.mul_(stays_tilde).add_(before, alpha=goes)
        self.x_tilde.add_(ALPHA_TILDE * (self._peers - self.x))
        self.x.lerp_(self._peers, 0.5)


@contextmanager
def _one_core(core: int) -> Iterator[None]:
    """Run on one core and with one thread; afterwards as before."""
    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    run_script(main)
