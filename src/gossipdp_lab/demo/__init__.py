"""``gossipdp demo``: several workers on this machine, with faults if you ask for them.

command   from the options to the table of results
compare   the same for ``--compare``: two trainings, a verdict and a picture
training  one training: its workers, and its results from their logs
watch     the live view of the workers, and the effects of the faults on them

The options are here. This module imports no torch, so that ``--help`` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gossipdp.launcher.faults import FaultPlan
from gossipdp.rules import at_least_1, option, positive_number
from gossipdp_lab.tasks import RunOptions

DEFAULT_SAMPLES = {"digits": 128_000, "pystdlib-small": 28_000}
"""Over all workers: 15 to 30 seconds of training by gossip on two cores."""

BACK_S, AFTER_S = 8.0, 4.0
"""A run goes on so long after its last fault: BACK_S if that worker must come back first."""

KILL_NOTICED_S, STOP_NOTICED_S = 1.0, 6.0
"""All workers that can notice a fault have noticed it after this time."""


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


def least_duration_s(plan: FaultPlan, *, restart: bool) -> float:
    """Return how long a run must train so that all faults happen, are noticed and pass.

    If a clause repeats, only its first fault counts.
    """
    least_s = 0.0
    for clause in plan.clauses:
        after_s = BACK_S if restart and clause.kind == "kill" else AFTER_S
        if clause.kind == "stop":
            least_s = max(least_s, clause.time_s + STOP_NOTICED_S + 1)
        if clause.kind != "slow" or clause.time_s:  # a slow worker may be slow all the time
            least_s = max(least_s, clause.time_s + (clause.for_s or 0.0) + after_s)
    return least_s
