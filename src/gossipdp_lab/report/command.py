"""``gossipdp report``: a run as one HTML page that opens offline, drawn as SVG from its logs.

``page.html`` has the words and the order of the page and ``charts.html`` the drawings; this module
gives both their numbers.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro

import gossipdp
from gossipdp.observe.events import Event
from gossipdp.observe.goodput import goodput_of
from gossipdp.rules import output_file
from gossipdp_lab.report.charts import duration, heat_map, line_chart, number, timeline
from gossipdp_lab.report.run_log import RunLog
from gossipdp_lab.report.view import Pause, RunView

SECTIONS = {
    "timeline": "Timeline",
    "loss": "Loss",
    "consensus": "How far apart the workers are",
    "exchanges": "Exchanges by edge",
    "links": "Links",
    "faults": "Faults",
    "workers": "Workers",
    "configuration": "Configuration",
}

Row = tuple[object, ...]


@dataclass(frozen=True)
class ReportArguments:
    """Make an HTML page of a run from the logs of its workers."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory with the logs: --log-dir of gossipdp run, log_dir of Monitor in the script, or
    --output of gossipdp demo or train."""

    output: Path | None = None
    """File of the page; by default report.html in that directory."""


def run(arguments: ReportArguments) -> int:
    """Write the page, print its path and return the exit status.

    Raises:
        ValueError: there is no such directory, or no log in it that can be read.
    """
    directory = arguments.directory
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}; give the run's log_dir")
    output = output_file("--output", arguments.output or directory / "report.html")
    run_log = RunLog.read(directory)
    page = render(run_log, directory.absolute().name)
    try:
        output.write_text(page, "utf-8")
    except OSError as error:  # such as a full disk, which names no file
        reason = f"{output} cannot be written: {error.strerror}"
        raise ValueError(f"{reason}; name a file elsewhere with --output") from None
    sys.stdout.write(f"report: {output} ({len(page.encode()) / 1e3:.0f} kB, opens offline)\n")
    return 0


def render(run_log: RunLog, name: str) -> str:
    """Return the page of a run as HTML; ``name`` is the run's name in the title."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gossipdp_lab", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    # No number that page.js reads is NaN.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    files = resources.files("gossipdp_lab.report")
    styles = resources.files("gossipdp.observe").joinpath("style.css"), files.joinpath("page.css")
    view = RunView(run_log)
    num_bytes = view.bytes_per_exchange()
    return environment.get_template("page.html").render(
        name=name,
        version=gossipdp.__version__,
        style=Markup("".join(each.read_text("utf-8") for each in styles)),
        script=Markup(files.joinpath("page.js").read_text("utf-8")),
        sections=SECTIONS,
        subtitle=_subtitle(view),
        tiles=_tiles(view),
        num_workers=view.num_ranks,
        timeline=timeline(view),
        pauses=[_pause(view, each) for each in view.pauses],
        loss=line_chart(view, "loss", y_label="training loss"),
        consensus=line_chart(
            view,
            "edge_distance",
            y_label="edge distance",
            end=view.consensus_distance,
            end_label="consensus distance at the end, exact",
        ),
        exchanges=heat_map(view),
        bytes_per_exchange=number(num_bytes),
        links=[
            (
                f"{one} – {other}",
                num_seen,
                f"{median_s * 1e3:.2f}",
                f"{num_bytes / max(median_s, 1e-6) / 1e6:.1f}",
            )
            for (one, other), num_seen, median_s in view.links()
        ],
        faults=_faults(view),
        workers=[_worker_row(view, rank) for rank in view.ranks],
        configuration=_configuration(view),
        logged=[
            (name.replace("_", " "), _shown(value))
            for worker in view.workers.values()
            for name, value in worker.last_values().items()
        ],
    )


def _subtitle(view: RunView) -> str:
    configuration = view.configuration
    words = [configuration.get("graph"), f"method {configuration.get('method')}"]
    if view.gossips:
        words.append(f"comm rate {configuration.get('comm_rate')}")
    if "parameters" in configuration:
        words.append(f"{number(configuration['parameters'])} parameters")
    return ", ".join(str(word) for word in words if word)


def _tiles(view: RunView) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the page: name, value, and a note."""
    steps = sorted(step.gradient_steps for step in view.last.values())
    samples = sum(step.samples for step in view.last.values())
    losses = [line[-1][1] for line in view.over_time("loss") if line]
    ended = sum(worker.end is not None for worker in view.workers.values())
    come = f"{ended} of {len(view.ranks)} workers came to the end"
    speed = f"{number(samples / view.duration_s)} a second" if view.duration_s else ""
    range_of_steps = f"{number(steps[0])} to {number(steps[-1])} a worker" if steps else ""
    loss = number(fmean(losses)) if losses else "not logged"
    tiles = [
        ("duration", duration(view.duration_s), come),
        ("samples", number(samples), speed),
        ("gradient steps", number(sum(steps)), range_of_steps),
        ("last loss", loss, "mean of the workers" if losses else ""),
        *_goodput_tile(view),
    ]
    if view.gossips and view.num_ranks > 1:
        # Each was initiated by one worker, and counts for two.
        num_exchanges = sum(last.exchanges_initiated for last in view.last.values())
        rate = f"{2 * num_exchanges / sum(steps):.2f}" if any(steps) else "–"
        asked = view.configuration.get("comm_rate")
        asked_for = f"asked for {asked:g}" if isinstance(asked, float | int) else ""
        if asked == "auto":
            bounds = Counter(last.comm_rate_bound for last in view.last.values())
            asked_for = f"set by itself: {bounds.most_common(1)[0][0]}" if bounds else ""
        tiles.append(("exchanges", number(num_exchanges), f"{view.num_ranks} workers"))
        tiles.append(("comm rate", rate, asked_for))
    if (distance := view.consensus_distance) is None:
        return [*tiles, ("consensus distance", "unknown", "no worker came to the end")]
    return [*tiles, ("consensus distance", number(distance), "exact, at the end")]


def _goodput_tile(view: RunView) -> list[tuple[str, str, str]]:
    """Return the share of the samples at full speed; none for a log too short to know it.

    Lost a fault is (1 - goodput) Σ T / faults, in seconds of one worker: all that is lost is laid
    to the faults, also what evaluations and saving took.
    """
    goodput, faults = goodput_of(view.parts.values()), view.num_faults
    if math.isnan(goodput):
        return []
    note = "no fault was seen"
    if faults:
        lost_s = (1.0 - goodput) * sum(part.seconds for part in view.parts.values())
        note = f"{lost_s / faults:.1f} s lost a fault, of {faults}"
    return [("goodput", f"{goodput:.1%}", note)]


# Words and tables.


def _faults(view: RunView) -> dict[str, Any]:
    """Return losses, silences and returns, and the workers without an end or a log."""
    unended = view.unended()
    missing = sorted(set(range(view.num_ranks)) - set(view.ranks))
    return {
        "events": [
            (f"{event.at_s:.2f}", event.rank, event.words, _witnesses(event), view.known_of(event))
            for event in view.events
        ],
        "unended": ", ".join(
            f"worker {rank} ({known})" if known else f"worker {rank}"
            for rank, known in unended.items()
        ),
        "unknown": ", ".join(str(rank) for rank, known in unended.items() if not known),
        "missing": ", ".join(map(str, missing)),
    }


def _pause(view: RunView, pause: Pause) -> str:
    """Return a pause in words, in this machine's time of day."""
    dates_s = (view.started_at + each for each in (pause.start_s, pause.end_s))
    start, end = map(time.localtime, dates_s)
    form = "%H:%M:%S" if start[:3] == end[:3] else "%Y-%m-%d %H:%M:%S"
    between = f"{time.strftime(form, start)} and {time.strftime(form, end)}"
    return f"Paused for {duration(pause.length_s)} between {between}: no worker ran."


def _witnesses(event: Event) -> str:
    others = [str(rank) for rank in event.witnesses if rank != event.rank]
    if not others:
        return "itself"
    spread_s = event.last_noticed_s - event.at_s
    names = f"worker {', '.join(others)}"
    return f"{names}, the last {duration(spread_s)} later" if spread_s > 0.01 else names


def _worker_row(view: RunView, rank: int) -> Row:
    worker, last = view.workers[rank], view.last.get(rank)
    ran_s = view.at(rank, last.time_s) - view.at(rank, 0.0) if last else 0.0
    own = goodput_of([view.parts[rank]])
    return (
        rank,
        worker.latest_start.configuration.get("host", ""),
        f"{last.gradient_steps:,}" if last else 0,
        f"{last.samples / ran_s:,.0f}" if last and ran_s else "–",
        "–" if math.isnan(own) else f"{own:.1%}",
        f"{last.exchanges_initiated:,} + {last.exchanges_answered:,}" if last else 0,
        f"{last.exchanges_failed:,}" if last else 0,
        f"{last.waited_seconds:.1f}" if last else 0,
        len(worker.lives),
    )


def _configuration(view: RunView) -> list[Row]:
    """Return the arguments of the wrapper."""
    all_of_them = [worker.latest_start.configuration for worker in view.workers.values()]
    rows: list[Row] = []
    for name, value in view.configuration.items():
        if name != "host":
            differs = any(each.get(name) != value for each in all_of_them)
            rows.append((name.replace("_", " "), _shown(value) + (" (differs)" if differs else "")))
    return rows


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, str | int) else json.dumps(value)
