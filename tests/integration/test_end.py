import logging
import os
from pathlib import Path

import pytest
from small_run import SmallRun
from waiting import FOR_EVER_S, wait_until

from gossipdp import Network

pytestmark = pytest.mark.processes


def logged(log: Path, budget: int | None = None) -> SmallRun:
    """Return a run whose warnings go to ``log``."""
    logging.getLogger("gossipdp").addHandler(logging.FileHandler(log / f"{os.getpid()}.log"))
    return SmallRun(0.0, network=Network(timeout_s=FOR_EVER_S), budget_samples=budget)


def said_in(log: Path) -> str:
    """Return what all workers have said since the last call."""
    said = ""
    for path in log.glob("*.log"):
        said += path.read_text()
        path.unlink()
    return said


def forget(log: Path, saves: bool) -> None:
    run = logged(log)
    run.step()  # of its own: it may answer an exchange before
    # Of each worker, since a budget might be used up by one; after it has given the other a state.
    wait_until(lambda: run.model.stats().exchanges > 0, "an exchange", run.step)
    with run.model.averaged():  # an evaluation
        pass
    if saves:
        run.model.save_averaged(log / f"{run.rank}.pt")
    if run.rank > 0:
        wait_until(lambda: "lost" in run.noticed(), "worker 0 has ended")


def test_a_forgotten_consolidate_is_said_once(workers, tmp_path):
    workers(forget, 2, (tmp_path, False))
    said = said_in(tmp_path)
    assert said.count("ends without consolidate(): its module holds its own") == 1
    assert "worker 0 ends" in said
    workers(forget, 2, (tmp_path, True))
    assert "ends without" not in said_in(tmp_path)


def leave_the_others(log: Path, budget: int | None) -> None:
    """End worker 1 without an average: early, or after worker 0 has called ``consolidate()``."""
    run = logged(log, budget)
    run.step()
    if run.rank == 0:
        if budget is not None:
            wait_until(lambda: "lost" in run.noticed(), "worker 1 has ended")
        run.model.consolidate()
    elif budget is None:
        wait_until(lambda: run.model._worker.view()[0].state == "done", "worker 0 waits for this")


@pytest.mark.parametrize(("budget", "why"), [(None, "its module"), (1000, "the budget is not")])
def test_one_that_leaves_without_the_average_is_told_so(workers, tmp_path, budget, why):
    workers(leave_the_others, 2, (tmp_path, budget))
    said = said_in(tmp_path)
    assert said.count(f"worker 1 ends without consolidate(): {why}") == 1
    assert said.count("ended without consolidate(), which every worker has to call") == 1
