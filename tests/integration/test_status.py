"""Status ports of real workers: any one names all, and a death is seen from another."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from small_run import SmallRun
from waiting import wait_until

from gossipdp import Monitor, Network, WorkerFailedError
from gossipdp.launcher.environment import show_address
from gossipdp.observe.board import JobStatus, StatusBoard
from gossipdp.observe.status import StatusPoll

pytestmark = pytest.mark.processes

NUM_WORKERS = 4


def train(directory: Path) -> None:
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
        workers(train, NUM_WORKERS, (tmp_path,), on_poll=look)
    wait_until(
        lambda: not [each for each in threading.enumerate() if "gossipdp-ask" in each.name],
        "the threads that ask have ended",
    )
    job = next(job for job in seen if is_all_there(job))
    assert job.num_answering == NUM_WORKERS
    assert (job.graph, job.method) == ("ring (4 workers)", "a2cid2")
    assert len({worker.process_id for worker in job.workers}) == NUM_WORKERS
    assert job.workers[0].neighbours == (1, 3)
    job = next(job for job in seen if job.num_answering == 3 and "lost" in states(job))
    assert (0, "lost") in [(notice.rank, notice.kind) for notice in job.notices]
    assert job.workers[0].gradient_steps > 0, "what it had done is still there"
