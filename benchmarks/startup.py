"""The time until a script trains: what gossipdp adds to torch, a model and an AdamW optimizer.

    python benchmarks/startup.py [--rounds 7]      writes benchmarks/results/startup.{json,md}

Every run is a fresh interpreter; the cases take turns. CPU time is that of the process, all of its
threads. Python's compiled files (``__pycache__``) are there, as after ``pip install``. Four workers
are also timed until the first has exchanged: all start at once, or it alone starts again after a
SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from support.report import Report, Spread, Table, interleaved, run_script
from support.startup_worker import EXCHANGE, KILLED, WRAP

from gossipdp.launcher.spares import Spares


@dataclass(frozen=True)
class Case:
    """The work of a fresh interpreter, after it has made torch, a model and its optimizer.

    spare_s: a worker that is to be killed trains for so long, in which a spare interpreter imports.
    """

    text: str
    what: str = WRAP
    num_workers: int = 1
    spare_s: float = 15.0

    def __str__(self) -> str:
        return self.text


CASES = (
    Case("import and wrap, one worker"),
    Case("until the first exchange, four start at once", EXCHANGE, num_workers=4),
    Case("until the first exchange, one of four was killed", KILLED, num_workers=4),
)


@dataclass(frozen=True)
class Start:
    """Seconds that one interpreter took after torch, model and optimizer.

    cpu_s, wall_s: for the import and the wrapper; exchange_wall_s: until an exchange was complete,
    and back_wall_s: from a kill until then; NaN if none was awaited.
    """

    cpu_s: float
    wall_s: float
    exchange_wall_s: float = math.nan
    back_wall_s: float = math.nan

    @classmethod
    def of(cls, stages: dict[str, list[float]]) -> Start:
        """Return the differences of the stages that a worker noted."""
        before, after = stages["torch"], stages["wrapped"]
        exchanged_s = stages["exchanged"][1] - before[1] if "exchanged" in stages else math.nan
        back_s = stages["since the kill"][1] if "since the kill" in stages else math.nan
        return cls(after[0] - before[0], after[1] - before[1], exchanged_s, back_s)


def measure(case: Case) -> Start:
    """Start one interpreter, or one for each of the workers, and return the times of worker 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    worker = str(Path(__file__).with_name("support") / "startup_worker.py")
    launcher = ["-m", "gossipdp", "run", "-n", str(case.num_workers)]
    launcher += ["--max-restarts", "1"] if case.what == KILLED else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stages.json"
        words = [worker, str(path), case.what, str(case.spare_s)]
        command = [sys.executable, *(launcher if case.num_workers > 1 else []), *words]
        subprocess.run(command, env=environment, check=True, timeout=300)
        return Start.of(json.loads(path.read_text("utf-8")))


def measure_spare() -> tuple[float, float]:
    """Return the MB that a spare interpreter holds for itself, and the CPU seconds it has taken."""
    spares = Spares([str(Path(__file__).with_name("support") / "startup_worker.py")], os.environ, 1)
    with closing(spares):
        spares.prepare()
        (child,) = psutil.Process().children()
        taken_s, before_s = 0.0, -1.0
        while taken_s == 0.0 or taken_s != before_s:  # until it waits
            before_s = taken_s
            time.sleep(1.0)
            taken_s = sum(child.cpu_times()[:2])
        lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text("utf-8").splitlines()
        (written_kb,) = (int(line.split()[1]) for line in lines if "Private_Dirty" in line)
        return written_kb * 1024 / 1e6, taken_s


def summary(runs: list[Start]) -> dict[str, Spread]:
    """Return the spread of each time over the runs of a case."""
    return {each.name: Spread.of(getattr(run, each.name) for run in runs) for each in fields(Start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7, help="interpreters for each case")
    parser.add_argument("--quick", action="store_true", help="one round, to see that it works")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}; it must be at least 1")
    report = Report("startup", "The start of a script", quick=options.quick)
    for case in CASES:
        measure(case)  # compiles what is kept on disk, and is not counted
    found = {case: summary(runs) for case, runs in interleaved(CASES, rounds, measure).items()}
    report.tables.append(table(found, rounds))
    spares = [measure_spare() for _ in range(rounds)]
    report.tables.append(spare_table(spares))
    result: dict[str, Any] = {case.text: figures for case, figures in found.items()}
    result["spare"] = [{"own_mb": own_mb, "cpu_s": cpu_s} for own_mb, cpu_s in spares]
    report.write(result)


def table(found: dict[Case, dict[str, Spread]], rounds: int) -> Table:
    """Return a row for each case."""
    head = ("", "CPU, beyond torch", "wall clock", "first exchange", "since the kill")
    rows = [
        (
            case.text,
            *(spread.text() if math.isfinite(spread.median) else "" for spread in times.values()),
        )
        for case, times in found.items()
    ]
    return Table(
        "Seconds until a script trains",
        head,
        rows,
        f"Medians of {rounds} fresh interpreters each (least to greatest), in turn. The first "
        f"two figures begin once torch is imported and model and optimizer are made, and end "
        f"when the model is wrapped: the wall clock of several includes the wait for one another. "
        "First exchange: by the wall clock, from where the first two begin; since the kill: until "
        "then. "
        f"Steps take 20 ms; the killed worker has a spare interpreter, as gossipdp run keeps one.",
    )


def spare_table(spares: list[tuple[float, float]]) -> Table:
    """Return the cost of a spare interpreter."""
    own_mb, cpu_s = (Spread.of(values) for values in zip(*spares, strict=True))
    return Table(
        "A spare interpreter",
        ("MB of its own", "CPU seconds for its imports"),
        [(own_mb.text(".0f"), cpu_s.text())],
        "One for each gossipdp run with --max-restarts. Its own is what it has written; files such "
        "as torch's libraries are in memory once for all processes.",
    )


if __name__ == "__main__":
    run_script(main)
