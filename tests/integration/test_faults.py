import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_run import SmallRun
from waiting import wait_until

from gossipdp import Network

pytestmark = pytest.mark.processes

SILENCE_S = 1.0


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
