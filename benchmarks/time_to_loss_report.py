"""What time_to_loss makes of its runs: scores, a table, the comparisons that count, a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from support.report import Spread, Table, Target
from time_to_loss_rows import ROWS
from time_to_loss_task import DESCRIPTION, NUM_CURVE, Clusters, evaluate, make_model
from time_to_loss_worker import WorkerResult, averages_at_marks

from gossipdp.report.simulation_figures import OKABE_ITO

Rounds = Sequence["RoundRow"]
Results = Mapping[str, Rounds]

ACCURACY_POINTS = 0.5
EASY_BELOW = 3.0


@dataclass(frozen=True)
class RoundRow:
    """One run of one row.

    samples_per_s: the sum of the workers' own speeds, each over its own training time.
    curve: (seconds, validation loss of the workers' average), with the end of the run last.
    accuracy, loss: of the average at the end; accuracy_before: of a worker before it, the mean.
    comm_rate: exchanges (or all-reduces, or averages) per worker and gradient step.
    consensus_distance: (1/n) Σ ‖x_i − mean‖² before averaging.
    waiting: share of the training time that is not the device's: others, and everything else.
    ended_s: with the averaging at the end. cpu: cores that the workers used, the mean.
    sent_mb: by a worker's interface, the mean; None without a namespace.
    """

    row: str
    samples: int
    samples_per_s: float
    curve: list[tuple[float, float]]
    accuracy: float
    loss: float
    accuracy_before: float
    comm_rate: float
    consensus_distance: float
    waiting: float
    ended_s: float
    cpu: float
    sent_mb: float | None

    def time_to(self, target_loss: float) -> float:
        """When the loss was first at most ``target_loss``; infinity where it never was.

        Between two points of the curve the logarithm of the loss is taken for linear.
        """
        before: tuple[float, float] | None = None
        for at_s, loss in self.curve:
            if loss <= target_loss:
                if before is None:
                    return at_s
                from_s, higher = before
                share = math.log(higher / target_loss) / math.log(higher / max(loss, 1e-12))
                return from_s + share * (at_s - from_s)
            before = (at_s, loss)
        return math.inf

    def as_json(self, target_loss: float) -> dict[str, Any]:
        """All values; a time that never came is null."""
        reached_s = self.time_to(target_loss)
        return asdict(self) | {"time_to_loss_s": reached_s if math.isfinite(reached_s) else None}

    def line(self, target_loss: float) -> str:
        """For progress."""
        return (
            f"{self.row}: {self.samples_per_s:.0f} samples/s, {_seconds(self.time_to(target_loss))}"
            f" to loss {target_loss:g}, accuracy {100 * self.accuracy:.2f}%, comm rate "
            f"{self.comm_rate:.2f}, ended at {self.ended_s:.1f} s, {self.cpu:.2f} cores"
        )


def score(row: str, results: Sequence[WorkerResult]) -> RoundRow:
    """Evaluate what the workers of a run gave back."""
    validation = Clusters(len(results)).validation
    few = (validation[0][:NUM_CURVE], validation[1][:NUM_CURVE])
    average = results[0].average
    assert average is not None
    final = evaluate(average, validation)
    curve = [(at_s, evaluate(mean, few).loss) for at_s, mean in averages_at_marks(results)]
    ended_s = max(result.ended_s for result in results)
    curve.append((ended_s, evaluate(average, few).loss))
    each = torch.stack([result.parameters for result in results])
    distance = (each - each.mean(dim=0)).double().square().sum() / len(results)
    steps = sum(result.steps for result in results)
    trained_s = sum(result.trained_s for result in results)
    sent = [result.sent_bytes for result in results if result.sent_bytes is not None]
    exchanges = sum(result.account.get("exchanges", 0.0) for result in results)
    if row in ("a2cid2", "gossip") and sent:
        _check_link(exchanges, sum(sent), each.shape[1])
    return RoundRow(
        row=row,
        samples=sum(result.samples for result in results),
        samples_per_s=sum(result.samples_per_s for result in results),
        curve=curve,
        accuracy=final.accuracy,
        loss=final.loss,
        accuracy_before=statistics.mean(
            evaluate(result.parameters, few).accuracy for result in results
        ),
        comm_rate=exchanges / steps,
        consensus_distance=float(distance),
        waiting=1 - sum(result.computed_s for result in results) / trained_s,
        ended_s=ended_s,
        cpu=sum(result.cpu_s for result in results) / max(r.trained_s for r in results),
        sent_mb=statistics.mean(sent) / 1e6 if sent else None,
    )


def _check_link(exchanges: float, sent_bytes: int, num_parameters: int) -> None:
    """Raise where exchanges cannot have gone over the link: the narrowest wire has 8 bits."""
    if sent_bytes < 0.9 * exchanges * num_parameters:
        raise RuntimeError(
            f"{exchanges:.0f} exchanges of {num_parameters} parameters, but the interfaces sent "
            f"{sent_bytes} bytes: they went some other way than over the link, and the table "
            "would be false"
        )


def measured_tables(results: Results, target_loss: float) -> list[Table]:
    """Medians over the rounds, with the least and the most; one line a row."""
    ideal = results.get("none", [])

    def of_ideal(row: str) -> str:
        pairs = zip(results[row], ideal, strict=False)
        ratios = [one.samples_per_s / free.samples_per_s for one, free in pairs]
        return Spread.of(ratios).text() if ratios else "-"

    speed = Table(
        "Speed",
        (
            "row",
            "samples/s",
            "of the ideal",
            f"s to loss {target_loss:g}",
            "end, s",
            "not computing, %",
            "cores used",
        ),
        [
            (
                ROWS[row][0],
                _text(many, lambda one: one.samples_per_s, ".0f"),
                of_ideal(row),
                _text(many, lambda one: one.time_to(target_loss), ".1f"),
                _text(many, lambda one: one.ended_s, ".1f"),
                _text(many, lambda one: 100 * one.waiting, ".1f"),
                _text(many, lambda one: one.cpu, ".2f"),
            )
            for row, many in results.items()
        ],
        "samples/s: the sum of the workers' own speeds; the ideal is that of the row without "
        "exchange. Time to loss: of the workers' average, from copies taken at fixed times and "
        "scored afterwards. Not computing: the share of the training time that is not the timed "
        "compute of a step: waiting for others, and all else (which the row without exchange has "
        "too).",
    )
    outcome = Table(
        "Outcome",
        (
            "row",
            "accuracy of the average, %",
            "loss of the average",
            "accuracy of a worker before, %",
            "consensus distance before",
            "comm rate",
            "MB sent a worker",
        ),
        [
            (
                ROWS[row][0],
                _text(many, lambda one: 100 * one.accuracy, ".2f"),
                _text(many, lambda one: one.loss, ".3f"),
                _text(many, lambda one: 100 * one.accuracy_before, ".2f"),
                _text(many, lambda one: one.consensus_distance, ".2g"),
                _text(many, lambda one: one.comm_rate, ".2f"),
                "-"
                if any(one.sent_mb is None for one in many)
                else _text(many, lambda one: one.sent_mb or 0.0, ".0f"),
            )
            for row, many in results.items()
        ],
        "Comm rate: exchanges, all-reduces or averages per worker and gradient step. MB sent: by "
        "a namespace's interface during training, all headers included.",
    )
    return [speed, outcome]


def settings_table(facts: Mapping[str, str]) -> Table:
    """What the figures were measured with."""
    num_parameters = sum(parameter.numel() for parameter in make_model(0).parameters())
    rows = [
        ("task", DESCRIPTION),
        ("parameters", f"{num_parameters:,} in float32"),
        *facts.items(),
    ]
    return Table("Settings", ("", ""), rows)


def targets(table: str, results: Results, target_loss: float) -> list[Target]:
    """What this table is to show; medians of ratios and differences within a round."""
    gossip, ddp, none = (results.get(row, []) for row in ("a2cid2", "ddp", "none"))
    found: list[Target] = []

    def compare(text: str, values: list[float], limit: float, *, at_most: bool = False) -> None:
        if values:
            found.append(Target(text, Spread.of(values).median, limit, at_most))

    def ratios(above: Rounds, below: Rounds, value: Callable[[RoundRow], float]) -> list[float]:
        return [_ratio(value(a), value(b)) for a, b in zip(above, below, strict=False)]

    least_speed = {"slow": 3.0, "slow_link": 5.0}.get(table)
    if least_speed is not None:
        speeds = ratios(gossip, ddp, lambda one: one.samples_per_s)
        compare("samples/s, a2cid2 over DDP", speeds, least_speed)
    if table == "slow":
        speeds = ratios(gossip, none, lambda one: one.samples_per_s)
        compare("samples/s, a2cid2 over the ideal", speeds, 0.95)
    most_time = {"equal": 1.0, "slow_link": 0.5}.get(table)
    if most_time is not None:
        times = ratios(gossip, ddp, lambda one: one.time_to(target_loss))
        compare(f"time to loss {target_loss:g}, a2cid2 over DDP", times, most_time, at_most=True)
    points = [100 * (b.accuracy - a.accuracy) for a, b in zip(gossip, ddp, strict=False)]
    compare("points of accuracy, DDP less a2cid2", points, ACCURACY_POINTS, at_most=True)
    losses = ratios(none, gossip, lambda one: one.loss)
    compare("final loss, no exchange over a2cid2 (else too easy a task)", losses, EASY_BELOW)
    return found


def draw(path: Path, condition: str, results: Results, target_loss: float) -> None:
    """Write a PNG: validation loss of the workers' average over time, a line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (row, rounds), colour in zip(results.items(), OKABE_ITO, strict=False):
        for number, one in enumerate(rounds):
            label = ROWS[row][0] if number == 0 else None
            times, losses = zip(*one.curve, strict=True)
            axes.plot(times, losses, color=colour, linewidth=1.4, alpha=0.8, label=label)
    axes.axhline(target_loss, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="time (s)")
    axes.set_ylabel("validation loss of the workers' average")
    axes.set_title(condition, fontsize="medium", wrap=True)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    if axes.lines:
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _ratio(above: float, below: float) -> float:
    """NaN, which meets no target, where either never came."""
    return above / below if math.isfinite(above) and math.isfinite(below) else math.nan


def _text(rounds: Rounds, value: Callable[[RoundRow], float], form: str) -> str:
    spread = Spread.of(map(value, rounds))
    if not math.isfinite(spread.greatest):
        reached = sum(math.isfinite(one) for one in spread.values)
        return f"reached in {reached} of {len(spread.values)}" if reached else "never"
    return spread.text(form)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if math.isfinite(value) else "never came"
