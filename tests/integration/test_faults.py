"""Workers that are killed, stopped, started again: with real processes."""

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from known_average import assert_is_mean, consolidate_openly
from small_run import SmallRun
from waiting import LONGEST_S, wait_until

from gossipdp import GossipDataParallel, Network
from gossipdp.errors import WorkerFailedError

pytestmark = pytest.mark.processes

SILENCE_S = 1.0


class Worker(SmallRun):
    """One that looks at its protocol between steps, and keeps a diary in a file."""

    def __init__(self, directory: Path, **options: Any) -> None:
        network = Network(timeout_s=SILENCE_S, start_timeout_s=60.0)
        super().__init__(0.005, **{"network": network} | options)
        self.directory = directory
        self.seen: dict[str, float] = {}

    def live(self) -> tuple[int, ...]:
        return self.model._worker._protocol.membership.live()

    def step(self) -> None:
        super().step()
        for member in self.model._worker._protocol.membership.members():
            self.note(f"{member.rank} {member.status.name}")

    def note(self, event: str) -> None:
        self.seen.setdefault(event, time.monotonic())

    def train_until(self, is_time: Callable[[], object]) -> None:
        wait_until(is_time, lambda: f"worker {self.rank} has seen {self.seen}", self.step)

    def train_for(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        self.train_until(lambda: time.monotonic() >= ends_s)

    def train_until_exchanged(self) -> None:
        before = self.model.stats().exchanges
        self.train_until(lambda: self.model.stats().exchanges > before)

    def finish(self, consolidate: Callable[..., Any] = GossipDataParallel.consolidate) -> None:
        result = consolidate(self.model)
        flat = torch.cat([value.flatten() for value in self.net.state_dict().values()])
        assert flat.isfinite().all()
        diary = {
            "rank": self.rank,
            "life": self.life,
            "seen": self.seen,
            "noticed": [msgspec.structs.asdict(each) for each in self.model.stats().noticed],
            "restarts": [member.restarts for member in self.model._worker.view()],
            "num_workers": result.world_size,
            "bits": flat.numpy().tobytes().hex(),
        }
        (self.directory / f"end-{self.rank}-{self.life}.json").write_text(json.dumps(diary))

    def leave(self, number: int) -> None:
        """Kill or stop this process."""
        (self.directory / f"leaves-{self.rank}").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), number)


def diaries(directory: Path) -> list[dict[str, Any]]:
    """Return the diaries of all that came to the end, with the same bits."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("end-*.json"))]
    assert len({each["bits"] for each in found}) == 1
    return found


def left_at_s(directory: Path, rank: int) -> float:
    return float((directory / f"leaves-{rank}").read_text())


# So long that a death is noticed by the end of its connections, and not by silence.
PATIENT = Network(timeout_s=LONGEST_S, start_timeout_s=LONGEST_S)
DEATHS = {0: 0.1, 2: 0.3}


def die_one_by_one(directory: Path) -> None:
    """Let two of a ring of four die: the others, opposite each other, exchange from then on."""
    worker = Worker(directory, graph="ring", network=PATIENT)
    if worker.rank in DEATHS:
        worker.train_until(lambda: len(worker.model.stats().exchanges_by_neighbour) == 2)
        worker.train_for(DEATHS[worker.rank])
        worker.leave(signal.SIGKILL)
    worker.train_until(lambda: all(f"{rank} DEAD" in worker.seen for rank in DEATHS))
    other = 4 - worker.rank
    worker.train_until(lambda: worker.model.stats().exchanges_by_neighbour.get(other, 0) > 1)
    worker.finish(functools.partial(consolidate_openly, directory=directory, num_workers=2))


def test_the_dead_are_noticed_and_the_others_train_on(workers, tmp_path):
    with pytest.raises(WorkerFailedError, match="SIGKILL"):
        workers(die_one_by_one, 4, (tmp_path,))
    ends = diaries(tmp_path)
    assert [(end["rank"], end["num_workers"]) for end in ends] == [(1, 2), (3, 2)]
    brought = [torch.load(path) for path in tmp_path.glob("brought-*.pt")]
    for end in ends:
        assert_is_mean(torch.load(tmp_path / f"average-{end['rank']}.pt"), brought)
        for rank in DEATHS:
            assert end["seen"][f"{rank} DEAD"] > left_at_s(tmp_path, rank)


def stop_for_a_while(directory: Path) -> None:
    """Rank 1 stops itself; rank 0 lets it go on once it is lost to the others."""
    worker = Worker(directory)
    (directory / f"pid-{worker.rank}").write_text(str(os.getpid()))
    if worker.rank == 1:
        worker.train_for(0.5)
        worker.leave(signal.SIGSTOP)
        worker.note("went on")
        worker.train_until_exchanged()
        worker.note("exchanged")
        worker.finish()
        return
    worker.train_until(lambda: "1 DEAD" in worker.seen)
    if worker.rank == 0:
        worker.train_until_exchanged()
        os.kill(int((directory / "pid-1").read_text()), signal.SIGCONT)
    worker.train_until(
        lambda: (1, "answered") in [(each.rank, each.kind) for each in worker.model.stats().noticed]
    )
    worker.finish()


def test_a_stopped_worker_is_noticed_and_takes_part_again_when_it_goes_on(workers, tmp_path):
    workers(stop_for_a_while, 3, (tmp_path,))
    ends = diaries(tmp_path)
    assert [end["num_workers"] for end in ends] == [3, 3, 3]
    for end in ends:
        if end["rank"] != 1:
            assert end["seen"]["1 DEAD"] > left_at_s(tmp_path, 1)
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


def kill_two_and_stop_the_third(directory: Path) -> None:
    """Let 1 die, then 0. 1 is back by 2, which stops then: 0 knows from before only dead ones."""
    life = f"{os.environ['RANK']}.{os.environ.get('GOSSIPDP_RESTARTS') or 0}"
    (directory / f"began-{life}").write_text(str(os.getpid()))
    if life == "1.1":
        wait_for(directory / "began-0.1")
    if life == "0.1":
        wait_for(directory / "joined-1.1")
        os.kill(int((directory / "began-2.0").read_text()), signal.SIGSTOP)
    worker = Worker(directory)
    (directory / f"joined-{life}").touch()
    worker.train_until_exchanged()
    if life == "0.0":
        worker.train_until(lambda: "1 DEAD" in worker.seen)
    if life in ("0.0", "1.0"):
        worker.leave(signal.SIGKILL)
    if life == "0.1":
        os.kill(int((directory / "began-2.0").read_text()), signal.SIGCONT)
    worker.train_until((directory / "joined-0.1").exists)
    # The stop may have lasted for longer than the time-out: the end would be without worker 2.
    worker.train_until(lambda: worker.live() == (0, 1, 2))
    worker.finish()


def test_who_comes_back_finds_one_that_came_back_after_its_start(workers, tmp_path):
    workers(kill_two_and_stop_the_third, 3, (tmp_path,), max_restarts=2)
    assert [(end["rank"], end["life"]) for end in diaries(tmp_path)] == [(0, 1), (1, 1), (2, 0)]


def wait_for(*paths: Path) -> None:
    wait_until(lambda: all(path.exists() for path in paths), f"these are there: {paths}")


def hang(directory: Path) -> list[list[float]] | None:
    """Hang in the training loop of rank 2, while its gossip thread beats."""
    worker = Worker(directory)
    worker.train_until_exchanged()
    if worker.rank == 2:
        wait_for(directory / "end-0", directory / "end-1")
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
