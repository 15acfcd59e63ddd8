"""Methods of local steps: what each makes of the rows, by closed forms and by one another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gossipdp.dynamics.outer import OuterStep
from gossipdp.simulate.local_steps import DiLoCo
from gossipdp.simulate.objectives import Quadratic
from gossipdp.simulate.optimizers import AdamW, Sgd
from gossipdp.simulate.scenario import ConstantTime, Link, LinkModel, Scenario
from gossipdp.simulate.study import simulate
from gossipdp.simulate.trace import Trace

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


def same(first: Trace, second: Trace) -> None:
    for name in ("loss", "consensus_distance", "batch_loss"):
        np.testing.assert_allclose(first.column(name), second.column(name), rtol=1e-9, atol=1e-12)


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
    every_step = replace(NOISY, sync_every=1, overlap_steps=0, outer=AVERAGE, share=1.0)
    expected = simulate(every_step, "allreduce")
    for method in ("diloco", "streaming-diloco", "sparta"):
        trace = simulate(replace(every_step, mixing=0.0), method)
        np.testing.assert_allclose(trace.column("loss"), expected.column("loss"), rtol=1e-9)
        assert trace.column("consensus_distance").max() < 1e-25
        assert trace.models_per_step == pytest.approx(expected.models_per_step)


def test_streaming_one_fragment_at_once_is_diloco() -> None:
    whole = replace(NOISY, fragments=1, overlap_steps=0, mixing=0.0)
    same(simulate(whole, "streaming-diloco"), simulate(whole, "diloco"))


def test_streaming_fragments_are_averaged_in_turn_and_kept_in_part() -> None:
    scenario = replace(SCENARIO, fragments=2, overlap_steps=1, outer=AVERAGE)
    trace = simulate(scenario, "streaming-diloco")
    source = QUIET.begin(4, 0)
    a, optimum = source.eigenvalues.numpy(), source.optimum.numpy()
    x, sent, expected = np.zeros((4, 6)), {}, []
    for number in range(1, 14):
        expected.append(float(((x - x.mean(axis=0)) ** 2).sum() / 4))
        x = x - RATE * (a * (x - optimum) + source.drifts.numpy())
        for columns, turn in ((slice(0, 3), 2), (slice(3, 6), 0)):
            if number % 4 == turn:
                sent[turn] = x[:, columns].mean(axis=0)
            if number > 1 and (number - 1) % 4 == turn:
                x[:, columns] = 0.5 * x[:, columns] + 0.5 * sent[turn]
    assert trace.column("consensus_distance")[:13] == pytest.approx(expected)
    # Six halves, two of them by the third round, are sent in twelve rounds.
    assert trace.models_sent == 6 * 0.5 * 6


def test_a_streamed_fragment_is_waited_for_only_if_it_is_late() -> None:
    slow = LinkModel(Link(latency_s=0.0, bytes_per_s=1.0))
    scenario = replace(SCENARIO, links=slow, num_steps=40, fragments=1, overlap_steps=2)
    # A round takes a second, an all-reduce of 4 bytes by 4 workers 6: it is sent after 4 rounds,
    # and due after 6, so that 4 rounds take 8 seconds from then on.
    late = simulate(replace(scenario, model_bytes=4.0), "streaming-diloco")
    assert late.worker_steps == [21] * 4
    in_time = simulate(replace(scenario, model_bytes=1.3), "streaming-diloco")
    assert in_time.worker_steps == [40] * 4
    assert simulate(replace(scenario, model_bytes=1.3), "diloco").worker_steps[0] < 30


def test_the_mean_of_noloco_follows_its_momentum_whatever_the_pairs() -> None:
    trace = simulate(replace(SCENARIO, outer=OuterStep(0.5, 0.7)), "noloco")
    source = QUIET.begin(4, 0)
    a, optimum = source.eigenvalues.numpy(), source.optimum.numpy()
    slow, delta = np.zeros(6), np.zeros(6)
    for _ in range(3):
        fast = slow.copy()
        for _ in range(4):
            fast -= RATE * a * (fast - optimum)
        delta = 0.5 * delta + 0.7 * (fast - slow)
        slow = slow + delta
    assert trace.column("loss")[12] == pytest.approx(loss_of(slow))
    # Each of four workers sends two models to its partner, three times.
    assert trace.models_sent == 3 * 4 * 2
    assert trace.worker_exchanges == [3] * 4


def test_noloco_brings_workers_together() -> None:
    apart = replace(SCENARIO, num_workers=8, num_steps=200, num_records=200)
    distances = simulate(apart, "noloco").column("consensus_distance")
    alone = simulate(replace(apart, fidelity="ideal"), "none").column("consensus_distance")
    assert distances[-10:].max() < 0.2 * alone[-1]


def test_an_odd_worker_of_noloco_waits_for_nobody() -> None:
    trace = simulate(replace(SCENARIO, num_workers=3), "noloco")
    assert sum(trace.worker_exchanges) == 2 * trace.records[-1].exchanges == 6


def test_sparta_keeps_the_mean_and_averages_its_share() -> None:
    noise = Quadratic(dimension=4000, mu=0.0, smoothness=0.0, noise_variance=4000.0)
    scenario = replace(
        SCENARIO, objective=noise, optimizer=Sgd(1.0), share=0.25, num_steps=60, num_records=60
    )
    trace = simulate(scenario, "sparta")
    assert trace.column("drift").max() < 1e-10
    # Each coordinate takes one unit of variance a step and is averaged at a quarter of them:
    # among 4 workers it holds 3/4 of (1 - p)/p in expectation.
    settled = trace.column("consensus_distance")[20:].mean() / 4000
    assert settled == pytest.approx(0.75 * 0.75 / 0.25, rel=0.05)
    assert trace.models_per_step == pytest.approx(0.25 * 2 * 3 / 4)


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
        {"fragments": 0},
        {"overlap_steps": 4},
        {"mixing": 1.5},
        {"share": 0.0},
        {"exchange_moments": {"exp_avg_sq": 0}},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(SCENARIO, **wrong)
    with pytest.raises(ValueError, match="momentum"):
        OuterStep(momentum=1.0)


@pytest.mark.parametrize("method", ["diloco", "streaming-diloco", "noloco", "sparta"])
def test_the_same_seed_gives_the_same_trace(method: str) -> None:
    digests = [simulate(replace(NOISY, seed=seed), method).digest() for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
