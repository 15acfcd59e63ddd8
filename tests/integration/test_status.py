"""Status ports of real workers: any one names all, and a death is seen from another."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest
import torch
from torch import nn
from waiting import wait_until

from gossipdp import GossipDataParallel, Monitor, Network, WorkerFailedError
from gossipdp.launcher.environment import show_address
from gossipdp.observe.board import JobStatus, StatusBoard
from gossipdp.observe.status import StatusPoll

pytestmark = pytest.mark.processes

NUM_WORKERS = 4


def train(directory: Path) -> None:
    """Until the file ``enough`` is there; worker 0 tells where it shows its status."""
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = GossipDataParallel(
        net, optimizer, graph="ring", network=Network(timeout_s=1.0), monitor=Monitor(status_port=0)
    )
    if model.rank == 0:
        assert model._worker.monitoring.page is not None
        (directory / "new").write_text(show_address(*model._worker.monitoring.page.announced("")))
        (directory / "new").rename(directory / "address")
    pause_s = 0.05 if model.rank == 3 else 0.005
    while not (directory / "enough").exists():
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(pause_s)
    model.consolidate()


class Watcher:
    """Looks at the job about ten times a second, and does what the test says with what it sees."""

    def __init__(self, directory: Path, act: Callable[[JobStatus], bool]) -> None:
        self.directory = directory
        self.seen: list[JobStatus] = []
        self.first = ""
        self._act = act
        self._board: StatusBoard | None = None
        self._poll = StatusPoll()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._poll.__exit__(*error)
        wait_until(
            lambda: not [each for each in threading.enumerate() if "gossipdp-ask" in each.name],
            "the threads that ask have ended",
        )

    def poll(self) -> None:
        """Look at the job, for the launcher; once ``act`` says so the workers may end."""
        if self._board is None:
            if (self.directory / "address").exists():
                self.first = (self.directory / "address").read_text()
                self._board = StatusBoard([self.first])
            return
        now_s = time.monotonic()
        self._board.take(self._poll.answers(self._board.addresses(), 0.2), now_s)
        if self._board.has_answers:
            self.seen.append(self._board.job(now_s))
            if self._act(self.seen[-1]):
                (self.directory / "enough").touch()


def states(job: JobStatus) -> list[str]:
    return [worker.state for worker in job.workers]


def test_one_address_shows_the_whole_job_and_the_others_the_death_of_its_worker(workers, tmp_path):
    killed: list[int] = []

    def is_all_there(job: JobStatus) -> bool:
        return (
            states(job) == ["training"] * 3 + ["slow"]
            and all(len(worker.neighbours or ()) == 2 for worker in job.workers)
            and all(worker.exchanges and worker.samples_per_second for worker in job.workers)
        )

    def kill_and_see(job: JobStatus) -> bool:
        first = job.workers[0]
        if not killed and is_all_there(job):
            assert first.status_address == watcher.first
            assert first.process_id is not None
            killed.append(first.process_id)
            os.kill(first.process_id, signal.SIGKILL)
        return bool(killed) and states(job)[0] == "lost" and job.num_answering == 3

    with (
        Watcher(tmp_path, kill_and_see) as watcher,
        pytest.raises(WorkerFailedError, match="SIGKILL"),
    ):
        workers(train, NUM_WORKERS, (tmp_path,), on_poll=watcher.poll)
    job = next(job for job in watcher.seen if is_all_there(job))
    assert job.num_answering == NUM_WORKERS
    assert (job.graph, job.method) == ("ring (4 workers)", "a2cid2")
    assert len({worker.process_id for worker in job.workers}) == NUM_WORKERS
    assert job.workers[0].neighbours == (1, 3)
    job = next(job for job in watcher.seen if job.num_answering == 3 and "lost" in states(job))
    assert (0, "lost") in [(notice.rank, notice.kind) for notice in job.notices]
    assert job.workers[0].gradient_steps > 0, "what it had done is still there"
