"""Files of finished runs, so that a second call goes on, and the search for learning rates."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from rich.console import Console
from support.report import Provenance, commit_here

from gossipdp import WorkerFailedError
from gossipdp_lab.console import ProgressView
from gossipdp_lab.simulate import Scenario, Trace, simulate

Finished = TypeVar("Finished")
RATE_STEP, MOST_WIDENINGS = 2.0, 7


class FinishedRuns(Generic[Finished]):
    """The finished runs by key, in memory and in a file of JSON lines.

    Args:
        path: the file; None keeps the runs in memory alone.
        kind: the type of a run.
        key: returns what tells a run from others.
    """

    def __init__(
        self, path: Path | None, kind: type[Finished], key: Callable[[Finished], Hashable]
    ) -> None:
        self._path, self._key = path, key
        self.known: dict[Hashable, Finished] = {}
        if path is None or not path.exists():
            return
        for number, text in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                run = msgspec.convert(json.loads(text), kind)
                self.known[key(run)] = run
            except (ValueError, KeyError, msgspec.MsgspecError) as error:
                raise ValueError(
                    f"{path}, line {number} is no finished run ({error!r}): delete that line"
                ) from error

    def get(self, key: Hashable, make: Callable[[], Finished]) -> Finished:
        """Return the run of this key, from the file or made now."""
        if key not in self.known:
            self.keep(make())
        return self.known[key]

    def keep(self, run: Finished) -> None:
        self.known[self._key(run)] = run
        if self._path is None:
            return
        # Python's own JSON: a run that diverged has values that are no numbers.
        line = json.dumps(msgspec.to_builtins(run)) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:  # one write: an interrupted call leaves whole lines
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


class Measured(Protocol):
    """A run that says where it was measured."""

    @property
    def provenance(self) -> Provenance | None: ...


OneRun = TypeVar("OneRun", bound=Measured)


class Campaign(FinishedRuns[OneRun]):
    """Makes the runs that are not finished, one after the other, while there is time.

    failures: why a run failed, in a line, by the label of its row.
    commits: of the source of the runs that were found or made.
    """

    def __init__(
        self,
        path: Path | None,
        kind: type[OneRun],
        key: Callable[[OneRun], Hashable],
        minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(path, kind, key)
        self._clock = clock
        self._until_s = math.inf if minutes is None else clock() + 60 * minutes
        self.failures: dict[str, str] = {}
        self.commits: set[str] = set()

    def find(self, key: Hashable, label: str, make: Callable[[], OneRun]) -> OneRun | None:
        """Return the run of this key; None if its row has failed, or no time is left for it."""
        if key not in self.known and (label in self.failures or self._clock() >= self._until_s):
            return None
        try:
            found = self.get(key, make)
        except WorkerFailedError as error:
            self.failures[label] = str(error).strip().splitlines()[-1]
            print(f"{label}: failed\n{error}", file=sys.stderr)
            return None
        if found.provenance is not None:
            self.commits.add(found.provenance.commit)
        return found


class Simulations(FinishedRuns[dict[str, Any]]):
    """Simulated runs. names: the fields that tell a run from others."""

    def __init__(self, path: Path | None, names: Sequence[str]) -> None:
        self._names = names
        super().__init__(path, dict[str, Any], self.key)

    def key(self, run: dict[str, Any]) -> str:
        return json.dumps([run[name] for name in self._names])

    def of(self, **wanted: object) -> list[dict[str, Any]]:
        """Return the runs whose fields are as wanted, by seed."""
        found = [run for run in self.known.values() if wanted.items() <= run.items()]
        return sorted(found, key=lambda run: int(run["seed"]))

    def source(self) -> str:
        """Return a sentence that names the commits of the source that made the runs."""
        commits = {
            str(run.get("commit", "older than 30 November 2026")) for run in self.known.values()
        }
        return f"Source of the runs: {', '.join(sorted(commits))}."

    def find(
        self,
        run: dict[str, Any],
        method: str,
        scenario: Callable[[], Scenario],
        outcome: Callable[[Trace], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the run of these fields, from the file or made now, with its outcome."""

        def make() -> dict[str, Any]:
            label, console = ", ".join(f"{key} {run[key]}" for key in self._names), Console()
            with ProgressView(label, console=console, line_every_s=60.0) as view:
                trace = simulate(scenario(), method, view.advance)
            loss, wall_s = trace.records[-1].loss, trace.wall_s
            console.print(f"{label}: {loss:.4f}, {wall_s:.0f} s", highlight=False)
            own = {"loss": finite([loss])[0], "wall_s": wall_s, "commit": commit_here()}
            return run | outcome(trace) | own

        return self.get(self.key(run), make)


def finite(series: Sequence[float]) -> list[float | None]:
    """Return what can be written as JSON: None for what is no number."""
    return [float(value) if math.isfinite(value) else None for value in series]


def loss_of(run: dict[str, Any]) -> float:
    """Return the final loss; infinite where the run diverged."""
    return math.inf if run["loss"] is None else float(run["loss"])


class NoBestRateError(RuntimeError):
    """The grid of learning rates was widened as far as it may be, and the best is still at its end.

    A row that diverges at every rate ends so too.
    """


def next_rate(tried: Mapping[float, float], start: Sequence[float]) -> float | None:
    """Return the learning rate to try next; None when the best one has a neighbour on both sides.

    tried: rate → loss, infinity where it diverged. start: the written grid, of factors of two.

    Raises:
        NoBestRateError: no end was found after :data:`MOST_WIDENINGS` rates beyond the grid.

    >>> next_rate({0.002: 3.1, 0.004: 3.0}, [0.002, 0.004])
    0.008
    >>> next_rate({0.002: 3.1, 0.004: 3.0, 0.008: 3.2}, [0.002, 0.004])
    """
    for rate in start:
        if rate not in tried:
            return rate
    best, rates = best_rate(tried), sorted(tried)
    if best not in (rates[0], rates[-1]):
        return None
    if len(tried) >= len(start) + MOST_WIDENINGS:
        raise NoBestRateError(
            f"the best of the learning rates {rates} is still at the end of them: start elsewhere"
        )
    return best * RATE_STEP if best == rates[-1] else best / RATE_STEP


def best_rate(tried: Mapping[float, float]) -> float:
    """Return the rate of the least loss; the smaller of two equal ones."""
    return min(sorted(tried), key=lambda rate: tried[rate])
