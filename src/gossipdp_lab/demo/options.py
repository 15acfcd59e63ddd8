"""The options of ``gossipdp demo``. Imports no torch, so that ``--help`` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gossipdp.rules import at_least_1, option, positive_number
from gossipdp_lab.demo.watch import Fault, least_duration_s, parse_faults
from gossipdp_lab.tasks.options import RunOptions

DEFAULT_SAMPLES = {"digits": 128_000, "pystdlib": 6_000, "pystdlib-small": 28_000}
"""Over all workers: 15 to 30 seconds of training by gossip on two cores."""


@dataclass(frozen=True)
class DemoArguments(RunOptions):
    """Train a small model with several worker processes here, and show what happens."""

    compare: bool = False
    """Train twice, by all-reduce and by --method, with one worker four times slower, and draw both
    in one picture. It takes a little over a minute. The workload is pystdlib-small."""

    workload: Literal["digits", "pystdlib", "pystdlib-small"] | None = None
    """digits (the default): handwritten digits, a small convolutional network; pystdlib: the source
    text of Python's standard library, a small byte-level transformer; pystdlib-small: the same
    text, a transformer six times smaller."""

    workers: int = option(4, at_least_1)
    """Worker processes."""

    slow_worker: str | None = None
    """RANK:FACTOR, such as 2:4: make one worker so many times slower; it waits after each
    backward pass."""

    kill: str | None = None
    """RANK@TIME, several with commas between them, such as 0@5s,3@9s: kill -9 those workers.
    Times count from the first gradient step of the run."""

    stop: str | None = None
    """RANK@TIME:DURATION, several with commas between them, such as 2@4s:8s: SIGSTOP, and SIGCONT
    after that time."""

    restart: bool = False
    """Start workers that were killed again; they rejoin the run."""

    learning_rate: float | None = option(None, positive_number)
    """The optimizer's highest learning rate; by default the workload's own."""

    samples: int | None = option(None, at_least_1)
    """Samples to train on, all workers together; by default what takes about half a minute, and
    longer if the faults need it."""

    pin: bool = False
    """Give each worker its own share of the cores."""

    disjoint: bool = False
    """No two workers see the same training data; for pystdlib each has a stretch of the text."""

    @property
    def task(self) -> str:
        """Return the workload, with its default."""
        return self.workload or "digits"

    @property
    def directory(self) -> Path:
        """Return the directory of the run's files."""
        kind = "compare" if self.compare else self.task
        name = f"{kind}-{self.method}-{self.graph}-{self.workers}"
        return (self.output or Path("runs", name)).absolute()

    @property
    def num_samples(self) -> int:
        """Return the samples of the whole run."""
        return self.samples or DEFAULT_SAMPLES[self.task]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Return the faults in the order of their times."""
        return parse_faults(self.kill, self.stop, num_workers=self.workers)

    @property
    def least_s(self) -> float:
        """Return the seconds that the run trains at least."""
        return 0.0 if self.samples else least_duration_s(self.faults, restart=self.restart)
