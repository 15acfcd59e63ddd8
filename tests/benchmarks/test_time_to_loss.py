"""The parts of time_to_loss that its figures rest on, and one short run."""

import math
import time
from dataclasses import replace

import pytest
import support.rows
import time_to_loss_rows
import torch
from time_to_loss_report import RoundRow, measured_tables, score, targets
from time_to_loss_rows import row_plan
from time_to_loss_task import (
    BATCH_SIZE,
    NUM_LAYERS,
    Clusters,
    TimedCompute,
    loss,
    make_model,
)
from time_to_loss_worker import (
    RunFailedError,
    RunPlan,
    WorkerResult,
    averages_at_marks,
    mark_s,
    prepare,
    run,
)
from torch import Tensor

from gossipdp.simulate.scenario import ConstantTime

ROUND = RoundRow(
    row="a2cid2",
    samples=1000,
    samples_per_s=100.0,
    curve=[(1.0, 2.0), (2.0, 0.2), (3.0, 0.05), (4.0, 0.01)],
    accuracy=0.99,
    loss=0.01,
    accuracy_before=0.98,
    comm_rate=1.0,
    consensus_distance=0.1,
    waiting=0.1,
    ended_s=4.0,
    cpu=1.0,
    sent_mb=None,
)


def test_the_time_to_a_loss_lies_between_the_points_around_it() -> None:
    assert ROUND.time_to(0.1) == pytest.approx(2.5)  # halfway from 0.2 to 0.05, in factors
    assert ROUND.time_to(3.0) == 1.0
    assert ROUND.time_to(0.2) == pytest.approx(2.0)
    assert ROUND.time_to(0.001) == math.inf
    assert ROUND.as_json(0.001)["time_to_loss_s"] is None


def test_targets_are_ratios_within_a_round_and_not_met_by_what_never_came() -> None:
    ddp = replace(ROUND, row="ddp", samples_per_s=30.0, accuracy=0.991)
    none = replace(ROUND, row="none", samples_per_s=104.0, loss=1.0)
    found = {
        one.name: one
        for one in targets("slow", {"a2cid2": [ROUND], "ddp": [ddp], "none": [none]}, 0.1)
    }
    assert found["samples/s, a2cid2 over DDP"].value == pytest.approx(100 / 30)
    assert found["samples/s, a2cid2 over the ideal"].is_met
    assert found["points of accuracy, DDP less a2cid2"].value == pytest.approx(0.1)
    never = replace(ddp, curve=[(1.0, 2.0)])
    equal = targets("equal", {"a2cid2": [ROUND], "ddp": [never]}, 0.1)
    assert not next(one for one in equal if one.name.startswith("time to loss")).is_met


def test_a_table_says_never_where_a_row_did_not_come_there() -> None:
    never = replace(ROUND, curve=[(1.0, 2.0)])
    speed, _ = measured_tables({"a2cid2": [ROUND, never], "none": [never]}, 0.1)
    assert [row[3] for row in speed.rows] == ["reached in 1 of 2", "never"]


def result(rank: int, marks: list[tuple[int, float, Tensor]]) -> WorkerResult:
    return WorkerResult(
        rank=rank,
        steps=3,
        trained_s=1.0,
        ended_s=1.1,
        computed_s=0.9,
        cpu_s=0.1,
        account={},
        parameters=torch.zeros(1),
        average=None,
        sent_bytes=None,
        marks=marks,
    )


def test_a_curve_has_the_average_where_all_took_a_copy_and_the_latest_time() -> None:
    one, two, three = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    first = result(0, [(0, 0.50, one), (1, 0.57, two), (2, 0.65, one)])
    second = result(1, [(0, 0.52, three), (2, 0.63, three)])
    averages = averages_at_marks([first, second])
    assert averages == [(0.52, torch.tensor([2.0])), (0.65, torch.tensor([2.0]))]


def test_marks_are_12_percent_apart() -> None:
    assert mark_s(0) == 0.5
    assert mark_s(7) / mark_s(6) == pytest.approx(1.12)


def test_shards_share_no_sample_and_follow_from_the_seed() -> None:
    clusters, again = Clusters(4), Clusters(4)
    rows = [{tuple(row) for row in inputs[:500].tolist()} for inputs, _ in clusters.shards]
    assert not set.intersection(*rows)
    assert all(
        torch.equal(one[0], two[0]) for one, two in zip(clusters.shards, again.shards, strict=True)
    )
    counts = torch.stack([torch.bincount(labels, minlength=10) for _, labels in clusters.shards])
    assert (counts > 0).all()  # every worker sees every class, if not every cluster of it


def test_gradients_are_those_of_the_plain_model() -> None:
    batch = next(iter(Clusters(4).loader(0, seed=0)))
    compute = TimedCompute()
    plain, timed = make_model(3), make_model(3, compute)
    for model in (plain, timed):
        loss(model, batch).backward()
    for one, two in zip(plain.parameters(), timed.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)
    assert sum(parameter.numel() for parameter in plain.parameters()) >= 1_000_000


def test_a_layers_gradient_is_there_when_the_device_would_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", sleep)
    compute = TimedCompute()
    model = make_model(0, compute)
    there_s: list[float] = []
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.register_post_accumulate_grad_hook(lambda _: there_s.append(now_s - 100))
    compute.begin(0.6)
    loss(model, next(iter(Clusters(4).loader(0, seed=0)))).backward()
    assert NUM_LAYERS == 4
    assert there_s == pytest.approx([0.3, 0.4, 0.5, 0.6])  # the last layer's first
    assert compute.computed_s == 0.6


def test_a_row_that_is_not_installed_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.rows.importlib.util, "find_spec", lambda name: None)
    reason = time_to_loss_rows.missing("decent")
    assert reason is not None
    assert "pip install decent-dp" in reason
    assert time_to_loss_rows.missing("ddp") is None


def plan(name: str, num_steps: int) -> RunPlan:
    row = row_plan(name, 2, samples=2 * num_steps * BATCH_SIZE, seed=0, period=3)
    return RunPlan(row, ConstantTime(0.001), timeout_s=60.0)


@pytest.mark.processes
def test_a_run_trains_the_budget_and_ends_with_the_average() -> None:
    prepare()
    results = run(plan("periodic", 10), None)
    assert [one.steps for one in results] == [10, 10]
    assert results[0].account == {"exchanges": 1 + 9 / 3}
    # The last average came after 8 steps; since then each has gone its own way.
    assert not torch.equal(results[0].parameters, results[1].parameters)
    average = results[0].average
    assert average is not None
    mean = torch.stack([one.parameters for one in results]).mean(dim=0)
    torch.testing.assert_close(average, mean, rtol=1e-5, atol=1e-6)
    assert score("periodic", results).loss < 2.4


@pytest.mark.processes
def test_a_worker_that_fails_is_told_of() -> None:
    prepare()
    bad = replace(
        plan("a2cid2", 1), row=replace(plan("a2cid2", 1).row, options={"graph": "nosuch"})
    )
    with pytest.raises(RunFailedError, match="nosuch"):
        run(bad, None)
