"""The page: all sections of a run in one file that refers to nothing outside itself."""

from __future__ import annotations

from html import escape
from importlib import resources
from statistics import fmean

import gossipdp
from gossipdp.observe.run_log import RunLog
from gossipdp.report.figures import exchange_counts
from gossipdp.report.html.chart_sections import (
    consensus_section,
    exchanges_section,
    loss_section,
    throughput_section,
    timeline_section,
)
from gossipdp.report.html.run_view import RunView
from gossipdp.report.html.svg import duration, number
from gossipdp.report.html.table_sections import (
    configuration_section,
    faults_section,
    plan_section,
    workers_section,
)


def render(run_log: RunLog, name: str) -> str:
    """The page of a run as HTML; ``name`` is what the run is called in the title."""
    view = RunView(run_log)
    counts = pair_counts(run_log)
    sections = [
        ("timeline", "Timeline", timeline_section(view)),
        ("loss", "Loss", loss_section(view)),
        ("consensus", "How far apart the workers are", consensus_section(view)),
        ("exchanges", "Who exchanged with whom", exchanges_section(view, counts)),
        ("throughput", "Link throughput", throughput_section(view)),
        ("faults", "Faults", faults_section(view)),
        ("plan", "The plan and the run", plan_section(view, counts)),
        ("workers", "Workers", workers_section(view)),
        ("configuration", "Configuration", configuration_section(view)),
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
    num_workers = view.log.num_ranks
    gossips = view.configuration.get("method") in ("a2cid2", "gossip") and num_workers > 1
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
        tiles.append(("exchanges", number(view.exchanges), f"{num_workers} workers"))
        tiles.append(
            (
                "comm rate",
                f"{achieved:.2f}" if achieved is not None else "–",
                f"asked for {asked:g}" if asked is not None else "",
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
