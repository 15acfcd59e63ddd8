"""DiLoCo: what it makes of the rows, by closed forms and beside all-reduce."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gossipdp.dynamics.outer import OuterStep
from gossipdp_lab.simulate.objectives import Quadratic
from gossipdp_lab.simulate.optimizers import AdamW, Sgd
from gossipdp_lab.simulate.scenario import ConstantTime, Link, LinkModel, Scenario
from gossipdp_lab.simulate.study import simulate
from gossipdp_lab.simulate.synchronous import DiLoCo

QUIET = Quadratic(dimension=6, mu=0.5, smoothness=2.0, noise_variance=0.0, heterogeneity=4.0)
RATE = 0.1
SCENARIO = Scenario(
    num_workers=4,
    objective=QUIET,
    optimizer=Sgd(RATE),
    compute_time=ConstantTime(1.0),
    links=LinkModel(Link(latency_s=0.0)),
    num_steps=13,
    num_records=13,
    sync_every=4,
)
NOISY = replace(SCENARIO, objective=replace(QUIET, noise_variance=1.0))
AVERAGE = OuterStep(momentum=0.0, lr=1.0)


def loss_of(mean: np.ndarray) -> float:
    source = QUIET.begin(4, 0)
    away = mean - source.optimum.numpy()
    return float(0.5 * (away * source.eigenvalues.numpy() * away).sum())


@pytest.mark.parametrize("outer", [None, OuterStep(0.5, 0.8)])
def test_diloco_takes_nesterov_s_step_on_the_mean_of_what_workers_did(
    outer: OuterStep | None,
) -> None:
    trace = simulate(replace(SCENARIO, outer=outer), "diloco")
    momentum, lr = (0.9, 0.7) if outer is None else (0.5, 0.8)
    source = QUIET.begin(4, 0)
    a, optimum = source.eigenvalues.numpy(), source.optimum.numpy()
    base, m = np.zeros(6), np.zeros(6)
    expected = []
    for _ in range(3):
        mean = base.copy()  # all curve alike, so that the mean row follows the mean gradient
        for _ in range(4):
            expected.append(loss_of(mean))
            mean -= RATE * a * (mean - optimum)
        g = mean - base
        m = momentum * m + g
        base = base + lr * (g + momentum * m)
    expected.append(loss_of(base))
    assert trace.column("loss")[:13] == pytest.approx(expected)
    distances = trace.column("consensus_distance")
    assert (distances[[0, 4, 8, 12]] < 1e-25).all()
    assert (distances[[3, 7, 11]] > 1e-3).all()
    # Three all-reduces of one model, over the ring of four.
    assert trace.models_sent == 3 * 2 * 3
    assert trace.column("exchanges")[12] == 12
    assert trace.column("drift").max() < 1e-12


def test_averaging_at_every_step_is_data_parallel_training() -> None:
    """Under plain SGD the mean of the rows' steps is the step of the mean gradient."""
    every_step = replace(NOISY, sync_every=1, outer=AVERAGE)
    expected, trace = simulate(every_step, "allreduce"), simulate(every_step, "diloco")
    np.testing.assert_allclose(trace.column("loss"), expected.column("loss"), rtol=1e-9)
    assert trace.column("consensus_distance").max() < 1e-25
    assert trace.models_per_step == pytest.approx(expected.models_per_step)


def test_diloco_averages_the_moments_that_were_asked_for() -> None:
    moments = {"exp_avg_sq": 2}
    scenario = replace(NOISY, optimizer=AdamW(0.01), exchange_moments=moments, num_steps=8.5)
    rounds = DiLoCo(scenario, "diloco", lambda share: None)
    trace = rounds.run()
    assert trace.worker_steps == [8] * 4
    assert trace.models_sent == (2 + 1) * 2 * 3
    spread = {name: float(rows.std(dim=0).max()) for name, rows in rounds.training.state.items()}
    assert spread["exp_avg"] > 1e-3
    assert spread["exp_avg_sq"] == 0.0


def test_what_plays_no_part_or_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="consensus has none: choose another objective"):
        simulate(Scenario(), "diloco")
    with pytest.raises(ValueError, match="which the optimizer does not keep; choose among none"):
        simulate(replace(SCENARIO, exchange_moments={"exp_avg_sq": 1}), "gossip")
    for wrong in (
        {"sync_every": 0},
        {"exchange_moments": {"exp_avg_sq": 0}},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(SCENARIO, **wrong)
    with pytest.raises(ValueError, match="momentum"):
        OuterStep(momentum=1.0)


def test_the_same_seed_gives_the_same_trace() -> None:
    digests = [simulate(replace(NOISY, seed=seed), "diloco").digest() for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
