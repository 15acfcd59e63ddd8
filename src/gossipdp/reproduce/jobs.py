"""Many jobs over processes, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from gossipdp.report.progress import ProgressView
from gossipdp.reproduce.section import Effort
from gossipdp.simulate.batch import run_all
from gossipdp.simulate.simulation import Progress

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def run_jobs(
    function: Callable[[Job], Answer],
    jobs: Sequence[Job],
    effort: Effort,
    label: str,
    *,
    cost: Callable[[Job], float] = lambda job: 1.0,
) -> list[Answer]:
    """``[function(job) for job in jobs]``, over the processes of ``effort``.

    Args:
        function: a function at the top of its module.
        jobs: picklable.
        effort: its processes and whether to show progress.
        label: what the progress bar is called.
        cost: how long a job takes, in any unit: the longest are started first, and the progress
            bar counts it.
    """
    with _progress_bar(effort, label) as on_progress:
        return run_all(
            partial(_without_progress, function),
            jobs,
            processes=effort.num_processes,
            costs=[cost(job) for job in jobs],
            on_progress=on_progress,
        )


def _without_progress(function: Callable[[Job], Answer], job: Job, on_progress: Progress) -> Answer:
    return function(job)


@contextmanager
def _progress_bar(effort: Effort, label: str) -> Iterator[Progress]:
    if not effort.show_progress:
        yield lambda share: None
        return
    from rich.console import Console

    with ProgressView(label, console=Console(stderr=True)) as view:
        yield view.advance
