"""The sections of the page that draw: what happened when, and between whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossipdp.report.html.heat_map import heat_map
from gossipdp.report.html.line_chart import HALF_WIDTH, line_chart
from gossipdp.report.html.prediction import constants_of, expected_shares
from gossipdp.report.html.run_view import Points, RunView
from gossipdp.report.html.svg import number
from gossipdp.report.html.table_sections import table
from gossipdp.report.html.timeline import closer_look, timeline

MOST_HEAT_WORKERS = 64
NO_LOSS = (
    "The run logged no loss. To see it here, call <code>model.log(loss=loss)</code> after each "
    "step."
)


def timeline_section(view: RunView) -> str:
    """What every worker did when, and single exchanges."""
    closer = closer_look(view)
    detail = (
        "<h3>A closer look</h3><p>Single exchanges from the middle of the run, as both ends logged "
        f"them; the colour says with whom.</p>{closer}"
        if closer
        else ""
    )
    return (
        "<p>A row a worker. The height of a colour is its share of the time; exchanges go on "
        f"beside computing, in the lower lane.</p>{timeline(view)}{detail}"
    )


def loss_section(view: RunView) -> str:
    """The loss against time and against samples."""
    over_time = view.over_time(lambda step, _: step.loss)
    if not any(over_time):
        return f'<p class="nothing">{NO_LOSS}</p>'
    chart_of_time = _time_chart(
        view, "Training loss against time", over_time, y_label="training loss", width=HALF_WIDTH
    )
    samples_at = view.samples_at()
    chart_of_samples = line_chart(
        "Training loss against samples",
        [[(samples_at(time_s), loss) for time_s, loss in line] for line in over_time],
        _labels(view),
        x_label="samples, all workers together",
        y_label="training loss",
        x_end=float(max(1, view.samples)),
        starts_of_pieces=[
            [samples_at(time_s) for time_s in starts] for starts in view.starts_of_pieces(over_time)
        ],
        width=HALF_WIDTH,
    )
    return (
        f'<div class="pair"><div><h3>Against time</h3>{chart_of_time}</div>'
        f"<div><h3>Against samples</h3>{chart_of_samples}</div></div>"
    )


def consensus_section(view: RunView) -> str:
    """How far apart the workers were."""
    distance = view.consensus_distance
    chart = _time_chart(
        view,
        "Edge distance against time",
        view.over_time(lambda _, exchange: exchange.edge_distance),
        y_label="edge distance",
        marks=[] if distance is None else [(view.duration_s, distance)],
        mark_label="consensus distance at the end, exact",
    )
    return (
        "<p>During the run: the <em>edge distance</em>, half the mean squared distance to the "
        "partner over a worker's last 16 exchanges. It is far smaller than the consensus distance "
        "on sparse graphs. At the end: the exact <em>consensus distance</em>, the mean squared "
        f"distance to the average, just before averaging.</p>{chart}"
    )


def exchanges_section(view: RunView, counts: dict[tuple[int, int], int]) -> str:
    """Heat maps of pairs; ``counts``: completed exchanges by (lower rank, higher rank)."""
    if view.log.num_ranks == 1:
        return '<p class="nothing">One worker has nobody to exchange with.</p>'
    if not counts:
        return '<p class="nothing">No exchanges.</p>'
    ranks = sorted({*view.ranks, *(rank for pair in counts for rank in pair)})
    cut = ""
    if len(ranks) > MOST_HEAT_WORKERS:
        cut = f"<p>The first {MOST_HEAT_WORKERS} of {len(ranks)} workers.</p>"
        ranks = ranks[:MOST_HEAT_WORKERS]
    constants = constants_of(view)
    expected = expected_shares(constants) if constants else {}
    total = sum(counts.values())
    speeds = view.link_speeds()

    def tell_count(pair: tuple[int, int], value: float) -> str:
        planned = f", planned {expected[pair]:.1%}" if pair in expected else ""
        return f"{pair[0]} – {pair[1]}: {value:,.0f} exchanges, {value / total:.1%} of all{planned}"

    def tell_time(pair: tuple[int, int], value: float) -> str:
        speed = speeds[pair]
        return (
            f"{pair[0]} – {pair[1]}: median {value:.2f} ms of {speed.num_seen} seen, "
            f"{speed.bytes_per_s / 1e6:.1f} MB/s each way"
        )

    first = heat_map(
        "Completed exchanges by pair of workers",
        ranks,
        {pair: float(count) for pair, count in counts.items()},
        show=lambda value: f"{value:.0f}",
        tell=tell_count,
    )
    second = heat_map(
        "Median duration of an exchange by pair of workers",
        ranks,
        {pair: speed.median_s * 1e3 for pair, speed in speeds.items()},
        show=lambda value: f"{value:.1f}",
        tell=tell_time,
    )
    return (
        f'{cut}<div class="pair"><div><h3>Completed exchanges</h3>{first}</div>'
        f"<div><h3>Median duration of an exchange (ms)</h3>{second}</div></div>"
    )


def throughput_section(view: RunView) -> str:
    """What each worker sent, and the slowest links."""
    chart = _time_chart(
        view,
        "Bytes sent a second against time",
        view.sending(),
        y_label="sent (B/s)",
        is_linear=True,
    )
    speeds = view.link_speeds()
    rows = [
        (
            f"{pair[0]} – {pair[1]}",
            str(speed.num_seen),
            f"{speed.median_s * 1e3:.2f}",
            f"{speed.bytes_per_s / 1e6:.1f}",
        )
        for pair, speed in sorted(speeds.items(), key=lambda item: item[1].bytes_per_s)
    ]
    slowest = ""
    if rows:
        shown = "The ten slowest links" if len(rows) > 10 else "Links, the slowest first"
        slowest = f"<h3>{shown}</h3>" + table(
            ("link", "exchanges seen", "median duration (ms)", "while exchanging (MB/s each way)"),
            rows[:10],
        )
    return (
        "<p>What leaves each worker, through sockets and shared memory. A link's speed while it "
        f"exchanges is a mean exchange's {number(view.bytes_per_exchange())} bytes over the median "
        f"duration.</p>{chart}{slowest}"
    )


def _time_chart(view: RunView, name: str, lines: Sequence[Points], **more: Any) -> str:
    """A line a worker over the whole run's time; ``more`` as for ``line_chart``."""
    return line_chart(
        name,
        lines,
        _labels(view),
        x_label="time (s)",
        x_end=view.duration_s,
        starts_of_pieces=view.starts_of_pieces(lines),
        **more,
    )


def _labels(view: RunView) -> list[str]:
    return [f"worker {rank}" for rank in view.ranks]
