"""``gossipdp simulate``: runs on a virtual clock."""

from __future__ import annotations

import json
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
    from gossipdp_lab.simulate.command_study import make_study

    study = make_study(arguments)
    figure = _figure_of(arguments)

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

    say(*study.opening())
    jobs = study.jobs()
    timeline_jobs = study.timeline_jobs() if arguments.timeline else []
    with ProgressView("simulating", console=console) as view:
        traces = simulate_all(
            [*jobs, *timeline_jobs], processes=arguments.processes, on_progress=view.advance
        )
    ensembles = study.ensembles(traces[: len(jobs)])
    console.print(table(study, ensembles))
    say(*notes(study, ensembles))
    if arguments.json is not None:
        text = json.dumps(as_json(study, ensembles), indent=1, allow_nan=False)
        arguments.json.write_text(text + "\n", "utf-8")
        say(f"results: {arguments.json}")
    figure.parent.mkdir(parents=True, exist_ok=True)
    draw_simulation(ensembles, figure, title=study.title())
    say(f"figure: {figure}")
    if arguments.timeline:
        path = figure.with_name(f"{figure.stem}-timeline{figure.suffix}")
        draw_timeline(traces[len(jobs) :], path, title=study.timeline_title())
        say(f"timeline: {path}")
    return 0


def _figure_of(arguments: SimulateArguments) -> Path:
    """Return where the figure goes; raise ValueError if it cannot be written there."""
    parts = [arguments.workload, arguments.graph, str(arguments.workers)]
    if arguments.file is not None:
        parts = [arguments.file.stem]
    name = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in parts)
    figure = arguments.figure or Path("runs", f"simulate-{name}", "figure.png")
    if figure.suffix != ".png":
        raise ValueError(f"--figure {figure}: it is a PNG; let its name end in .png")
    there = next(parent for parent in figure.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{figure} cannot be written under {there}: pass --figure PATH")
    return figure
