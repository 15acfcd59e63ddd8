"""Workers that are stopped, hang, are killed, or end without the average."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from small_run import SmallRun
from waiting import FOR_EVER_S, wait_until

from gossipdp import Monitor, Network, WorkerFailedError
from gossipdp.launcher.environment import show_address
from gossipdp.observe.board import JobStatus, StatusBoard
from gossipdp.observe.status import StatusPoll
from gossipdp.parallel.stats import Stats

pytestmark = pytest.mark.processes

SILENCE_S = 1.0
NUM_WORKERS = 4


def small_run() -> SmallRun:
    return SmallRun(0.005, network=Network(timeout_s=SILENCE_S, start_timeout_s=60.0))


def stop_for_a_while(directory: Path) -> tuple[Stats, list[int], list[list[float]]]:
    """Rank 1 stops itself; rank 0 lets it go on a while after it is lost to both others."""
    run, lost = small_run(), directory / "lost-2"

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
        if run.rank == 2:
            lost.touch()
        else:
            exchange()
            wait_until(lost.exists, "worker 1 is lost to worker 2 too", run.step)
            # It was heard last a little before its stop, which has to last for the time-out.
            again_s = time.monotonic() + SILENCE_S / 4
            run.train_until(lambda: time.monotonic() > again_s)
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


def hang(directory: Path) -> list[list[float]] | None:
    """Hang in the training loop of rank 2, while its gossip thread beats."""
    run = small_run()
    wait_until(lambda: run.model.stats().exchanges > 0, "an exchange", run.step)
    if run.rank == 2:
        ends = [directory / "end-0", directory / "end-1"]
        wait_until(lambda: all(path.exists() for path in ends), "the others have ended")
        run.model.close()
        return None
    (directory / f"ready-{run.rank}").touch()
    both = [directory / "ready-0", directory / "ready-1"]
    wait_until(lambda: all(path.exists() for path in both), "both are ready", run.step)
    began_s = time.monotonic()
    assert run.model.consolidate(timeout_s=1.0).world_size == 2
    # Worker 0 leads: its wait ends that of worker 1, which may have called a moment later.
    assert run.rank == 1 or time.monotonic() >= began_s + 1.0
    (directory / f"end-{run.rank}").touch()
    return [value.tolist() for value in run.net.parameters()]


def test_consolidate_goes_on_without_a_training_loop_that_hangs(workers, tmp_path):
    one, other, nothing = workers(hang, 3, (tmp_path,))
    assert one == other != nothing


def show_status(directory: Path) -> None:
    """Train until the file ``enough`` is there; worker 0 tells where it shows its status."""
    network, monitor = Network(timeout_s=1.0), Monitor(status_port=0)
    run = SmallRun(0.005, graph="ring", network=network, monitor=monitor)
    page = run.model._worker.monitoring.page
    if run.rank == 0:
        assert page is not None
        (directory / "new").write_text(show_address(*page.announced("")))
        (directory / "new").rename(directory / "address")
    run.pause_s *= 10 if run.rank == 3 else 1
    run.train_until((directory / "enough").exists)
    run.model.consolidate()


def states(job: JobStatus) -> list[str]:
    return [worker.state for worker in job.workers]


def test_one_address_shows_the_whole_job_and_the_others_the_death_of_its_worker(workers, tmp_path):
    killed: list[int] = []
    seen: list[JobStatus] = []
    boards: list[StatusBoard] = []

    def is_all_there(job: JobStatus) -> bool:
        return (
            states(job) == ["training"] * 3 + ["slow"]
            and all(len(worker.neighbours or ()) == 2 for worker in job.workers)
            and all(worker.exchanges and worker.samples_per_second for worker in job.workers)
        )

    def look() -> None:
        now_s, address = time.monotonic(), tmp_path / "address"
        if not boards:
            boards.extend([StatusBoard([address.read_text()])] if address.exists() else [])
            return
        boards[0].take(poll.answers(boards[0].addresses(), 0.2), now_s)
        if not boards[0].has_answers:
            return
        seen.append(job := boards[0].job(now_s))
        first = job.workers[0]
        if not killed and is_all_there(job):
            assert first.status_address == address.read_text()
            assert first.process_id is not None
            killed.append(first.process_id)
            os.kill(first.process_id, signal.SIGKILL)
        if killed and first.state == "lost" and job.num_answering == 3:
            (tmp_path / "enough").touch()

    with StatusPoll() as poll, pytest.raises(WorkerFailedError, match="SIGKILL"):
        workers(show_status, NUM_WORKERS, (tmp_path,), on_poll=look)
    wait_until(
        lambda: not [each for each in threading.enumerate() if "gossipdp-ask" in each.name],
        "the threads that ask have ended",
    )
    job = next(job for job in seen if is_all_there(job))
    assert (job.graph, job.method) == ("ring (4 workers)", "a2cid2")
    assert len({worker.process_id for worker in job.workers}) == NUM_WORKERS
    assert job.workers[0].neighbours == (1, 3)
    job = next(job for job in seen if job.num_answering == 3 and "lost" in states(job))
    assert (0, "lost") in [(notice.rank, notice.kind) for notice in job.notices]
    assert job.workers[0].gradient_steps > 0, "what it had done is still there"


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
