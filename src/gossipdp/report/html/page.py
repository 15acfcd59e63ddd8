"""The page: all sections of a run in one file that refers to nothing outside itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from statistics import fmean

import gossipdp
from gossipdp.observe.run_log import RunLog
from gossipdp.report.figures import exchange_counts
from gossipdp.report.html.heat_map import heat_map
from gossipdp.report.html.line_chart import HALF_WIDTH, line_chart
from gossipdp.report.html.prediction import compare, constants_of, constants_told, expected_shares
from gossipdp.report.html.run_view import Event, RunView
from gossipdp.report.html.svg import duration, number
from gossipdp.report.html.timeline import EVENT_WORDS, closer_look, timeline

MOST_HEAT_WORKERS = 64
NO_LOSS = (
    "The run logged no loss. To see it here, call <code>model.log(loss=loss)</code> after each "
    "step."
)


def render(run_log: RunLog, name: str) -> str:
    """The page of a run as HTML; ``name`` is what the run is called in the title."""
    view = RunView(run_log)
    counts = pair_counts(run_log)
    sections = [
        ("timeline", "Timeline", _timeline(view)),
        ("loss", "Loss", _loss(view)),
        ("consensus", "How far apart the workers are", _consensus(view)),
        ("exchanges", "Who exchanged with whom", _exchanges(view, counts)),
        ("throughput", "Link throughput", _throughput(view)),
        ("faults", "Faults", _faults(view)),
        ("plan", "The plan and the run", _plan(view, counts)),
        ("workers", "Workers", _workers(view)),
        ("configuration", "Configuration", _configuration(view)),
    ]
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{escape(title)}</h2>{content}</section>'
        for key, title, content in sections
    )
    files = resources.files("gossipdp.report.html")
    style = files.joinpath("page.css").read_text("utf-8")
    script = files.joinpath("page.js").read_text("utf-8")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(name)} – gossipdp report</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<style>{style}</style></head><body>"
        f'<header><h1>{escape(name)}</h1><p class="subtitle">{escape(_subtitle(view))}</p></header>'
        f'{_tiles(view)}<nav aria-label="Sections">{links}</nav><main>{body}</main>'
        f"<footer>gossipdp {escape(gossipdp.__version__)}. Drawn from the logs of the workers; "
        "every number is of this run.</footer>"
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def pair_counts(run_log: RunLog) -> dict[tuple[int, int], int]:
    """Completed exchanges by (lower rank, higher rank), of those that had any."""
    counts = exchange_counts(run_log)
    return {
        (row, column): int(counts[row, column])
        for row in range(len(counts))
        for column in range(row + 1, len(counts))
        if counts[row, column]
    }


def _subtitle(view: RunView) -> str:
    configuration = view.configuration
    words = [configuration.get("graph"), f"method {configuration.get('method')}"]
    if configuration.get("method") in ("a2cid2", "gossip"):
        words.append(f"comm rate {configuration.get('comm_rate')}")
    if "parameters" in configuration:
        words.append(f"{number(configuration['parameters'])} parameters")
    return ", ".join(str(word) for word in words if word)


def _tiles(view: RunView) -> str:
    steps = sorted(view.gradient_steps.values())
    achieved = view.achieved_comm_rate
    asked = view.configuration.get("comm_rate")
    gossips = view.configuration.get("method") in ("a2cid2", "gossip") and view.log.num_workers > 1
    losses = [line[-1][1] for line in view.over_time(lambda step, _: step.loss) if line]
    distance = view.consensus_distance
    ended = sum(worker.end is not None for worker in view.log.workers.values())
    tiles = [
        (
            "duration",
            duration(view.duration_s),
            f"{ended} of {len(view.ranks)} workers came to the end",
        ),
        (
            "samples",
            number(view.samples),
            f"{number(view.samples / view.duration_s)} a second" if view.duration_s else "",
        ),
        (
            "gradient steps",
            number(sum(steps)),
            f"{number(steps[0])} to {number(steps[-1])} a worker" if steps else "",
        ),
        (
            "last loss",
            number(fmean(losses)) if losses else "not logged",
            "mean of the workers" if losses else "",
        ),
    ]
    if gossips:
        tiles.append(("exchanges", number(view.exchanges), f"{view.log.num_workers} workers"))
        tiles.append(
            (
                "comm rate",
                f"{achieved:.2f}" if achieved is not None else "–",
                f"asked for {asked:g}",
            )
        )
    tiles.append(
        (
            "consensus distance",
            number(distance) if distance is not None else "unknown",
            "exact, at the end" if distance is not None else "no worker came to the end",
        )
    )
    cells = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for key, value, more in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _labels(view: RunView) -> list[str]:
    return [f"worker {rank}" for rank in view.ranks]


def _timeline(view: RunView) -> str:
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


def _loss(view: RunView) -> str:
    over_time = view.over_time(lambda step, _: step.loss)
    if not any(over_time):
        return f'<p class="nothing">{NO_LOSS}</p>'
    over_samples = view.loss_over_samples()
    chart_of_time = line_chart(
        "Training loss against time",
        over_time,
        _labels(view),
        x_label="time (s)",
        y_label="training loss",
        x_end=view.duration_s,
        width=HALF_WIDTH,
        gap=view.gap_s,
    )
    chart_of_samples = line_chart(
        "Training loss against samples",
        over_samples,
        _labels(view),
        x_label="samples, all workers together",
        y_label="training loss",
        x_end=float(max(1, view.samples)),
        width=HALF_WIDTH,
    )
    return (
        f'<div class="pair"><div><h3>Against time</h3>{chart_of_time}</div>'
        f"<div><h3>Against samples</h3>{chart_of_samples}</div></div>"
    )


def _consensus(view: RunView) -> str:
    distance = view.consensus_distance
    chart = line_chart(
        "Edge distance against time",
        view.over_time(lambda _, exchange: exchange.edge_distance),
        _labels(view),
        x_label="time (s)",
        y_label="edge distance",
        x_end=view.duration_s,
        gap=view.gap_s,
        marks=[] if distance is None else [(view.duration_s, distance)],
        mark_label="consensus distance at the end, exact",
    )
    return (
        "<p>During the run: the <em>edge distance</em>, half the mean squared distance to the "
        "partner over a worker's last 16 exchanges. It is far smaller than the consensus distance "
        "on sparse graphs. At the end: the exact <em>consensus distance</em>, the mean squared "
        f"distance to the average, just before averaging.</p>{chart}"
    )


def _exchanges(view: RunView, counts: dict[tuple[int, int], int]) -> str:
    if view.log.num_workers == 1:
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


def _throughput(view: RunView) -> str:
    chart = line_chart(
        "Bytes sent a second against time",
        view.sending(),
        _labels(view),
        x_label="time (s)",
        y_label="sent (B/s)",
        x_end=view.duration_s,
        is_linear=True,
        gap=view.gap_s,
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
        slowest = f"<h3>{shown}</h3>" + _table(
            ("link", "exchanges seen", "median duration (ms)", "while exchanging (MB/s each way)"),
            rows[:10],
        )
    return (
        "<p>What leaves each worker, through sockets and shared memory. A link's speed while it "
        f"exchanges is a mean exchange's {number(view.bytes_per_exchange())} bytes over the median "
        f"duration.</p>{chart}{slowest}"
    )


def _faults(view: RunView) -> str:
    events = view.events()
    unended = [f"worker {rank}" for rank, worker in view.log.workers.items() if worker.end is None]
    missing = sorted(set(range(view.log.num_workers)) - set(view.ranks))
    words = []
    if unended:
        words.append(
            f"Without an end in the log: {', '.join(unended)}. The run goes on, or they were "
            "killed, or left without <code>consolidate()</code>."
        )
    if missing:
        words.append(f"No log here of worker {', '.join(map(str, missing))}.")
    paragraphs = "".join(f"<p>{each}</p>" for each in words)
    if not events:
        return f'<p class="nothing">No death, stop or return was noticed.</p>{paragraphs}'
    rows = [
        (
            f"{event.time_s:.2f}",
            str(event.rank),
            EVENT_WORDS.get(event.what, event.what),
            _seen(event),
        )
        for event in events
    ]
    return _table(("time (s)", "worker", "what", "noticed by"), rows) + paragraphs


def _seen(event: Event) -> str:
    others = [rank for rank in event.witnesses if rank != event.rank]
    if not others:
        return "itself"
    spread_s = event.last_noticed_s - event.time_s
    told = f"worker {', '.join(map(str, others))}"
    return f"{told}, the last {duration(spread_s)} later" if spread_s > 0.01 else told


def _plan(view: RunView, counts: dict[tuple[int, int], int]) -> str:
    rows = compare(view, counts)
    constants = constants_of(view)
    if not rows or constants is None:
        return (
            '<p class="nothing">Nothing was planned: one worker, a method without exchanges, or a '
            "graph too large to be logged.</p>"
        )
    table = _table(("", "plan", "run"), [(row.quantity, row.planned, row.happened) for row in rows])
    return (
        "<p>The plan is theory for an ideal network without gradients "
        "(<code>gossipdp plan</code>): "
        f"{escape(constants_told(constants))}.</p>{table}"
    )


def _workers(view: RunView) -> str:
    rows = []
    for rank, worker in view.log.workers.items():
        step = worker.steps[-1] if worker.steps else None
        exchange = worker.exchanges[-1] if worker.exchanges else None
        rows.append(
            (
                str(rank),
                str(worker.start.configuration.get("host", "")),
                f"{step.gradient_steps:,}" if step else "0",
                f"{step.samples / step.time_s:,.0f}" if step and step.time_s else "–",
                f"{exchange.exchanges_initiated:,} + {exchange.exchanges_answered:,}"
                if exchange
                else "0",
                f"{exchange.exchanges_failed:,}" if exchange else "0",
                f"{exchange.waited_seconds:.1f}" if exchange else "0",
                str(len(worker.lives)),
            )
        )
    heads = (
        "worker",
        "host",
        "gradient steps",
        "samples/s",
        "exchanges asked + answered",
        "stopped before their end",
        "waited (s)",
        "lives",
    )
    return _table(heads, rows)


def _configuration(view: RunView) -> str:
    configuration = {
        name: value for name, value in view.configuration.items() if name not in ("edges", "host")
    }
    differing = {
        name
        for worker in view.log.workers.values()
        for name, value in configuration.items()
        if worker.start.configuration.get(name) != value
    }
    rows = [
        (name.replace("_", " "), _shown(value) + (" (differs)" if name in differing else ""))
        for name, value in configuration.items()
    ]
    logged = {
        name: value
        for worker in view.log.workers.values()
        for name, value in worker.last_values().items()
    }
    parts = [f'<div class="pair"><div><h3>The wrapper</h3>{_table(("", ""), rows)}</div>']
    if logged:
        values = [(name.replace("_", " "), _shown(value)) for name, value in logged.items()]
        parts.append(f"<div><h3>Logged by the script, latest</h3>{_table(('', ''), values)}</div>")
    return "".join(parts) + "</div>"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | int):
        return str(value)
    return json.dumps(value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads) if any(heads) else ""
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    header = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="table"><table>{header}<tbody>{lines}</tbody></table></div>'
