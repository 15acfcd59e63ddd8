"""``gossipdp reproduce``: the paper's figures and claims, simulated, as one page."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

ALL = "mixing,training,time,pairing,invariant"


@dataclass(frozen=True)
class ReproduceArguments:
    """Simulate the paper's results and write a page with figures, tables and what differs."""

    only: str = ALL
    """Sections to measure, with commas between; the others keep what was measured before."""

    quick: bool = False
    """Tiny settings, about a minute: that it works, and no more; the page says so."""

    output: Path = Path("docs")
    """Directory of the page, reproduction.md; its figures and data go to figures/ in it."""

    processes: int | None = None
    """Processes that simulate side by side; by default one a core."""


def run(arguments: ReproduceArguments) -> int:
    """Measure and write; returns the exit status, 2 for bad input."""
    from gossipdp.reproduce.page import reproduce
    from gossipdp.reproduce.section import Effort

    cores = len(os.sched_getaffinity(0))
    try:
        effort = Effort(
            quick=arguments.quick,
            num_processes=cores if arguments.processes is None else arguments.processes,
            show_progress=True,
        )
        names = [name.strip() for name in arguments.only.split(",") if name.strip()]
        if not names:
            raise ValueError(f"--only {arguments.only!r} names no section; choose among {ALL}")
        page = reproduce(names, arguments.output, effort, _command(arguments))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"gossipdp reproduce: {error}\n")
        return 2
    sys.stdout.write(f"page: {page}\n")
    return 0


def _command(arguments: ReproduceArguments) -> str:
    """How to get the same: what changes neither numbers nor text is left out."""
    words = ["gossipdp", "reproduce"]
    if arguments.only != ALL:
        words += ["--only", arguments.only]
    if arguments.quick:
        words.append("--quick")
    return " ".join(words)
