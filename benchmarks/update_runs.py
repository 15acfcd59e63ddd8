"""The runs of update.py, interleaved in one process on one core."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Role, working_dtype
from gossipdp.dynamics.state import Segment, State
from gossipdp.dynamics.update import KERNELS, choose_kernels
from gossipdp.gossip.codec import FORMATS
from gossipdp.parallel.flat_parameters import chunk_bytes_for

ETA, ALPHA_TILDE = 0.3, 1.3
"""Those of a ring of about ten; their values do not change how long it takes."""

NUM_START_UPS = 3
"""Processes that find what the first has compiled."""

WINDOW = FORMATS["full"].window

READY = """
import time
import torch
started_s = time.perf_counter()
from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
State([Segment(torch.empty(1, dtype=torch.{dtype}), Role.TRAINED)]).compile({name!r})
print(time.perf_counter() - started_s)
"""


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

    def __init__(self, num_parameters: int, dtype_name: str) -> None:
        dtype: torch.dtype = getattr(torch, dtype_name)
        self.kernels = choose_kernels(num_parameters)
        self.core = max(os.sched_getaffinity(0))
        wide = working_dtype(dtype)
        self.copied_bytes = 2 * num_parameters * dtype.itemsize
        self.bound_bytes = num_parameters * (3 * dtype.itemsize + 4 * wide.itemsize)
        generator = torch.Generator().manual_seed(0)

        def random() -> Tensor:
            return torch.randn(num_parameters, generator=generator).to(dtype)

        self._dtype, self._random = dtype, random
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
            yield f"{name}: two passes", worker.two_passes
            yield f"{name}: as in an exchange", worker.in_the_window
            yield f"{name}: boundary", worker.boundary
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

    def two_passes(self) -> None:
        """First all snapshots, then all exchanges, so that none finds its data in a cache."""
        self._theta += ETA
        for chunk, snapshot, _ in self._chunks:
            chunk.snapshot(self._theta, snapshot)
        for chunk, snapshot, peers in self._chunks:
            chunk.exchange(self._theta, snapshot, peers, ALPHA_TILDE)

    def in_the_window(self) -> None:
        """Snapshots run ahead by an exchange's window and go to its slots, over and over."""
        self._theta += ETA
        num_taken = 0
        for index, (chunk, _, peers) in enumerate(self._chunks):
            while num_taken < min(index + WINDOW, len(self._chunks)):
                ahead, slot = self._chunks[num_taken][0], self._slot(num_taken)
                ahead.snapshot(self._theta, slot)
                num_taken += 1
            chunk.exchange(self._theta, self._slot(index), peers, ALPHA_TILDE)

    def _slot(self, index: int) -> Tensor:
        return self._chunks[index % WINDOW][1][: self._chunks[index][0].num_elements]

    def boundary(self) -> None:
        """With momentum to flow."""
        self._theta += 0.5 * ETA
        self._state.boundary(self._theta)


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


def start_up_s(name: str, dtype: str) -> tuple[float, float]:
    """Seconds until the arithmetic is ready in a process that has imported torch.

    Returns:
        the median over processes that find its compiled code on disk; and that of one which finds
        none.
    """
    code = READY.format(name=name, dtype=dtype)

    def start(folder: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "NUMBA_CACHE_DIR": folder},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return float(done.stdout)

    with tempfile.TemporaryDirectory() as folder:
        first_s = start(folder)
        return statistics.median(start(folder) for _ in range(NUM_START_UPS)), first_s


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
