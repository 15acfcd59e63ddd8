"""The report of time_to_loss: a table, and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from support.quality_rows import RowName
from support.quality_worker import RunResult
from support.report import Spread, Table


def _or_inf(loss: float | None) -> float:
    """Return a loss; infinity if the run had diverged."""
    return math.inf if loss is None else loss


@dataclass(frozen=True)
class Round:
    """One row of one round. tokens: its run on the table's tokens. time: in the table's time.

    Both are the same run where the first took no longer.
    """

    tokens: RunResult
    time: RunResult

    @property
    def loss(self) -> float:
        """At equal tokens, bits a byte; infinity where it diverged."""
        return _or_inf(self.tokens.loss)

    @property
    def loss_in_time(self) -> float:
        """At equal time."""
        return _or_inf(self.time.loss)

    @property
    def waiting(self) -> float:
        """Share of the training time that is not compute: others, and everything else."""
        return math.nan if self.tokens.computing is None else 1 - self.tokens.computing

    def line(self) -> str:
        """For progress."""
        return (
            f"{self.tokens.samples_per_s:.0f} samples/s, {self.loss:.3f} bits a byte after "
            f"{self.tokens.ended_s:.1f} s, {self.loss_in_time:.3f} at equal time, "
            f"{100 * self.waiting:.0f}% not computing"
        )


Results = Mapping[str, Sequence[Round]]


FIGURES: dict[str, tuple[str, str, Callable[[Round], float]]] = {
    "samples_per_s": ("samples/s", ".0f", lambda one: one.tokens.samples_per_s),
    "loss": ("loss at equal tokens", ".3f", lambda one: one.loss),
    "loss_at_equal_time": ("loss at equal time", ".3f", lambda one: one.loss_in_time),
    "bytes_per_parameter_step": (
        "bytes/(parameter, step)",
        ".3g",
        lambda one: one.tokens.bytes_per_parameter_step,
    ),
    "comm_rate": ("comm rate", ".3g", lambda one: one.tokens.comm_rate),
    "not_computing": ("not computing", ".1%", lambda one: one.waiting),
}
"""By the name in JSON: the column's head and format, and the figure of a round."""


def measured_table(results: Results, rates: Mapping[str, float], ideal_s: float) -> Table:
    """Medians over the rounds, with the least and the most; one line a row."""
    lines = [
        (
            RowName.parse(row).label,
            f"{rates[row]:g}",
            *(Spread.of(map(value, rounds)).text(form) for _, form, value in FIGURES.values()),
        )
        for row, rounds in results.items()
        if rounds
    ]
    return Table(
        "Loss at equal time",
        ("row", "learning rate", *(head for head, _, _ in FIGURES.values())),
        lines,
        "Losses: of the workers' average on held-out text, in bits a byte. Equal time: "
        f"{ideal_s:.1f} s, what the tokens take if nobody waits for anybody; a row that needs "
        "longer trains once more, on fewer tokens, so that it ends then. samples/s: the sum of the "
        "workers' own speeds. Bytes: sent by a worker's sockets, or, where it has a network, by "
        "its interface, with headers; a step is a full batch. Comm rate: exchanges, all-reduces or "
        "averages per worker and step of its own. Not computing: the rest of the training time.",
    )


def rows_as_json(results: Results, rates: Mapping[str, float], ideal_s: float) -> dict[str, Any]:
    """Return the content of ``--json``: by row the medians, and every run."""
    rows = {
        row: {"learning_rate": rates[row]}
        | {name: Spread.of(map(value, rounds)).median for name, (_, _, value) in FIGURES.items()}
        | {"runs": [{"tokens": one.tokens, "time": one.time} for one in rounds]}
        for row, rounds in results.items()
        if rounds
    }
    return {"equal_time_s": ideal_s, "rows": rows}
