"""The options of ``gossipdp demo``. Imports no torch, so that ``--help`` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gossipdp.launcher.fault_plan import FaultPlan
from gossipdp.rules import at_least_1, option, positive_number
from gossipdp_lab.demo.watch import least_duration_s
from gossipdp_lab.tasks import RunOptions

DEFAULT_SAMPLES = {"digits": 128_000, "pystdlib-small": 28_000}
"""Over all workers: 15 to 30 seconds of training by gossip on two cores."""


@dataclass(frozen=True)
class DemoArguments(RunOptions):
    """Train a small model with several workers on this machine."""

    compare: bool = False
    """Train twice, by all-reduce and by --method, while workers are slow in turn."""

    workload: Literal["digits", "pystdlib-small"] | None = None
    """digits (the default): images; pystdlib-small: text, the source of Python's own library."""

    workers: int = option(4, at_least_1)
    """Worker processes."""

    faults: str | None = None
    """Faults, as for gossipdp run. If one names no worker, --seed draws it."""

    restart: bool = False
    """Start killed workers again."""

    learning_rate: float | None = option(None, positive_number)
    """Peak learning rate; by default the workload's."""

    samples: int | None = option(None, at_least_1)
    """Samples of all workers together; by default for about half a minute."""

    seconds: float | None = option(None, positive_number)
    """Train for so long instead; with --compare 40 by default."""

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
    def num_samples(self) -> int | None:
        """Return the samples of the whole run; None if its time decides."""
        return None if self.seconds else self.samples or DEFAULT_SAMPLES[self.task]

    @property
    def fault_plan(self) -> FaultPlan:
        """Return the plan of ``--faults``, which may be empty."""
        return FaultPlan() if self.faults is None else FaultPlan.parse(self.faults, self.workers)

    @property
    def least_s(self) -> float:
        """Return the seconds that the run trains at least; 0 if samples alone decide."""
        if self.seconds or self.samples:
            return self.seconds or 0.0
        return least_duration_s(self.fault_plan, restart=self.restart)
