"""The arithmetic of an exchange beside the speed of memory, in one process on one core.

    python benchmarks/update.py                    writes benchmarks/results/update.{json,md}

Flow, snapshot, difference and averaging of a whole model, in the library's chunks, with each
arithmetic there is; beside a plain copy, and beside the operations of the paper's released code.
Wants a quiet machine: all is measured on one core, but memory is shared by all of them.

Every run passes over the whole state, several times the size of the caches, so each begins with the
data in memory. Snapshots go to a place of their own for every chunk, not to the few slots that an
exchange uses over and over: that is what the copy bound counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from support.report import Report, Spread, Table, asked, interleaved, run_script
from torch import Tensor

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.dynamics.update import KERNELS, choose_kernels
from gossipdp.parallel.flat_parameters import chunk_bytes_for

COPY_BYTES, BOUND_BYTES = 2 * 4, 7 * 4
"""A parameter: read and written by a copy; and x, c, pending and the peer's snapshot read once, c,
pending and the snapshot written once."""
ETA, ALPHA_TILDE = 0.3, 1.3
"""Those of a ring of about ten; their values do not change how long it takes."""


def measure(num_parameters: int, num_runs: int) -> dict[str, Any]:
    """Measure everything in turn, after one round that is not counted."""
    works = cases(num_parameters)
    found = interleaved(list(works), num_runs + 1, lambda name: timed_ms(works[name]))
    times = {name: Spread.of(runs[1:]) for name, runs in found.items()}
    copy_ms = min(spread.median for name, spread in times.items() if name.startswith("copy"))
    bound_ms = copy_ms * BOUND_BYTES / COPY_BYTES
    kernels = choose_kernels(num_parameters)
    return {
        "parameters": num_parameters,
        "copy_bound_ms": bound_ms,
        "copy_gb_per_s": COPY_BYTES * num_parameters / copy_ms / 1e6,
        "kernels": kernels,
        "released_over_update": times[RELEASED].median / times[f"{kernels}: one pass"].median,
        "ms": times,
        "over_copy_bound": {name: spread.median / bound_ms for name, spread in times.items()},
    }


def timed_ms(work: Callable[[], object]) -> float:
    """Return how long it takes, once."""
    started_s = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started_s)


RELEASED = "released code's sequence"


def cases(num_parameters: int) -> dict[str, Callable[[], object]]:
    """Return what is measured: a worker's state for each arithmetic, and a peer's snapshots."""
    generator = torch.Generator().manual_seed(0)

    def random() -> Tensor:
        return torch.randn(num_parameters, generator=generator)

    peers, snapshots, target = random(), random(), random()
    from_bytes, to_bytes = (t.view(torch.uint8).numpy().data for t in (peers, target))

    def copy_bytes() -> None:
        to_bytes[:] = from_bytes

    passes = {f"{name}: one pass": Worker(random(), name, snapshots, peers) for name in KERNELS}
    return {
        "copy, torch": lambda: target.copy_(peers),
        "copy, C library": copy_bytes,
        **{name: worker.one_pass for name, worker in passes.items()},
        RELEASED: Released(random(), peers).exchange,
    }


class Worker:
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


def main() -> None:
    quick, rounds = asked(__doc__, rounds=5)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    report = Report("update", "The arithmetic of an exchange", quick)
    found = measure(300_000 if quick else 11_250_000, rounds)
    rows = [
        (name, spread.text(), f"{found['over_copy_bound'][name]:.2f}")
        for name, spread in found["ms"].items()
    ]
    rows.append(("copy bound", f"{found['copy_bound_ms']:.2f}", "1.00"))
    report.tables.append(
        Table(
            f"{found['parameters']:,} parameters, one core, one thread",
            ("", "ms", "over the copy bound"),
            rows,
            f"Medians of {rounds} interleaved runs (least to greatest), one more "
            f"uncounted. The copy moves {found['copy_gb_per_s']:.1f} GB/s, read and written. The "
            "copy bound is the time of that copy for the bytes of one update. The library "
            f"computes with {found['kernels']}.",
        )
    )
    report.write(found)


if __name__ == "__main__":
    run_script(main)
