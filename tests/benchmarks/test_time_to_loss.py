"""Tests of time_to_loss: conditions, shares by speed, scores, and short runs."""

import time
from dataclasses import replace

import pytest
import quality
import torch
from clocks import Clock
from hypothesis import given
from hypothesis import strategies as st
from quality import Runs
from support.conditions import Condition
from support.hosts import missing
from support.quality_rows import RowName, make_optimizer
from support.quality_worker import RunResult, RunSettings, Size, make_task, num_parameters, run
from support.rows import RowPlan
from support.timed_compute import TimedCompute
from time_to_loss import Round, measure_round, measured_table, rows_as_json

SIZE = Size(width=16, depth=2, context=16, batch_size=2, steps=40)
SLOW = Condition("slow", step_s=0.001, slowness=(1, 4))
SETTINGS = RunSettings("ddp", "common", 0.004, 1, SIZE, workers=2, condition=SLOW)


def result(loss: float | None, end_s: float = 20.0, average_s: float = 0.0) -> RunResult:
    times = {"ended_s": end_s, "seconds": end_s + 5.0, "samples_per_s": 1e3 / (end_s - average_s)}
    return RunResult(loss=loss, bytes_per_parameter_step=6.0, samples=1_000, comm_rate=1.0, **times)


@given(
    st.sampled_from(["ddp", "diloco@16", "ddp_bf16_by_speed", "local_sgd_by_speed@16"]),
    st.lists(st.sampled_from([1.0, 0.5, 0.3, 0.25, 0.125]), min_size=2, max_size=6),
    st.integers(1, 10_000),
)
def test_workers_that_wait_for_one_another_meet_equally_often(row, speeds, samples):
    name = RowName.parse(row)
    how = name.batch_sizes(8, speeds), name.periods(speeds), make_optimizer
    workers = [RowPlan(rank, samples, 0, *how) for rank in range(len(speeds))]
    assert len({one.own_steps // one.period for one in workers}) == 1
    assert sum(one.share for one in workers) == pytest.approx(1.0)
    trained = [one.own_steps * one.batch_size for one in workers]
    turns = max(one.own_steps for one in workers)  # at most: a turn has a step of each
    assert samples <= sum(trained) < samples + sum(trained) / max(1, turns // 16)
    assert [done / sum(trained) for done in trained] == pytest.approx([w.share for w in workers])


def test_gradients_are_those_of_the_plain_model_and_come_when_a_device_would_have_them(monkeypatch):
    clock = Clock()
    task = make_task(SETTINGS)
    batch = next(iter(task.train_loader(0, 2, 0)))
    torch.manual_seed(0)
    plain = task.make_model()
    torch.manual_seed(0)
    timed = task.make_model()
    compute = TimedCompute([*timed.blocks, timed], lambda: 0.9, clock)
    there_s: dict[str, float] = {}
    for name, parameter in timed.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: there_s.update({name: clock.now_s})
        )
    task.loss(plain, batch).backward()
    monkeypatch.setattr(time, "sleep", clock.sleep)
    compute.begin()
    loss = task.loss(timed, batch)
    assert clock.now_s == pytest.approx(0.3)
    loss.backward()
    assert there_s["norm.weight"] == pytest.approx(0.5)
    assert there_s["blocks.1.project.weight"] == pytest.approx(0.7)
    assert there_s["blocks.0.project.weight"] == pytest.approx(0.9)
    assert there_s["embedding.weight"] == pytest.approx(0.9)
    for one, two in zip(plain.parameters(), timed.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_a_slower_row_runs_again_on_what_it_manages_in_the_time(monkeypatch):
    asked: list[RunSettings] = []
    ideal_s = SLOW.ideal_s(2, SIZE.steps)

    def fake(settings: RunSettings, hosts: None) -> RunResult:
        asked.append(settings)
        end_s = ideal_s * (slowness * settings.size.steps / SIZE.steps + 0.25)
        return result(3.0, end_s, average_s=0.25 * ideal_s)

    monkeypatch.setattr(quality, "run", fake)
    slowness = 3.0
    runs = Runs(None)
    found = measure_round(SETTINGS, runs, None)
    assert found is not None
    assert [one.size.steps for one in asked] == [40, 10]
    assert found.time.ended_s == pytest.approx(ideal_s)
    measure_round(SETTINGS, runs, None)
    assert len(asked) == 2  # both were kept
    slowness = 0.79
    quick = measure_round(replace(SETTINGS, seed=2), Runs(None), None)
    assert quick is not None
    assert quick.time is quick.tokens
    assert len(asked) == 3


def test_the_losses_of_rows_are_compared_at_equal_time():
    quick = result(3.0)
    slow = Round(result(2.8, end_s=80.0), result(3.6))
    results = {
        "gossip": [Round(quick, quick), Round(result(3.02), result(3.02))],
        "ddp": [slow, replace(slow, time=result(None))],
        "none": [Round(result(5.0), result(5.0))],
    }
    rates = dict.fromkeys(results, 0.01)
    rows = {line[0]: line for line in measured_table(results, rates, 20.0).rows}
    assert rows["gossipdp, gossip"][4] == "3.010 (3.000 to 3.020)"
    assert "inf" in rows["DDP, float32"][4]
    data = rows_as_json(results, rates, 20.0)
    assert data["rows"]["ddp"]["loss"] == 2.8
    assert len(data["rows"]["ddp"]["runs"]) == 2


@pytest.mark.processes
@pytest.mark.parametrize("row", ["ddp_bf16_by_speed", "gossip"])
def test_a_timed_run_trains_the_budget_on_workers_of_unequal_speed(row):
    found = run(replace(SETTINGS, row=row))
    assert found.loss is not None
    assert found.loss < 8.0
    assert found.samples >= 160
    if row != "gossip":
        assert found.samples <= 160 + 16
        assert 2.0 < found.bytes_per_parameter_step < 1.5 * 2.0


@pytest.mark.processes
def test_a_run_in_namespaces_sends_over_their_links():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    condition = Condition("a link", step_s=0.001, mbits_per_s=1_000_000)
    settings = replace(SETTINGS, row="local_sgd@2", condition=condition)
    hosts = condition.hosts(2, num_parameters(SIZE))
    assert hosts is not None
    with hosts:
        found = run(settings, hosts=hosts)
    assert found.loss is not None
    # Half of the vector twice every second step, in float32, and the headers of all packets.
    assert 2.0 < found.bytes_per_parameter_step < 4.0
    assert found.samples == 160
