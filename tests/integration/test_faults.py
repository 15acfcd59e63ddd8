"""Workers that are killed, stopped, started again: with real processes."""

import dataclasses
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossipdp import GossipDataParallel
from gossipdp.errors import WorkerFailedError

pytestmark = pytest.mark.processes

SILENCE_S = 1.0


def make_net() -> nn.Module:
    torch.manual_seed(int(os.environ.get("RANK") or 99))
    return nn.Sequential(nn.Linear(16, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))


class Worker:
    """One worker that trains, looks at its protocol between steps, and keeps a diary in a file."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.net = make_net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.003)
        options = {"timeout_s": SILENCE_S, "start_timeout_s": 30.0, **options}
        self.model = GossipDataParallel(self.net, self.optimizer, **options)
        self.directory = directory
        self.life = int(os.environ.get("GOSSIPDP_RESTARTS") or 0)
        self.began_s = time.monotonic()
        self.seen: dict[str, float] = {}
        generator = torch.Generator().manual_seed(self.model.rank)
        self.inputs = torch.randn(32, 16, generator=generator)
        self.labels = self.inputs[:, :4].argmax(dim=1)

    @property
    def protocol(self) -> Any:
        return self.model._engine._protocol

    def step(self, inputs: Any = None, pause_s: float = 0.005) -> None:
        self.optimizer.zero_grad()
        inputs = self.inputs if inputs is None else inputs
        loss = nn.functional.cross_entropy(self.model(inputs), self.labels[: len(inputs)])
        loss.backward()
        self.optimizer.step()
        for member in self.protocol.membership.members():
            self.note(f"{member.rank} {member.status.name}")
        time.sleep(pause_s)

    def note(self, event: str) -> None:
        """When it was seen first."""
        if event not in self.seen:
            self.seen[event] = time.monotonic()

    def train(self, seconds: float) -> None:
        """From when this worker began."""
        while time.monotonic() < self.began_s + seconds:
            self.step()

    def finish(self, **told: Any) -> None:
        result = self.model.consolidate()
        stats = self.model.stats()
        flat = torch.cat([value.double().flatten() for value in self.net.state_dict().values()])
        diary = {
            "rank": self.model.rank,
            "life": self.life,
            "seen": self.seen,
            "steps": stats.gradient_steps,
            "exchanges": stats.exchanges_by_neighbour,
            "noticed": [dataclasses.asdict(notice) for notice in stats.noticed],
            "states_donated": stats.states_donated,
            "donation_pause_s": stats.donation_pause_seconds,
            "num_workers": result.num_workers,
            "samples": result.samples,
            "bits": flat.numpy().tobytes().hex()[:4096],
            "is_finite": bool(flat.isfinite().all()),
            **told,
        }
        path = self.directory / f"end-{self.model.rank}-{self.life}.json"
        path.write_text(json.dumps(diary))

    def die(self) -> None:
        (self.directory / f"death-{self.model.rank}").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def diaries(directory: Path) -> list[dict[str, Any]]:
    """Of those who came to the end, which all must have come to with the same bits."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("end-*.json"))]
    assert found
    assert len({each["bits"] for each in found}) == 1
    assert all(each["is_finite"] for each in found)
    return found


def death_of(directory: Path, rank: int) -> float:
    return float((directory / f"death-{rank}").read_text())


def die_one_by_one(directory: Path, deaths: dict[int, float], seconds: float) -> None:
    worker = Worker(directory)
    worker.train(deaths.get(worker.model.rank, seconds))
    if worker.model.rank in deaths:
        worker.die()
    worker.finish()


@pytest.mark.parametrize(
    ("num_workers", "deaths"),
    [(3, {0: 1.0}), (4, {2: 1.0, 1: 1.2, 3: 2.5})],
    ids=["rank 0 of three", "until one is left"],
)
def test_the_dead_are_noticed_within_a_second_and_the_others_train_on(
    workers: Callable, tmp_path: Path, num_workers: int, deaths: dict[int, float]
) -> None:
    with pytest.raises(WorkerFailedError, match="SIGKILL"):
        workers(die_one_by_one, num_workers, (tmp_path, deaths, 4.0))
    ends = diaries(tmp_path)
    assert {each["rank"] for each in ends} == set(range(num_workers)) - deaths.keys()
    for end in ends:
        assert end["num_workers"] == num_workers - len(deaths)
        for rank in deaths:
            assert 0 < end["seen"][f"{rank} DEAD"] - death_of(tmp_path, rank) < 1.0


def die_beside_loaders(directory: Path, seconds: float) -> None:
    worker = Worker(directory)
    data = torch.utils.data.TensorDataset(worker.inputs.repeat(40, 1))
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=32,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
        # A group of their own, or the launcher would end them with their parent.
        worker_init_fn=lambda _: os.setpgid(0, 0),
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    while time.monotonic() < worker.began_s + seconds:
        worker.step(next(batches)[0])
        if worker.model.rank == 1 and time.monotonic() > worker.began_s + 1.0:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            (directory / "children").write_text(" ".join(children))
            worker.die()
    worker.finish(
        children={
            child: Path(f"/proc/{child}/stat").exists()
            for child in (directory / "children").read_text().split()
        }
    )


def test_a_worker_whose_loader_processes_live_on_is_noticed_as_soon(
    workers: Callable, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailedError, match="SIGKILL"):
        workers(die_beside_loaders, 3, (tmp_path, 3.0))
    for end in diaries(tmp_path):
        assert len(end["children"]) >= 2
        assert 0 < end["seen"]["1 DEAD"] - death_of(tmp_path, 1) < 1.0


def stop_for_a_while(directory: Path, stop_s: float | None, seconds: float) -> None:
    """Rank 1 stops itself; rank 0 lets it go on, or, where ``stop_s`` is None, kills it in the end.

    Rank 1 trains on until it has been refreshed and has exchanged again.
    """
    worker = Worker(directory)
    (directory / f"pid-{worker.model.rank}").write_text(str(os.getpid()))
    if worker.model.rank == 1:
        worker.train(1.0)
        (directory / "death-1").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGSTOP)
        worker.note("went on")
        exchanges = worker.model.stats().exchanges
        while not any(notice.kind == "refreshed" for notice in worker.model.stats().noticed):
            assert worker.model.stats().exchanges == exchanges
            worker.step()
        while worker.model.stats().exchanges == exchanges:
            worker.step()
        worker.note("exchanged")
    if worker.model.rank == 0 and stop_s is not None:
        worker.train(1.0 + stop_s)
        os.kill(int((directory / "pid-1").read_text()), signal.SIGCONT)
    worker.train(seconds)
    worker.finish()
    if worker.model.rank == 0 and stop_s is None:
        os.kill(int((directory / "pid-1").read_text()), signal.SIGKILL)


def test_a_stopped_worker_is_noticed_and_takes_part_again_when_it_goes_on(
    workers: Callable, tmp_path: Path
) -> None:
    workers(stop_for_a_while, 3, (tmp_path, 3.0, 6.0))
    ends = diaries(tmp_path)
    assert len(ends) == 3
    for end in ends:
        assert end["num_workers"] == 3
        if end["rank"] != 1:
            silent_s = end["seen"]["1 DEAD"] - death_of(tmp_path, 1)
            assert SILENCE_S * 0.9 < silent_s < SILENCE_S + 1.0
            kinds = [notice["kind"] for notice in end["noticed"] if notice["rank"] == 1]
            assert [kind for kind in kinds if kind != "stopped"] == ["dead", "rejoined"]
    seen = ends[1]["seen"]
    assert seen["went on"] - death_of(tmp_path, 1) > 2.5
    assert seen["exchanged"] - seen["went on"] < 3.0


def test_the_end_does_not_wait_for_one_that_stands_still(workers: Callable, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="SIGKILL"):
        workers(stop_for_a_while, 3, (tmp_path, None, 2.0))
    ends = diaries(tmp_path)
    assert [end["rank"] for end in ends] == [0, 2]
    assert {end["num_workers"] for end in ends} == {2}


def die_once(directory: Path, rank: int, seconds: float) -> None:
    worker = Worker(directory)
    if worker.life == 0:
        if worker.model.rank == rank:
            worker.train(1.0)
            worker.die()
        worker.train(seconds)
    else:
        worker.note("took part")
        # What a joiner takes over: AdamW has counted the donor's steps.
        first = next(iter(worker.optimizer.state.values()))
        worker.seen["steps of the optimizer"] = float(first["step"])
        while worker.model.stats().exchanges == 0:
            worker.step()
        worker.note("exchanged")
        worker.train(1.0)
    worker.finish(optimizer_steps=worker.seen.get("steps of the optimizer"))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_that_is_started_again_takes_anothers_state_and_goes_on(
    workers: Callable, tmp_path: Path, rank: int
) -> None:
    workers(die_once, 3, (tmp_path, rank, 6.0), max_restarts=1)
    ends = diaries(tmp_path)
    assert [end["rank"] for end in ends] == [0, 1, 2]
    for end in ends:
        assert end["num_workers"] == 3
        if end["rank"] == rank:
            assert end["optimizer_steps"] > 10
            print(
                "back after",
                end["seen"]["took part"] - death_of(tmp_path, rank),
                end["seen"]["exchanged"] - death_of(tmp_path, rank),
            )
            assert end["seen"]["exchanged"] - death_of(tmp_path, rank) < 5.0
        else:
            kinds = [notice["kind"] for notice in end["noticed"] if notice["rank"] == rank]
            assert kinds == ["dead", "rejoined"]
    assert sum(end["states_donated"] for end in ends) == 1
