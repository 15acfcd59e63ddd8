"""One worker's process in the race: trains by the clock, and leaves what it holds on its shelf.

A process of benchmarks/race_run.py, which says by variables what it is. Nothing is imported here
that a plain script of the row would not import, but for little that all rows share: a process that
is started again imports it again. What the validation needs is out of band: the parent reads the
shelves.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from support.byte_task import num_parameters
from support.hosts import bytes_by_connection, enter
from support.quality_rows import KINDS, make_optimizer
from support.race_settings import (
    RaceSettings,
    Shelf,
    keep_checkpoint,
    log_path,
    newest_checkpoint,
    shelf_path,
)
from support.rows import Gossip, OneOptimizer, Row, RowPlan
from support.timed_compute import RunningClock, TimedCompute
from torch import nn

from gossipdp_lab.tasks.workload import learning_rate_factor

LEAVE_SHARE, COUNT_EVERY_S = 1 / 350, 1.0
"""A model is left after each such share of the run; bytes are counted after so many seconds."""
CLONE_NEWUTS = 0x04000000


def data_seed(seed: int, life: int, rank: int) -> int:
    """Return a seed of a life's batches below 2**32: torch's generator heeds no higher bits."""
    return (seed << 20) + (life << 8) + rank


class Life:
    """The record of one process, and its shelf."""

    def __init__(
        self, row: Row, shelf: Shelf, imported_s: float, began_s: float, every_s: float = 0.2
    ) -> None:
        self._row, self._shelf, self._every_s = row, shelf, every_s
        self._times = os.open(shelf.step_times, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._imported_s, self._began_s = imported_s, began_s
        self._first_step_s = 0.0
        self._left_s, self._left_exchanges, self._exchanged = -math.inf, -1.0, 0
        self._is_whole = False
        self._sent: dict[str, int] = {}
        """Bytes by connection, those that are closed by now included; counted once a second."""
        self._counted_s = -math.inf

    def stepped(self, before: int, now: float) -> None:
        """Leave what the row holds, now and then; only what a step has just made whole.

        before: the row's batches before the step.
        """
        if self._first_step_s == 0.0:
            self._first_step_s = now - self._began_s
            self._shelf.make()
        os.write(self._times, struct.pack("d", now))
        self._is_whole = self._row.num_batches() > before
        if self._is_whole and now >= self._left_s + self._every_s:
            self.leave(now)

    def end(self, now: float) -> None:
        """Leave what the row holds at the end, if the last step has made it whole."""
        if self._is_whole:
            self.leave(now)

    def leave(self, now: float, voters: int = 0) -> None:
        """Leave what the row holds. voters: workers in the average of the end, once it is made."""
        batches = self._row.num_batches()
        exchanges = self._row.account().get("exchanges", 0.0)
        if exchanges != self._left_exchanges:
            self._left_exchanges, self._exchanged = exchanges, batches
        if now >= self._counted_s + COUNT_EVERY_S:
            self._sent |= bytes_by_connection()
            self._counted_s = now
        header = {
            "samples": batches * self._row.plan.batch_size,
            "exchanged": self._exchanged * self._row.plan.batch_size,
            "at_s": now,
            "first_step_s": self._first_step_s,
            "imported_s": self._imported_s,
            "sent_bytes": sum(self._sent.values()),
            "voters": voters,
        }
        flat = nn.utils.parameters_to_vector(self._row.net.parameters()).detach().numpy()
        self._shelf.put({name: float(value) for name, value in header.items()}, flat)
        self._left_s = now


def make_save(row: Row, settings: RaceSettings, folder: Path, rank: int) -> Callable[[], None]:
    """Return what writes a checkpoint whenever one is due; load the newest one first.

    One worker writes for all, also where each has moments of its own; where any of them may be
    away, each does, as torchft's replicas heal from any other.
    """
    if settings.checkpoint_steps is None or not isinstance(row, OneOptimizer):
        return lambda: None
    newest = newest_checkpoint(folder)
    if newest is not None:
        row.load(torch.load(newest, weights_only=True)["row"])

    def save() -> None:
        is_due = row.steps % settings.steps_between_saves == 0
        if is_due and (rank == 0 or settings.join_ms is not None):
            written = folder / f"unfinished-{rank}"
            torch.save({"row": row.state(), "batches": row.num_batches()}, written)
            keep_checkpoint(written, row.steps)

    return save


def draws(settings: RaceSettings, rank: int, life: int) -> Callable[[], float]:
    """Return what gives the time of each step."""
    if not settings.spread:
        return lambda: settings.step_s
    normal = random.Random(f"{settings.seed} {rank} {life}").gauss
    mean = -(settings.spread**2) / 2
    return lambda: settings.step_s * math.exp(normal(mean, settings.spread))


def main() -> None:
    began_s = float(os.environ["RACE_BEGAN"])
    imported_s = time.monotonic() - began_s
    folder, life = Path(os.environ["RACE_DIR"]), int(os.environ["RACE_LIFE"])
    rank = int(os.environ["RANK"])
    log = os.open(log_path(folder, rank, life), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stderr.fileno())
    address = enter_host()
    torch.set_num_threads(1)
    take_core()
    settings = msgspec.json.decode((folder / "run.json").read_bytes(), type=RaceSettings)
    started_s, task = float(os.environ["RACE_STARTED"]), settings.task
    torch.manual_seed(settings.seed)
    net = task.make_model()
    text = torch.from_numpy(np.load(folder / "text.npy", mmap_mode="c"))
    task.loss(net, next(task.batches(text, 0))).backward()  # what torch makes at first
    net.zero_grad()
    compute = None
    if settings.waits:
        assert isinstance(net, nn.Sequential)
        clock = RunningClock().start()
        compute = TimedCompute([net[0], net[2], net], draws(settings, rank, life), clock)
    row = make_row(net, settings, rank, address)
    shelf = Shelf(shelf_path(folder, rank, life), num_parameters(task))
    own = Life(row, shelf, imported_s, began_s, max(0.2, LEAVE_SHARE * settings.seconds))
    save = make_save(row, settings, folder, rank)
    for batch in task.batches(text, data_seed(settings.seed, life, rank)):
        now = time.monotonic()
        progress = (now - started_s) / settings.seconds
        if progress >= 1:
            break
        row.set_rate(settings.learning_rate * learning_rate_factor(progress))
        before = row.num_batches()
        if compute is not None:
            compute.begin()
        row.step(task.loss(row.model, batch))
        own.stepped(before, time.monotonic())
        save()
    own.end(time.monotonic())
    if isinstance(row, Gossip):
        voters = row.gossip.consolidate().world_size
        own.leave(time.monotonic(), voters)
    # Others may wait for this one in a collective: the parent ends them.
    os._exit(0)


def make_row(net: nn.Module, settings: RaceSettings, rank: int, address: str | None) -> Row:
    """Make this worker's part of the row. address: of its host; None for this machine."""
    name = settings.name
    options = name.gossip_options("ring")
    if options:
        from gossipdp import Network

        options |= {"network": Network(shared_memory=KINDS[name.kind].shared_memory, host=address)}
    full_steps = settings.workers * settings.seconds / settings.step_s
    plan = RowPlan(
        rank=rank,
        samples=math.ceil(10 * full_steps) * settings.task.batch_size,  # the clock ends it
        seed=settings.seed,
        batch_sizes=[settings.task.batch_size] * settings.workers,
        periods=name.periods([1.0] * settings.workers),
        make_optimizer=partial(make_optimizer, weight_decay=settings.weight_decay),
        method=KINDS[name.kind].method,
        options=options,
        own_pace=True,
        host=address or "127.0.0.1",
        outer=settings.outer,
    )
    return name.make(net, plan)


def take_core() -> None:
    """Keep this process to its core, if it has one, and to its control group."""
    if "RACE_CORE" in os.environ:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {int(os.environ["RACE_CORE"])})
    if "RACE_GROUP" in os.environ:
        Path(os.environ["RACE_GROUP"], "cgroup.procs").write_text(str(os.getpid()))


def enter_host() -> str | None:
    """Move this process into its host's namespace, under the host's name; return its address."""
    namespace, address = os.environ.get("RACE_HOST"), os.environ.get("RACE_ADDRESS")
    if namespace is None or address is None:
        return None
    enter(namespace)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot have a host name of its own")
    socket.sethostname(address)  # torchft tells others this name
    return address


if __name__ == "__main__":
    main()
