"""DiLoCo by closed forms, and the outer step and moments of asynchronous workers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gossipdp.dynamics.outer import OuterStep

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp_lab.simulate.ideal import PoissonEdges
from gossipdp_lab.simulate.objectives import Quadratic
from gossipdp_lab.simulate.optimizers import AdamW, Sgd
from gossipdp_lab.simulate.population import Training
from gossipdp_lab.simulate.scenario import ConstantTime, Fidelity, Link, LinkModel, Scenario
from gossipdp_lab.simulate.study import simulate
from gossipdp_lab.simulate.synchronous import DiLoCo

QUIET = Quadratic(dimension=6, mu=0.5, smoothness=2.0, noise_variance=0.0, heterogeneity=4.0)
RATE = 0.1
SCENARIO = Scenario(
    graph="ring",
    num_workers=4,
    objective=QUIET,
    optimizer=Sgd(RATE),
    compute_time=ConstantTime(1.0),
    links=LinkModel(Link(latency_s=0.0)),
    num_steps=13,
    num_records=13,
    sync_every=4,
)
NOISY = replace(
    SCENARIO, objective=replace(QUIET, noise_variance=1.0), optimizer=AdamW(0.05), num_workers=2
)


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


def test_diloco_averages_the_moments_that_were_asked_for() -> None:
    moments = {"exp_avg_sq": 2}
    scenario = replace(NOISY, num_workers=4, exchange_moments=moments, num_steps=8.5)
    rounds = DiLoCo(scenario, "diloco", lambda share: None)
    trace = rounds.run()
    assert trace.worker_steps == [8] * 4
    assert trace.models_sent == (2 + 1) * 2 * 3
    spread = {name: float(rows.std(dim=0).max()) for name, rows in rounds.training.state.items()}
    assert spread["exp_avg"] > 1e-3
    assert spread["exp_avg_sq"] == 0.0


def test_methods_and_moments_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="consensus has none: choose another objective"):
        simulate(Scenario(), "diloco")
    with pytest.raises(ValueError, match="which the optimizer does not keep; choose among none"):
        simulate(replace(SCENARIO, exchange_moments={"exp_avg_sq": 1}), "gossip")


OUTER = OuterStep(0.7, 0.9, 1)


def begin(num_workers: int, *, momentum: bool = False, outer: OuterStep | None = OUTER) -> Training:
    return Training.of(replace(NOISY, num_workers=num_workers), momentum=momentum, outer=outer)


def pair(training: Training) -> PoissonEdges:
    """Return the edge of two workers, which averages their rows."""
    constants = Constants.of(build_graph("complete", 2))
    rates = {"unit_s": 1.0, "eta": 0.0, "alpha_tilde": 0.5}
    return PoissonEdges(constants, training, **rates, is_released=False, seed=0)


def test_ideal_exchanges_of_two_in_lock_step_are_diloco() -> None:
    scenario = replace(NOISY, num_steps=20.5, outer=OUTER)
    diloco = DiLoCo(scenario, "diloco", lambda share: None)
    diloco.run()
    training = begin(2)
    edges = pair(training)
    for step in range(1, 21):
        for rank in range(2):
            training.start_step(rank, 0.0)
        for rank in range(2):
            training.end_step(rank)
        if step % 4 == 0:
            edges.apply(np.array([float(step)]), np.array([0]))
    torch.testing.assert_close(training.population.x, diloco.population.x, rtol=1e-12, atol=1e-13)
    assert edges.models_sent == 10


def test_changes_by_flow_and_exchanges_are_no_step_of_the_optimizer() -> None:
    training = begin(4, momentum=True)
    population, generator = training.population, torch.Generator().manual_seed(1)
    population.x.normal_(generator=generator)
    population.base.copy_(population.x)
    for number in range(1, 20):
        i, j = torch.randperm(4, generator=generator)[:2].tolist()
        for rank in (i, j):
            population.flow(rank, 0.1 * number)
        sent = population.x[i].clone(), population.x[j].clone()
        population.apply(i, sent[0], sent[1], 0.9)
        population.apply(j, sent[1], sent[0], 0.9)
    before = population.x.clone()
    for rank in range(4):
        population.outer_step(rank)
    torch.testing.assert_close(population.x, before, rtol=1e-13, atol=1e-13)
    assert population.outer_momentum.abs().max() < 1e-13


@pytest.mark.parametrize(("fidelity", "method"), [("ideal", "a2cid2"), ("links", "gossip")])
def test_with_momentum_0_and_lr_1_there_is_none(fidelity: Fidelity, method: str) -> None:
    scenario = Scenario(
        graph="ring",
        num_workers=8,
        objective=NOISY.objective,
        optimizer=Sgd(0.1, momentum=0.5),
        fidelity=fidelity,
        num_steps=40,
        num_records=8,
        comm_rate=0.5,
        links=LinkModel(Link(0.05, 1000.0)),
    )
    plain = simulate(scenario, method)
    same = simulate(replace(scenario, outer=OuterStep(0.0, 1.0, 1)), method)
    for name in ("loss", "consensus_distance"):
        np.testing.assert_allclose(same.column(name), plain.column(name), rtol=1e-8, atol=1e-10)
    other = simulate(replace(scenario, outer=OUTER), method)
    assert abs(other.column("loss") / plain.column("loss") - 1).max() > 0.05
    assert other.column("drift").max() < 1e-12
    assert other.models_per_step == pytest.approx(plain.models_per_step)


@pytest.mark.parametrize("fidelity", ["ideal", "links"])
def test_moments_are_averaged_and_their_bytes_count(fidelity: Fidelity) -> None:
    def run(every: int | None):
        moments = {} if every is None else {"exp_avg_sq": every}
        changes = {"graph": "complete", "num_workers": 8, "num_steps": 40, "fidelity": fidelity}
        return simulate(replace(NOISY, exchange_moments=moments, **changes), "gossip")

    plain, each, fourth = run(None), run(1), run(4)
    assert plain.models_sent == sum(plain.worker_exchanges) > 200
    assert each.models_sent == 2 * sum(each.worker_exchanges)
    assert fourth.models_sent / sum(fourth.worker_exchanges) == pytest.approx(1.25, abs=0.05)
    assert each.column("loss")[-1] != plain.column("loss")[-1]


def test_an_ideal_exchange_averages_the_moments_that_are_due() -> None:
    scenario = replace(NOISY, exchange_moments={"exp_avg": 1, "exp_avg_sq": 2})
    training = Training.of(scenario, momentum=False)
    edges = pair(training)
    averaged = []
    for _ in range(30):
        for name in ("exp_avg", "exp_avg_sq"):
            training.state[name].copy_(torch.tensor([[1.0], [3.0]]).expand(2, 6))
        edges.apply(np.array([1.0]), np.array([0]))
        assert (training.state["exp_avg"] == 2.0).all()
        averaged.append(bool((training.state["exp_avg_sq"] == 2.0).all()))
    # Every second exchange of either end, each of which asks for about half of them.
    assert sum(averaged) in (14, 15)
    assert edges.models_sent == 2 * (30 + 30 + sum(averaged))


def test_a_link_is_busy_for_longer_where_moments_travel() -> None:
    links = LinkModel(Link(latency_s=0.0, bytes_per_s=1000.0))
    changes = {"comm_rate": 4.0, "num_steps": 50, "compute_time": ConstantTime()}
    scenario = replace(NOISY, fidelity="links", model_bytes=100.0, links=links, **changes)
    plain = simulate(scenario, "gossip")
    both = simulate(replace(scenario, exchange_moments={"exp_avg": 1, "exp_avg_sq": 1}), "gossip")
    # One model takes a step's time, so that the link is always busy: with three models an exchange
    # there are a third as many except at the start, when none has been asked for, and the last one.
    assert plain.records[-1].exchanges > 40
    assert both.records[-1].exchanges == pytest.approx(plain.records[-1].exchanges / 3, abs=1.5)


def test_a_row_s_optimizer_steps_when_its_step_ends() -> None:
    """Count moments that were exchanged meanwhile, though the gradient is that of the start."""
    training = begin(2, outer=None)
    for rank in (0, 1):
        training.start_step(rank, 0.0)
    training.end_step(0)
    assert float(training.state["exp_avg_sq"][0].min()) > 0.0
    assert float(training.state["exp_avg_sq"][1].max()) == 0.0
    training.state["exp_avg_sq"][1] = 1e6
    before = training.population.x[1].clone()
    training.end_step(1)
    assert float((training.population.x[1] - before).abs().max()) < 0.05 * 0.2
