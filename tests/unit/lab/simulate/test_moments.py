from dataclasses import replace
from functools import partial

import pytest
import torch

from gossipdp.dynamics.phase import Phase
from gossipdp.protocol.actions import Begin
from gossipdp.protocol.messages import ExchangeId
from gossipdp_lab.simulate.links import CarriedRows
from gossipdp_lab.simulate.objectives import Quadratic
from gossipdp_lab.simulate.population import Training
from gossipdp_lab.simulate.scenario import ConstantTime, Link, LinkModel, Scenario
from gossipdp_lab.simulate.study import simulate

NOISY = Scenario(
    graph="ring",
    num_workers=2,
    fidelity="links",
    objective=Quadratic(dimension=6, mu=0.5, smoothness=2.0, heterogeneity=4.0),
    optimizer=partial(torch.optim.AdamW, lr=0.05),
    compute_time=ConstantTime(1.0),
    links=LinkModel(Link(latency_s=0.0)),
)


@pytest.mark.parametrize("moment", ["step", "momentum_buffer"])
def test_moments_that_the_optimizer_does_not_keep_are_refused(moment):
    with pytest.raises(ValueError, match="choose among exp_avg, exp_avg_sq"):
        simulate(replace(NOISY, exchange_moments={moment: 1}), "gossip")


def test_moments_are_averaged_and_their_bytes_count():
    def run(every: int | None):
        moments = {} if every is None else {"exp_avg_sq": every}
        scenario = replace(NOISY, graph="complete", num_workers=8, num_steps=40)
        return simulate(replace(scenario, exchange_moments=moments), "gossip")

    plain, each, fourth = run(None), run(1), run(4)
    num_ends = 2 * plain.records[-1].exchanges
    assert 0 <= plain.models_sent - num_ends <= 8  # some are under way at the end
    assert plain.models_sent > 200
    assert each.models_sent == 2 * plain.models_sent
    # More than one in 4: what a worker's partner has due travels both ways.
    assert fourth.models_sent / plain.models_sent == pytest.approx(1.28, abs=0.03)
    assert each.column("loss")[-1] != plain.column("loss")[-1]


def test_by_default_rare_exchanges_carry_the_moment_after_a_part_of_its_memory():
    forgetful = partial(torch.optim.AdamW, lr=0.05, betas=(0.9, 0.1))
    scenario = replace(NOISY, optimizer=forgetful, comm_rate=1 / 16, num_steps=400)
    rare, fourth = (
        simulate(replace(scenario, exchange_moments=moments), "gossip")
        for moments in (True, {"exp_avg_sq": 4})
    )
    assert rare.models_sent > 1.9 * 2 * rare.records[-1].exchanges > 40
    assert fourth.models_sent < 1.5 * 2 * fourth.records[-1].exchanges


@pytest.mark.parametrize("ages", [(20, 400), (0, 400)])
def test_workers_of_unlike_ages_average_the_corrected_moment(ages):
    training = Training.of(replace(NOISY, exchange_moments={"exp_avg_sq": 1}), momentum=False)
    assert training.optimizers is not None
    rows = CarriedRows(training, {rank: Phase(0.0, 1.0) for rank in (0, 1)})
    training.steps[:] = ages
    masses = [1.0 - 0.999**age for age in ages]
    second = training.optimizers.state["exp_avg_sq"]
    for rank, corrected in enumerate((3.0, 5.0)):
        second[rank] = corrected * masses[rank]
    id = ExchangeId(0, 0, 1)
    sent = [rows.exchange_began(rank, Begin(1 - rank, id, 0.5, (1,)), 0.0) for rank in (0, 1)]
    for rank in (0, 1):
        rows.data_arrived(rank, id, sent[1 - rank], 1.0)
    expected = (4.0, 4.0) if min(ages) else (0.0, 5.0)  # who has none gives and takes none
    for rank in (0, 1):
        assert second[rank].tolist() == pytest.approx([expected[rank] * masses[rank]] * 6)


def test_a_link_is_busy_for_longer_where_moments_travel():
    links = LinkModel(Link(latency_s=0.0, bytes_per_s=1000.0))
    often = replace(NOISY, comm_rate=4.0, num_steps=50, compute_time=ConstantTime())
    scenario = replace(often, model_bytes=100.0, links=links)
    plain = simulate(scenario, "gossip")
    both = simulate(replace(scenario, exchange_moments={"exp_avg": 1, "exp_avg_sq": 1}), "gossip")
    # One model takes a step's time, so that the link is always busy: with three models an exchange
    # there are a third as many except at the start, when none has been asked for, and the last one.
    assert plain.records[-1].exchanges > 40
    assert both.records[-1].exchanges == pytest.approx(plain.records[-1].exchanges / 3, abs=1.5)


def test_a_row_s_optimizer_steps_when_its_step_ends():
    """Count moments that were exchanged meanwhile, though the gradient is that of the start."""
    training = Training.of(NOISY, momentum=False)
    assert training.optimizers is not None
    second = training.optimizers.state["exp_avg_sq"]
    for rank in (0, 1):
        training.start_step(rank, 0.0)
    training.end_step(0)
    assert float(second[0].min()) > 0.0
    assert float(second[1].max()) == 0.0
    second[1] = 1e6
    before = training.population.x[1].clone()
    training.end_step(1)
    assert float((training.population.x[1] - before).abs().max()) < 0.05 * 0.2
