"""What time_to_loss makes of its runs: scores, a table, the comparisons that count, a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from demo_runs import RESULTS
from time_to_loss_rows import ROWS
from time_to_loss_task import NUM_CURVE, Clusters, evaluate
from time_to_loss_worker import WorkerResult, averages_at_marks

from gossipdp.report.figures import OKABE_ITO

Results = Mapping[str, Sequence["RoundRow"]]

ACCURACY_POINTS = 0.5


@dataclass(frozen=True)
class RoundRow:
    """One run of one row.

    samples_per_s: the sum of the workers' own speeds, each over its own training time.
    curve: (seconds, validation loss of the workers' average), with the end of the run last.
    accuracy, loss: of the average at the end; accuracy_before: of a worker before it, the mean.
    comm_rate: exchanges (or all-reduces, or averages) per worker and gradient step.
    consensus_distance: (1/n) Σ ‖x_i − mean‖² before averaging.
    waiting: share of the training time that is not the device's: others, and everything else.
    ended_s: with the averaging at the end. cpu: share of the machine's two cores or more, each 1.
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


def table_lines(results: Results, reasons: Mapping[str, str], target_loss: float) -> list[str]:
    """Medians over the rounds, with the least and the most; one line a row."""
    columns = {
        "samples/s": (lambda r: r.samples_per_s, "{:.0f}"),
        f"s to loss {target_loss:g}": (lambda r: r.time_to(target_loss), "{:.1f}"),
        "accuracy of the average, %": (lambda r: 100 * r.accuracy, "{:.2f}"),
        "of a worker before, %": (lambda r: 100 * r.accuracy_before, "{:.1f}"),
        "loss of the average": (lambda r: r.loss, "{:.3f}"),
        "comm rate": (lambda r: r.comm_rate, "{:.2f}"),
        "consensus distance before": (lambda r: r.consensus_distance, "{:.2g}"),
        "not computing, %": (lambda r: 100 * r.waiting, "{:.1f}"),
        "end, s": (lambda r: r.ended_s, "{:.1f}"),
        "cores used": (lambda r: r.cpu, "{:.2f}"),
    }
    if any(one.sent_mb is not None for many in results.values() for one in many):
        columns["MB sent a worker"] = (lambda r: r.sent_mb, "{:.0f}")
    lines = [f"| row | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row, rounds in results.items():
        if row in reasons:
            lines.append(
                f"| {ROWS[row][0]} | missing: {reasons[row]} |" + " |" * (len(columns) - 1)
            )
            continue
        cells = [_spread([value(one) for one in rounds], form) for value, form in columns.values()]
        lines.append(f"| {ROWS[row][0]} | {' | '.join(cells)} |")
    lines += [
        "",
        "samples/s: the sum of the workers' own speeds; that of the row without exchange is the "
        "ideal. The curve behind the time to loss is that of the workers' average, copied at fixed "
        "times and scored afterwards. Not computing: the share of the training time that is not "
        "the timed compute of a step: waiting for others, and everything else (the row without "
        "exchange shows that part). Comm rate: exchanges, all-reduces or averages per worker and "
        "gradient step.",
    ]
    return lines


def claims(table: str, results: Results, target_loss: float) -> list[str]:
    """The comparisons that this table is for, paired by round: median (least to most)."""
    lines: list[str] = []
    gossip, ddp, none = (results.get(row, []) for row in ("a2cid2", "ddp", "none"))

    def compare(
        text: str,
        values: list[float],
        holds: Callable[[float], bool],
    ) -> None:
        if values:
            verdict = "met" if holds(statistics.median(values)) else "NOT met"
            lines.append(f"- {text}: {_spread(values, '{:.2f}')}: {verdict}")

    def ratios(above: Sequence[RoundRow], below: Sequence[RoundRow], value: Any) -> list[float]:
        pairs = zip(above, below, strict=False)
        return [value(a) / value(b) if math.isfinite(value(b)) else math.nan for a, b in pairs]

    def reached_s(one: RoundRow) -> float:
        return one.time_to(target_loss)

    def speed(one: RoundRow) -> float:
        return one.samples_per_s

    least_speed = {"slow": 3.0, "slow_link": 5.0}.get(table)
    if least_speed is not None:
        compare(
            f"samples/s of a2cid2 over DDP's, at least {least_speed:g}",
            ratios(gossip, ddp, speed),
            lambda ratio: ratio >= least_speed,
        )
    if table == "slow":
        compare(
            "samples/s of a2cid2 over the ideal, at least 0.95",
            ratios(gossip, none, speed),
            lambda ratio: ratio >= 0.95,
        )
    most_time = {"equal": 1.0, "slow_link": 0.5}.get(table)
    if most_time is not None:
        compare(
            f"time to loss {target_loss:g} of a2cid2 over DDP's, at most {most_time:g}",
            ratios(gossip, ddp, reached_s),
            lambda ratio: ratio <= most_time,
        )
    compare(
        f"accuracy of a2cid2 less DDP's, in points, at least -{ACCURACY_POINTS:g}",
        [100 * (a.accuracy - b.accuracy) for a, b in zip(gossip, ddp, strict=False)],
        lambda points: points >= -ACCURACY_POINTS,
    )
    compare(
        "loss without exchange over that of a2cid2, at least 3 (else the task is too easy)",
        ratios(none, gossip, lambda one: one.loss),
        lambda ratio: ratio >= 3,
    )
    return lines


def draw(table: str, condition: str, results: Results, target_loss: float) -> None:
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
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / f"time_to_loss_{table}.png", dpi=110)


def _spread(values: Sequence[float], form: str) -> str:
    middle = statistics.median(values)
    if not math.isfinite(middle):
        return "never"
    if len(values) == 1:
        return form.format(middle)
    return f"{form.format(middle)} ({form.format(min(values))} to {form.format(max(values))})"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if math.isfinite(value) else "never came"
