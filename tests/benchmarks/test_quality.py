"""The parts of quality that its figures rest on, and two short runs."""

import math
from dataclasses import replace

import pytest
import torch
from quality import TUNING_SEED, measure
from support.conditions import CONDITIONS
from support.quality_rows import DEFAULT_ROWS, KINDS, OuterNesterov, RowName
from support.quality_worker import RunResult, RunSettings, Size, num_parameters, run
from torch import nn

from support import quality_rows

SIZE = Size(width=16, depth=1, context=16, batch_size=2, steps=4)
SETTINGS = RunSettings("ddp", "disjoint", 0.004, 0, SIZE, workers=2)
RATES = [0.004, 0.008]


def result(loss: float | None, sent: float = 6.0) -> RunResult:
    times = {"ended_s": 20.0, "seconds": 20.0, "samples_per_s": 100.0}
    return RunResult(
        loss=loss, bytes_per_parameter_step=sent, samples=1_000, comm_rate=1.0, **times
    )


def test_all_seeds_run_with_what_is_best_for_another_seed_without_a_condition():
    asked: list[RunSettings] = []

    def fake(settings: RunSettings) -> RunResult | None:
        asked.append(settings)
        off = settings.learning_rate / 0.008, settings.weight_decay / 0.025
        loss = sum(abs(math.log2(each)) for each in off) + settings.seed
        return result(loss) if settings.seed < 3 else None

    timed = replace(SETTINGS, condition=CONDITIONS["equal"])
    found = measure(timed, (RATES, [0.05, 0.1]), 3, fake)
    assert {(one.seed, one.condition) for one in asked[:7]} == {(TUNING_SEED, None)}
    assert [(one.learning_rate, one.weight_decay) for one in asked[:7]] == [
        *((rate, 0.05) for rate in (0.004, 0.008, 0.016)),
        *((0.008, decay) for decay in (0.05, 0.1, 0.025, 0.0125)),
    ]
    assert asked[7:] == [
        replace(timed, learning_rate=0.008, weight_decay=0.025, seed=seed) for seed in (1, 2, 3)
    ]
    assert sorted(found.tried["weight_decay"]) == [0.0125, 0.025, 0.05, 0.1]
    assert found.is_tuned
    assert list(found.results) == [1, 2]  # the third is not to be had now
    assert not measure(SETTINGS, (RATES, [0.1]), 3, lambda _: None).is_tuned


def test_a_row_is_a_kind_and_a_period():
    assert RowName.parse("diloco@32") == RowName("diloco@32", "diloco", 32)
    assert RowName.parse("ddp").period is None
    assert RowName.parse("gossip").gossip_options("ring")["comm_rate"] == 1.0
    assert {RowName.parse(text).kind for text in DEFAULT_ROWS.split(",")} <= set(KINDS)
    assert not RowName.parse("none").gossip_options("ring")
    often = RowName.parse("gossip_lattice8@1/4")
    assert often.gossip_options("ring")["comm_rate"] == 4.0
    assert often.label == "gossipdp, gossip, lattice8, 4 exchanges a step"


def test_the_outer_step_is_nesterovs():
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    outer = OuterNesterov(net)
    start = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    first, second = torch.randn(8), torch.randn(8)
    outer.step(first)
    outer.step(second)
    momentum, rate = quality_rows.OUTER_MOMENTUM, quality_rows.OUTER_RATE
    expected = start + rate * (1 + momentum) * first
    expected += rate * (second + momentum * (momentum * first + second))
    torch.testing.assert_close(nn.utils.parameters_to_vector(net.parameters()).detach(), expected)
    net.weight.data.add_(1.0)  # the anchor stays where the outer step left it
    torch.testing.assert_close(outer.drift()[:6], torch.ones(6))


@pytest.mark.processes
def test_a_run_trains_every_worker_as_long_and_counts_its_bytes():
    """Other rows run under a condition, in test_time_to_loss."""
    found, sent = run(replace(SETTINGS, row="local_sgd_bf16@2")), 1.0
    assert found.samples == 2 * SIZE.steps * SIZE.batch_size
    assert found.loss is not None
    assert found.loss < 8.0
    # Two workers send each other half of the vector twice: 2 bytes a parameter every second step,
    # and a few words.
    words = found.bytes_per_parameter_step - sent
    assert 0 <= words * num_parameters(SIZE) * SIZE.steps < 8_192
