"""A worker that is stopped for a while, and workers that end without the average."""

import logging
import os
import signal
from pathlib import Path

import pytest
from small_run import SmallRun
from waiting import FOR_EVER_S, wait_until

from gossipdp import Network
from gossipdp.parallel.stats import Stats

pytestmark = pytest.mark.processes

SILENCE_S = 1.0


def stop_for_a_while(directory: Path) -> tuple[Stats, list[int], list[list[float]]]:
    """Rank 1 stops itself; rank 0 lets it go on once it is lost to the others."""
    run = SmallRun(0.005, network=Network(timeout_s=SILENCE_S, start_timeout_s=60.0))

    def exchange() -> None:
        before = run.model.stats().exchanges
        wait_until(lambda: run.model.stats().exchanges > before, "an exchange", run.step)

    (directory / f"pid-{run.rank}").write_text(str(os.getpid()))
    if run.rank == 1:
        exchange()
        os.kill(os.getpid(), signal.SIGSTOP)
        exchange()
    else:
        wait_until(lambda: "lost" in run.noticed(), "worker 1 is lost", run.step)
        if run.rank == 0:
            exchange()
            os.kill(int((directory / "pid-1").read_text()), signal.SIGCONT)
        wait_until(lambda: "answered" in run.noticed(), "worker 1 answers again", run.step)
    assert run.model.consolidate().world_size == 3
    restarts = [member.restarts for member in run.model._worker.view()]
    return run.model.stats(), restarts, [value.tolist() for value in run.net.parameters()]


def test_a_stopped_worker_is_noticed_and_takes_part_again_when_it_goes_on(workers, tmp_path):
    ends = workers(stop_for_a_while, 3, (tmp_path,))
    for rank, (stats, restarts, values) in enumerate(ends):
        assert values == ends[0][2]
        assert restarts == [0, 0, 0], "no other life began"
        of_it = [notice for notice in stats.noticed if notice.rank == 1]
        if rank == 1:
            # It says of itself, once, that it was stopped, and loses none of the others.
            stops = [notice.silent_s for notice in of_it]
            assert {notice.kind for notice in of_it} == {"stopped"}
            assert len(set(stops)) == len(stops)
            assert min(stops) >= SILENCE_S
            assert not {"lost", "restarted"} & {notice.kind for notice in stats.noticed}
        else:
            # Its silence and its loss may be seen as one.
            kinds = [notice.kind for notice in of_it if notice.kind != "silent"]
            assert kinds == ["lost", "answered"]
            assert of_it[-1].silent_s >= 0.9 * SILENCE_S


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
