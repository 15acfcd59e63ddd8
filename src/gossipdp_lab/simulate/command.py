"""``gossipdp simulate``: runs on a virtual clock."""

from __future__ import annotations

import os
from pathlib import Path

from gossipdp_lab.simulate.options import SimulateArguments

FILE_WIDTH = 140
"""Width of the table if it does not go to a terminal, so that its cells stay whole."""


def run(arguments: SimulateArguments) -> int:
    """Simulate, show the results and write the files; return the exit status.

    Raises:
        ValueError: bad input; nothing has been simulated or written yet.
    """
    from gossipdp_lab.simulate.command_study import (
        make_runs,
        opening,
        timeline_jobs,
        timeline_title,
        title,
    )

    runs = make_runs(arguments)
    figure = _figure_of(arguments)

    import msgspec
    from rich.console import Console

    from gossipdp_lab.progress_bar import ProgressView
    from gossipdp_lab.simulate.command_results import as_json, notes, table
    from gossipdp_lab.simulate.figures import draw_simulation, draw_timeline
    from gossipdp_lab.simulate.study import simulate_all

    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)

    def say(*lines: str) -> None:
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(*opening(arguments, runs))
    short = timeline_jobs(runs) if arguments.timeline else []
    with ProgressView("simulating", console=console) as view:
        traces = simulate_all([*(run.job for run in runs), *short], on_progress=view.advance)
    results = list(zip(runs, traces, strict=False))
    first = runs[0].job.scenario
    console.print(table(results, first.objective))
    say(*notes(results, first))
    if arguments.json is not None:
        encoded = msgspec.json.encode(as_json(arguments, results))  # NaN and inf as null
        arguments.json.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
        say(f"results: {arguments.json}")
    figure.parent.mkdir(parents=True, exist_ok=True)
    draw_simulation(results, figure, title=title(arguments))
    say(f"figure: {figure}")
    if short:
        path = figure.with_name("timeline.png")
        draw_timeline(traces[len(runs) :], path, title=timeline_title(first))
        say(f"timeline: {path}")
    return 0


def _figure_of(arguments: SimulateArguments) -> Path:
    """Return where the figure goes; raise ValueError if it cannot be written there."""
    graphs = arguments.graph.replace(",", "-")
    figure = Path("runs", f"simulate-{arguments.workload}-{graphs}-{arguments.workers}/figure.png")
    there = next(parent for parent in figure.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{figure} cannot be written under {there}: go to another directory")
    return figure
