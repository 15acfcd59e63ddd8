"""Tests of the race: what is asked for, what is kept, the supervisor of a job, figures, a run."""

import itertools
import json
import math
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import race as race_script
import race_worker
import torch
from race import Race, Runs, measure_rows, missing_rows, tune
from race_report import Run, conclusion, draw, table
from race_run import RESTART_DELAY_S, Fault, Job, Point, RaceResult, final_model, present_model
from race_worker import Life, data_seed, make_save
from support.byte_task import BATCH_SIZE, num_parameters
from support.conditions import RACE_CONDITIONS
from support.quality_rows import RowName
from support.race_settings import RaceSettings, Shelf, newest_checkpoint
from support.report import Provenance
from support.rows import OneOptimizer, RowPlan
from torch import nn

from gossipdp import WorkerFailedError
from gossipdp.launcher.faults import FaultInjector, FaultPlan
from gossipdp.launcher.processes import Ending

SETTINGS = RaceSettings(
    row="gossipdp", condition="calm", faults="", learning_rate=0.02, seed=1, seconds=70, workers=4
)
PROVENANCE = Provenance("command", "0", "abc", "hardware", 1.0)


def result(samples: int = 100_000, loss: float | None = 2.7) -> RaceResult:
    return RaceResult(
        samples=samples,
        loss=loss,
        curve=[Point(20.0, 4.0), Point(45.0, None), Point(70.0, loss)],
        faults=[Fault("kill", 1, 65.0, None, "it does not run")],
        sent_bytes=10**9,
        ended_s=70.1,
        start_s=5.0,
        restarts_s=[],
        imported_s=3.0,
        num_lives=4,
    )


def run_of(row: str, seed: int = 1, **figures: float) -> Run:
    settings = replace_settings(row=row, seed=seed)
    return Run(settings, result(**figures), PROVENANCE)  # type: ignore[arg-type]


def replace_settings(**changes: object) -> RaceSettings:
    return msgspec.structs.replace(SETTINGS, **changes)


@pytest.fixture(autouse=True)
def nothing_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the rows have the settings that they begin with, and keep others elsewhere."""
    assert "gossipdp" in race_script.read_choices()["timed"]  # what was tuned can be read
    (tmp_path / "race_choices.json").write_text('{"timed": {}, "long": {}, "without waits": {}}')
    monkeypatch.setattr(race_script, "CHOICES", tmp_path / "race_choices.json")
    monkeypatch.setattr(race_script, "results_folder", lambda quick: tmp_path)
    monkeypatch.setattr(race_script.Provenance, "here", lambda seconds: PROVENANCE)  # asks no git


def test_long_runs_have_settings_of_their_own_or_those_of_the_series():
    ours = {"ddp": {"learning_rate": 0.04, "checkpoint_steps": 5}}
    theirs = {"ddp": {"learning_rate": 0.02}}
    for long, expected in (({}, 0.04), (theirs, 0.02)):
        text = json.dumps({"timed": ours, "long": long, "without waits": {}})
        race_script.CHOICES.write_text(text)
        assert Race(rows="ddp", seconds=300).choices["ddp"].learning_rate == expected
        assert Race(rows="ddp").choices["ddp"].learning_rate == 0.04
        assert Race(rows="ddp", without_waits=True).choices["ddp"].learning_rate == 0.01
    killed, calm = (Race(rows="ddp").settings("ddp", name, 1) for name in ("kills10", "calm"))
    assert (killed.steps_between_saves, calm.steps_between_saves) == (5, 25)


def test_a_run_has_the_options_of_its_row_alone():
    benchmark = Race(conditions="kills10", rows="gossipdp,ddp,ddp_torchft,diloco@16")
    runs = {row: benchmark.settings(row, "kills10", 1) for row in benchmark.names}
    saving = [row for row, each in runs.items() if each.checkpoint_steps is not None]
    assert saving == ["ddp", "ddp_torchft", "diloco@16"]
    assert [row for row, each in runs.items() if each.timeout_s is not None] == ["ddp_torchft"]
    averaging = replace(benchmark, rows="ddp_torchft,diloco_torchft@16")
    joins = [averaging.settings(row, "kills10", 1).join_ms for row in averaging.names]
    assert joins == [200, 200 + 16 * 40]
    # As many as one death starts processes, where workers die; a host takes its own along.
    assert [each.num_spares for each in runs.values()] == [1, 4, 1, 4]
    every = replace(benchmark, conditions=",".join(RACE_CONDITIONS))
    for row in benchmark.names:
        spares = [name for name in RACE_CONDITIONS if every.settings(row, name, 1).keeps_spare]
        assert spares == ["kills10", "kills30", "kills120", "kills10_moving", "starved"]
    settings = benchmark.settings("ddp", "kills10", 3)
    assert (settings.faults, settings.seed) == ("kill every 10s", 3)
    with pytest.raises(ValueError, match="there is no condition 'rain'; choose from calm"):
        replace(benchmark, conditions="rain").chosen  # noqa: B018


class FakeRace:
    """Finishes at once; runs that are asked for are noted."""

    def __init__(self) -> None:
        self.asked: list[RaceSettings] = []
        self.fails_at = ""

    def __call__(self, settings: RaceSettings, hosts: object) -> RaceResult:
        self.asked.append(settings)
        if settings.row == self.fails_at:
            raise WorkerFailedError("worker 1 died\nof hunger")
        kept = 1_000 * (settings.heartbeat_ms == 500) + 100_000
        return result(kept, loss=3.0 + abs(math.log(settings.learning_rate / 0.04)))


def test_finished_runs_are_kept_and_the_order_rotates(tmp_path, monkeypatch):
    benchmark = Race(conditions="calm,moving", rows="gossipdp,ddp,local_sgd@16", rounds=2)
    path, fake = tmp_path / "runs.jsonl", FakeRace()

    monkeypatch.setattr(race_script, "race", fake)
    now_s = itertools.count(0.0, 10.0)
    # It looks at the clock before each run, so there is time for six.
    fake.fails_at, first = "ddp", Runs(path, 1.1, lambda: next(now_s))
    found = measure_rows(benchmark, first)
    order = [(each.condition, each.row, each.seed) for each in fake.asked]
    assert order[:3] == [("calm", "gossipdp", 1), ("calm", "ddp", 1), ("calm", "local_sgd@16", 1)]
    assert len(order) == 6
    missing = {row.row: row.why for row in missing_rows(benchmark, first, found)}
    assert missing["calm: DDP, float32"] == "it failed: of hunger"
    assert "rounds are measured: call again" in missing["moving: gossipdp, defaults"]
    fake.fails_at, num_before = "", len(order)
    found = measure_rows(benchmark, Runs(path, None))
    order = [(each.condition, each.row, each.seed) for each in fake.asked]
    assert len(order) - num_before == 12 - 4  # all but those that were kept
    assert all(len(runs) == 2 for rows in found.values() for runs in rows.values())
    second = [row for condition, row, seed in order if (condition, seed) == ("moving", 2)]
    assert second == ["ddp", "local_sgd@16", "gossipdp"]
    measure_rows(benchmark, Runs(path, None))
    assert len(fake.asked) == len(order)


def test_tuning_widens_the_grid_until_the_best_rate_is_within_and_keeps_it(capsys, monkeypatch):
    fake = FakeRace()
    monkeypatch.setattr(race_script, "race", fake)
    monkeypatch.setattr(RowName, "missing", lambda self: None)
    tune(Race(tune="rates", rows="ddp"), Runs(None, None))
    assert [each.learning_rate for each in fake.asked] == [0.01, 0.005, 0.02, 0.04, 0.08]
    assert "0.04: 3.000" in capsys.readouterr().out
    tune(Race(tune="restarts", rows="ddp_torchft,gossipdp"), Runs(None, None))
    chosen = Race(rows="ddp,ddp_torchft").choices  # a later call finds them
    assert (chosen["ddp"].learning_rate, chosen["ddp_torchft"].heartbeat_ms) == (0.04, 500)
    assert {each.condition for each in fake.asked[5:]} == {"kills10_moving"}
    assert {each.row for each in fake.asked[5:]} == {"ddp_torchft"}  # gossipdp has no time-outs
    with pytest.raises(ValueError, match="unknown --tune 'luck'; choose one of: rates"):
        tune(Race(tune="luck"), Runs(None, None))


def test_without_waits_a_core_is_starved_and_kills_come_by_a_poisson_clock(monkeypatch):
    monkeypatch.setattr(race_script, "has_quotas", lambda: True)
    benchmark = Race(without_waits=True, workers=2, conditions="starved", seconds=3_000, rows="ddp")
    first, again, other = (benchmark.settings("ddp", "starved", seed) for seed in (1, 1, 2))
    assert first == again
    assert first.faults != other.faults
    clauses = FaultPlan.parse(first.faults).clauses
    assert 30 <= len(clauses) <= 70  # one a minute
    assert all(each.kind == "kill" and not each.every for each in clauses)
    assert (first.quota_s, first.waits) == (30.0, False)
    assert 1e6 <= num_parameters(first.task) < 1.1e6
    monkeypatch.setattr(race_script, "has_quotas", lambda: False)
    signalled = FaultPlan.parse(benchmark.settings("ddp", "starved", 1).faults).clauses
    new = [each for each in signalled if each not in clauses]
    slow = [(each.factor, each.rank, each.time_s, each.for_s) for each in new]
    assert slow[:3] == [(2.0, 1, 30.0, 30.0), (4.0, 1, 60.0, 30.0), (2.0, 1, 120.0, 30.0)]


class FakeProcess:
    """A process that dies when it is told to, and is reaped at the next look."""

    def __init__(self, name: tuple[int, int]) -> None:
        self.name, self.ending, self.is_closed = name, None, False

    def poll(self) -> Ending | None:
        return self.ending

    def send(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.ending = Ending("died of signal 9 (SIGKILL)")

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def close(self) -> None:
        self.is_closed = True


class FakeJob:
    def __init__(self, faults: str, *, whole: bool) -> None:
        self.now_s = 100.0
        self.started, self.training = list[FakeProcess](), set[tuple[int, int]]()
        self.injector = FaultInjector(FaultPlan.parse(faults), 3, clock=lambda: self.now_s)
        self.job = Job(
            3, self.start, self.trains, self.injector, whole=whole, clock=lambda: self.now_s
        )

    def trains(self, rank: int) -> bool:
        return self.life(rank).name in self.training

    def start(self, rank: int, number: int) -> FakeProcess:
        self.started.append(FakeProcess((rank, number)))
        return self.started[-1]

    def life(self, rank: int) -> FakeProcess:
        return next(each for each in reversed(self.started) if each.name[0] == rank)

    def step(self, after_s: float = 0.0) -> bool:
        self.now_s += after_s
        return self.job.step()

    def all_train(self) -> None:
        self.step()
        self.training |= {each.name for each in self.started}
        self.step()

    @property
    def names(self) -> list[tuple[int, int]]:
        return [each.name for each in self.started]


def test_a_death_ends_the_whole_job_which_starts_again():
    fake = FakeJob("kill 1 at 10s", whole=True)
    fake.all_train()
    assert fake.names == [(0, 0), (1, 0), (2, 0)]
    fake.step(after_s=10.0)
    assert fake.life(1).ending is not None
    fake.step()  # it is reaped, and the others are killed
    assert fake.life(0).ending == fake.life(2).ending == Ending("died of signal 9 (SIGKILL)")
    fake.step(after_s=RESTART_DELAY_S / 2)
    assert len(fake.started) == 3
    fake.step(after_s=RESTART_DELAY_S)
    assert fake.names[3:] == [(0, 1), (1, 1), (2, 1)]
    assert all(each.is_closed for each in fake.started[:3])
    assert [(each.rank, each.missed) for each in fake.injector.records] == [(1, None)]


def test_a_replica_is_started_again_alone():
    fake = FakeJob("kill 1 at 10s", whole=False)
    fake.all_train()
    for after_s in (10.0, 0.0, RESTART_DELAY_S):
        fake.step(after_s)
    assert fake.names[3:] == [(1, 1)]
    assert fake.life(0).ending is None


def test_at_the_end_nobody_is_started_again():
    fake = FakeJob("kill 1 at 10s", whole=True)
    fake.all_train()
    fake.life(0).ending = Ending()
    fake.step()
    fake.life(1).ending = Ending("raised RuntimeError")  # of one that has left
    fake.step()
    fake.life(2).ending = Ending()
    assert not fake.step(after_s=1.0)
    assert len(fake.started) == 3


def fleet_of(lives: dict[tuple[int, int], tuple[float, float, float] | None]) -> SimpleNamespace:
    """Return a fleet by what each life (rank, number) left: samples, those exchanged, voters."""
    names = ("samples", "exchanged", "voters")
    found = {
        life: left and (dict(zip(names, left, strict=True)), np.array([left[0]]))
        for life, left in lives.items()
    }
    shelves = {life: SimpleNamespace(look=lambda left=left: left) for life, left in found.items()}
    num_lives = [1 + max(n for r, n in lives if r == rank) for rank in range(2)]
    last = [found[rank, number - 1] for rank, number in enumerate(num_lives)]
    return SimpleNamespace(
        shelves=shelves,
        num_lives=num_lives,
        held=lambda ranks: [last[rank] for rank in ranks if last[rank]],
    )


def test_samples_that_died_with_a_worker_are_not_counted():
    # Worker 0 was killed after 90 samples, the last 10 of them in no exchange.
    fleet = fleet_of({(0, 0): (90, 80, 0), (0, 1): (30, 20, 2), (1, 0): (200, 190, 2)})
    samples, values = final_model(False, fleet)
    assert samples == 80 + 30 + 200
    assert values.tolist() == [30]  # the average, which both hold
    # It did not come back, and the other one ended alone.
    fleet = fleet_of({(0, 0): (90, 80, 0), (0, 1): None, (1, 0): (200, 190, 1)})
    assert final_model(False, fleet)[0] == 200 + 80
    # Nobody came to an average: the workers' mean, as it was.
    fleet = fleet_of({(0, 0): (90, 80, 0), (1, 0): (210, 190, 0)})
    samples, values = final_model(False, fleet)
    assert (samples, values.tolist()) == (300, [150])


def test_a_job_that_is_starting_again_has_only_its_checkpoint():
    fleet = fleet_of({(0, 0): (90, 90, 0), (0, 1): None, (1, 0): (90, 90, 0), (1, 1): None})
    assert final_model(True, fleet) is None
    left = [({"samples": 64.0}, np.array([1.0])), ({"samples": 96.0}, np.array([2.0]))]
    assert present_model(True, left) == (96, np.array([2.0]))


class Plain(OneOptimizer):
    """One worker's SGD; all hold the same every second step."""

    def __init__(self) -> None:
        sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
        plan = RowPlan(0, 1, 0, batch_sizes=[BATCH_SIZE], periods=[2], make_optimizer=sgd)
        torch.manual_seed(0)
        super().__init__(nn.Linear(1, 1, bias=False), plan)

    def finish(self) -> None:
        """Nothing is left to average."""

    def value(self) -> float:
        return float(self.net.weight.detach())

    def take_step(self) -> None:
        self.step(self.net(torch.ones(1, 1)).sum())


def test_a_row_goes_on_from_its_newest_checkpoint(tmp_path):
    settings = replace_settings(row="local_sgd@2", checkpoint_steps=3, workers=1)
    row = Plain()
    save = make_save(row, settings, tmp_path, 0)
    values = []
    for _ in range(7):
        row.take_step()
        save()
        values.append(row.value())
    again = Plain()
    make_save(again, settings, tmp_path, 0)
    assert (again.steps, again.value()) == (4, values[3])  # 3 steps, in whole periods
    again.take_step()
    assert again.value() == values[4]  # with its momentum
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert torch.load(newest, weights_only=True)["batches"] == 4


def test_a_shelf_gets_only_models_that_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(race_worker, "bytes_by_connection", lambda: {"socket:[7]": 12})
    row, shelf = Plain(), Shelf(tmp_path / "shelf", 1)
    life = Life(row, shelf, imported_s=3.0, began_s=100.0)
    for now_s in (104.0, 104.5, 105.0, 105.1):
        before = row.num_batches()
        row.take_step()
        life.stepped(before, now_s)
        assert shelf.is_made  # from the first step on, in the middle of a period too
    found = shelf.look()
    assert found is not None
    header, values = found
    assert (header["samples"], header["at_s"]) == (4 * BATCH_SIZE, 105.1)
    assert (header["first_step_s"], header["imported_s"]) == (4.0, 3.0)
    assert header["sent_bytes"] == 12
    assert values.tolist() == [row.value()]
    row.take_step()
    life.stepped(4, 106.0)  # in the middle of a period
    life.end(106.0)
    found = shelf.look()
    assert found is not None
    assert found[0]["at_s"] == 105.1


def test_ratios_are_those_of_a_round_and_the_picture_says_who_wins(tmp_path):
    ours = [run_of("gossipdp", samples=200, loss=2.0), run_of("gossipdp", 2, samples=90, loss=2.4)]
    rival = run_of("ddp", samples=100, loss=2.5)
    runs = {"gossipdp": ours, "ddp": [rival]}
    said = "Nothing happens: gossipdp ends lowest, 20.0% below DDP,\nfloat32"
    assert conclusion("calm", runs) == said  # as in its round, not of the medians
    level = "Nothing happens: gossipdp and DDP, float32 end level"
    assert conclusion("calm", runs | {"ddp": [rival, run_of("ddp", 2, loss=2.3)]}) == level
    (line,) = [row for row in table("", runs, {}).rows if row[0].startswith("DDP")]
    assert line[2:4] == ("100", "2.00")
    draw(tmp_path / "race.png", {"calm": runs, "kills10": runs})
    assert (tmp_path / "race.png").stat().st_size > 10_000


def test_each_round_life_and_worker_has_batches_of_its_own():
    each = list(itertools.product(range(6), range(50), range(16)))
    seeds = {data_seed(*numbers) for numbers in each}
    assert len(seeds) == len(each)
    assert max(seeds) < 2**32, "torch's generator heeds no higher bits"
