"""Rounds in turn, medians with their spread, results and their provenance, for all benchmarks.

A benchmark prints its tables and writes them, with all that it measured, its provenance and the
rows that could not be measured, to ``benchmarks/results/NAME.{json,md}``. Quick runs show nothing,
so they write to ``runs/benchmarks``.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import gossipdp

RESULTS = Path(__file__).parents[1] / "results"
QUICK_RESULTS = Path("runs/benchmarks")

Case = TypeVar("Case")
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Spread:
    """The median of some runs, and the least and the greatest of them."""

    median: float
    least: float
    greatest: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of the values that are numbers; NaN of none."""
        found = tuple(value for value in values if not math.isnan(value)) or (math.nan,)
        return cls(statistics.median(found), min(found), max(found), found)

    def text(self, form: str = ".2f") -> str:
        if len(self.values) == 1:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.least:{form}} to {self.greatest:{form}})"


def interleaved(
    cases: Sequence[Case], num_rounds: int, measure: Callable[[Case], Measured]
) -> dict[Case, list[Measured]]:
    """Measure every case once a round; each round begins with another of them."""
    found: dict[Case, list[Measured]] = {case: [] for case in cases}
    for round_number in range(num_rounds):
        for case in rotated(cases, round_number):
            print(f"round {round_number + 1} of {num_rounds}: {case}", flush=True)
            found[case].append(measure(case))
    return found


def rotated(cases: Sequence[Case], round_number: int) -> list[Case]:
    """Return the order of a round."""
    first = round_number % max(1, len(cases))
    return [*cases[first:], *cases[:first]]


@dataclass(frozen=True)
class Table:
    """A table of the result; the cells are text. ``note`` stands below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        blocks = [f"### {self.title}", markdown_table(self.head, self.rows)]
        return "\n\n".join([*blocks, self.note] if self.note else blocks)


@dataclass(frozen=True)
class Missing:
    """A row that this machine cannot measure, and why."""

    row: str
    why: str


class Provenance(msgspec.Struct, frozen=True):
    """The origin of a result."""

    command: str
    version: str
    commit: str
    """See :func:`commit_here`."""
    hardware: str
    seconds: float
    """Duration of the measurement."""

    @classmethod
    def here(cls, seconds: float) -> Provenance:
        """Return the provenance of this script on this machine."""
        return cls(
            command=" ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            version=gossipdp.__version__,
            commit=commit_here(),
            hardware=(
                f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python "
                f"{platform.python_version()}, torch {metadata.version('torch')}, "
                f"numba {metadata.version('numba')}"
            ),
            seconds=seconds,
        )

    @property
    def code(self) -> str:
        """By what code it was measured, in words."""
        changed = ", with changes that were not committed" if self.commit.endswith("+") else ""
        return f"commit {self.commit.removesuffix('+')}{changed}"


def commit_here() -> str:
    """Return the commit of the source tree that this runs from; see :func:`commit_of`."""
    return commit_of(Path(gossipdp.__file__).parents[2])


def commit_of(tree: Path) -> str:
    """Return the commit of a source tree, with ``+`` if ``src`` or ``benchmarks`` changed since.

    ``unknown`` where the package is not part of one.
    """

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(tree), *words],
                capture_output=True, text=True, check=False, timeout=10,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "src/gossipdp/__init__.py") is None:
        return "unknown"
    measuring = ("src", "benchmarks", ":(exclude)benchmarks/results")
    changed = git("status", "--porcelain", "--", *measuring)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


@dataclass
class Report:
    """The result of one benchmark; make it before measuring and :meth:`write` it afterwards.

    Args:
        name: of the files.
        title: the question.
        quick: tiny settings, to see that everything works: the figures count for nothing.
    """

    name: str
    title: str
    quick: bool = False
    tables: list[Table] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._started_s = time.perf_counter()
        self._load = os.getloadavg()[0]
        self._cpu_s = busy_cpu_s()

    def write(self, data: Any) -> None:
        """Print the tables; write them, the notes and ``data`` (whatever msgspec can encode)."""
        seconds = time.perf_counter() - self._started_s
        by = Provenance.here(seconds)
        busy = (busy_cpu_s() - self._cpu_s) / seconds
        machine = (
            f"{processor()}; load average {self._load:.1f} when it began, "
            f"{busy:.2f} cores busy while it ran"
        )
        lines = [
            f"# {self.title}",
            f"`{by.command}`, {by.code}, {by.hardware}; {machine}; {seconds:.0f} s.",
        ]
        if self.quick:
            lines.append("**Quick run: these figures show nothing.**")
        for table in self.tables:
            lines.append(table.markdown())
            print(lines[-1], end="\n\n")
        lines += self.notes
        for row in self.missing:
            lines.append(f"Missing: {row.row}: {row.why}.")
            print(lines[-1])
        stored = {
            "benchmark": self.name,
            "quick": self.quick,
            "provenance": by,
            "machine": machine,
            "missing": self.missing,
            "result": data,
        }
        folder = results_folder(self.quick)
        folder.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.format(msgspec.json.encode(stored), indent=1)
        path = folder / f"{self.name}.json"
        path.write_bytes(encoded + b"\n")
        path.with_suffix(".md").write_text("\n\n".join(lines) + "\n", "utf-8")
        print(f"written: {os.path.relpath(path)}, {path.stem}.md", flush=True)


def asked(doc: str, rounds: int) -> tuple[bool, int]:
    """Read --quick and --rounds of the command; return whether it is quick, and the rounds.

    doc: of the script; rounds: if the command names none. A quick run has one.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    options = parser.parse_args()
    return options.quick, 1 if options.quick else options.rounds


def run_script(main: Callable[[], None]) -> None:
    """Run a script; a mistake in its call is one line and status 2."""
    try:
        main()
    except ValueError as error:
        sys.stderr.write(f"{Path(sys.argv[0]).stem}: {error}\n")
        sys.exit(2)


def results_folder(quick: bool) -> Path:
    """Return the folder of results: quick ones and `make bench`'s never join the committed ones."""
    return QUICK_RESULTS if quick else Path(os.environ.get("BENCHMARK_RESULTS") or RESULTS)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """Return a Markdown table; the first ``num_left`` columns are aligned to the left."""
    marks = ["---" if column < num_left else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, marks, *rows])


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def busy_cpu_s() -> float:
    """CPU seconds that all processes of this machine, together, have used since it started."""
    user, nice, system, _idle, _wait, irq, soft = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
