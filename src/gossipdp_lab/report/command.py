"""``gossipdp report RUN_DIR``: a run as one HTML page that opens offline."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from gossipdp import rules


@dataclasses.dataclass(frozen=True)
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
    output = rules.output_file("--output", arguments.output or directory / "report.html")

    from gossipdp_lab.report.page import render
    from gossipdp_lab.report.run_log import RunLog

    run_log = RunLog.read(directory)
    page = render(run_log, directory.absolute().name)
    try:
        output.write_text(page, "utf-8")
    except OSError as error:  # such as a full disk, which names no file
        reason = f"{output} cannot be written: {error.strerror}"
        raise ValueError(f"{reason}; name a file elsewhere with --output") from None
    sys.stdout.write(f"report: {output} ({len(page.encode()) / 1e3:.0f} kB, opens offline)\n")
    return 0
