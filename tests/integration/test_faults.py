import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_run import SmallRun
from waiting import wait_until

from gossipdp import Monitor, Network, WorkerFailedError
from gossipdp.launcher.environment import show_address
from gossipdp.observe.board import JobStatus, StatusBoard
from gossipdp.observe.status import StatusPoll

pytestmark = pytest.mark.processes

SILENCE_S = 1.0
NUM_WORKERS = 4


class Worker(SmallRun):
    """One that looks at its protocol between steps, and notes when it first saw what."""

    def __init__(self) -> None:
        super().__init__(0.005, network=Network(timeout_s=SILENCE_S, start_timeout_s=60.0))
        self.seen: dict[str, float] = {}

    def step(self) -> None:
        super().step()
        for member in self.model._worker._protocol.membership.members():
            self.note(f"{member.rank} {member.status.name}")

    def note(self, event: str) -> None:
        self.seen.setdefault(event, time.monotonic())

    def train_until(self, is_time: Callable[[], object]) -> None:
        wait_until(is_time, lambda: f"worker {self.rank} has seen {self.seen}", self.step)

    def train_until_exchanged(self) -> None:
        before = self.model.stats().exchanges
        self.train_until(lambda: self.model.stats().exchanges > before)

    def end(self) -> dict[str, Any]:
        num_workers, stats = self.model.consolidate().world_size, self.model.stats()
        notices = [msgspec.structs.asdict(notice) for notice in stats.noticed]
        restarts = [member.restarts for member in self.model._worker.view()]
        values = [value.tolist() for value in self.net.state_dict().values()]
        found = {"seen": self.seen, "noticed": notices, "restarts": restarts, "values": values}
        return found | {"rank": self.rank, "num_workers": num_workers}


def stop_for_a_while(directory: Path) -> dict[str, Any]:
    """Rank 1 stops itself; rank 0 lets it go on once it is lost to the others."""
    worker = Worker()
    (directory / f"pid-{worker.rank}").write_text(str(os.getpid()))
    if worker.rank == 1:
        worker.train_until_exchanged()
        worker.note("stops")
        os.kill(os.getpid(), signal.SIGSTOP)
        worker.note("went on")
        worker.train_until_exchanged()
        worker.note("exchanged")
        return worker.end()
    worker.train_until(lambda: "1 DEAD" in worker.seen)
    if worker.rank == 0:
        worker.train_until_exchanged()
        os.kill(int((directory / "pid-1").read_text()), signal.SIGCONT)
    worker.train_until(
        lambda: (1, "answered") in [(each.rank, each.kind) for each in worker.model.stats().noticed]
    )
    return worker.end()


def test_a_stopped_worker_is_noticed_and_takes_part_again_when_it_goes_on(workers, tmp_path):
    ends = workers(stop_for_a_while, 3, (tmp_path,))
    for end in ends:
        assert (end["num_workers"], end["values"]) == (3, ends[0]["values"])
        if end["rank"] != 1:
            assert end["seen"]["1 DEAD"] > ends[1]["seen"]["stops"]
            # The same process: nobody restarted it. Its silence and its loss may be seen as one.
            notices = [notice for notice in end["noticed"] if notice["rank"] == 1]
            kinds = [notice["kind"] for notice in notices]
            assert [kind for kind in kinds if kind != "silent"] == ["lost", "answered"]
            assert notices[-1]["silent_s"] >= 0.9 * SILENCE_S
        assert end["restarts"] == [0, 0, 0], "no other life began"
    # It says of itself, once, that it was stopped, and loses none of the others, who were not.
    stops = [each["silent_s"] for each in ends[1]["noticed"] if each["rank"] == 1]
    assert len(set(stops)) == len(stops) >= 1
    assert {each["kind"] for each in ends[1]["noticed"] if each["rank"] == 1} == {"stopped"}
    assert min(stops) >= SILENCE_S
    assert not [each for each in ends[1]["noticed"] if each["kind"] in ("lost", "restarted")]
    assert ends[1]["seen"]["exchanged"] > ends[1]["seen"]["went on"]


def hang(directory: Path) -> list[list[float]] | None:
    """Hang in the training loop of rank 2, while its gossip thread beats."""
    worker = Worker()
    worker.train_until_exchanged()
    if worker.rank == 2:
        ends = [directory / "end-0", directory / "end-1"]
        wait_until(lambda: all(path.exists() for path in ends), "the others have ended")
        worker.model.close()
        return None
    began_s = time.monotonic()
    assert worker.model.consolidate(timeout_s=1.0).world_size == 2
    assert time.monotonic() >= began_s + 1.0
    (directory / f"end-{worker.rank}").touch()
    return [value.tolist() for value in worker.net.state_dict().values()]


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
