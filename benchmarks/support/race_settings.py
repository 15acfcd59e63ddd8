"""The settings of a run of the race, and the files by which its processes know one another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from support.byte_task import BYTES, TRANSFORMER, Task
from support.quality_rows import KINDS, WEIGHT_DECAY, RowName, TorchftRow
from support.rows import Gossip, OneOptimizer

STEP_S = 0.040
HEADER = ("samples", "exchanged", "at_s", "first_step_s", "imported_s", "sent_bytes", "voters")
Values: TypeAlias = NDArray[np.float64]


class RaceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run's result follows from; runs are found again by it.

    checkpoint_steps: None for rows that take none: gossipdp's and Decent-DP's.
    join_ms, timeout_s, heartbeat_ms: of torchft's rows; None for others.
    keeps_spare: a worker that is started again has an interpreter that has imported torch.
    step_s: what the gradients of a batch take, the mean; about, where nothing is timed.
    outer: rate and momentum of DiLoCo's outer step; None: those of the row.
    waits: a timed wait stands for a step's compute; otherwise each worker fills a core.
    quota_s: so long the last worker keeps a share of its core, before it gets another; 0: forever.
    weight_decay: AdamW's, which multiplies it by the learning rate.
    """

    row: str
    condition: str
    faults: str
    learning_rate: float
    seed: int
    seconds: float
    workers: int
    step_s: float = STEP_S
    spread: float = 0.0
    checkpoint_steps: int | None = None
    join_ms: int | None = None
    timeout_s: int | None = None
    heartbeat_ms: int | None = None
    keeps_spare: bool = False
    outer: tuple[float, float] | None = None
    waits: bool = True
    quota_s: float = 0.0
    weight_decay: float = WEIGHT_DECAY

    @property
    def key(self) -> str:
        """The same for equal settings, and for no others."""
        return msgspec.json.encode(self, order="sorted").decode()

    @property
    def name(self) -> RowName:
        return RowName.parse(self.row)

    @property
    def task(self) -> Task:
        return BYTES if self.waits else TRANSFORMER

    @property
    def steps_between_saves(self) -> int:
        """Return the steps from one checkpoint to the next: whole periods."""
        period = self.name.period or 1
        return period * math.ceil((self.checkpoint_steps or 1) / period)

    @property
    def num_spares(self) -> int:
        """Return how many spare interpreters are kept: as many as one death starts processes."""
        return self.keeps_spare * (self.workers if restarts_whole(self.name) else 1)


def saves(name: RowName) -> bool:
    """Return whether the row takes checkpoints: gossipdp's need none as long as one worker lives.

    Decent-DP cannot: it takes over the optimizers, and saves none.
    """
    return issubclass(KINDS[name.kind].row, OneOptimizer) and not KINDS[name.kind].is_ours


def restarts_whole(name: RowName) -> bool:
    """Return whether a death ends the row's whole job, which starts again from a checkpoint."""
    kind = KINDS[name.kind].row
    return kind is not Gossip and not issubclass(kind, TorchftRow)


def shelf_path(folder: Path, rank: int, life: int) -> Path:
    return folder / f"shelf-{rank}-{life}"


def log_path(folder: Path, rank: int, life: int) -> Path:
    return folder / f"log-{rank}-{life}"


class Shelf:
    """A file in which a life of a worker leaves what it holds; others may read it at any time.

    It is there from the life's first step on, and has no model until the life leaves one. Two
    places take turns, and a number says which of them is whole: the worker may be killed or stopped
    at any moment.
    """

    def __init__(self, path: Path, num_parameters: int) -> None:
        self.step_times = path.with_name(f"{path.name}.steps")  # as float64, when each step ended
        self._path, self._width = path, len(HEADER) + num_parameters
        self._file: Values | None = None

    def make(self) -> None:
        """Make the file, without a model: a sign that its life has made a step."""
        empty = self._path.with_name(f"{self._path.name}.new")
        empty.write_bytes(np.zeros(1 + 2 * self._width).tobytes())
        empty.rename(self._path)  # so that it is there whole or not at all
        self._file = np.memmap(self._path, dtype=np.float64, mode="r+")

    @property
    def is_made(self) -> bool:
        """Return whether the file is there, without a look into it."""
        return self._file is not None or self._path.exists()

    def put(self, header: dict[str, float], parameters: NDArray[np.float32]) -> None:
        if self._file is None:  # a life that came too late to make a step
            self.make()
        assert self._file is not None
        number = int(self._file[0]) + 1
        place = self._place(number)
        place[: len(HEADER)] = [header[name] for name in HEADER]
        place[len(HEADER) :] = parameters
        self._file[0] = number

    def look(self) -> tuple[dict[str, float], Values] | None:
        """Return what was left last; None if nothing was."""
        if self._file is None:
            if not self._path.exists():
                return None
            self._file = np.memmap(self._path, dtype=np.float64, mode="r")
        while True:
            number = int(self._file[0])
            if number == 0:
                return None
            found = self._place(number).copy()
            if int(self._file[0]) == number:
                header = dict(zip(HEADER, found[: len(HEADER)].tolist(), strict=True))
                return header, found[len(HEADER) :]

    def _place(self, number: int) -> Values:
        assert self._file is not None
        start = 1 + (number % 2) * self._width
        return self._file[start : start + self._width]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of the most steps; None if there is none."""
    return max(folder.glob("checkpoint-*.pt"), default=None)


def keep_checkpoint(written: Path, steps: int) -> None:
    """Let a file that was written whole be the checkpoint of so many steps; keep the last two."""
    written.rename(written.with_name(f"checkpoint-{steps:08}.pt"))
    for old in sorted(written.parent.glob("checkpoint-*.pt"))[:-2]:
        old.unlink(missing_ok=True)
