from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from gossipdp_lab.simulate.objectives import Evaluation, Gradients, GradientSource, Objective
from gossipdp_lab.simulate.scenario import ConstantTime, Link, LinkModel, Scenario
from gossipdp_lab.simulate.study import simulate

EVEN = Scenario(num_workers=4, compute_time=ConstantTime(1.0), links=LinkModel(Link(latency_s=0.0)))


class Pull(Objective):
    """A pull of worker i towards i; one buffer column counts its steps times i."""

    name = "pull"

    def begin(self, num_workers: int, seed: int) -> GradientSource:
        return _PullSource(num_workers)


class _PullSource(GradientSource):
    def __init__(self, num_workers: int) -> None:
        self.start = torch.zeros(num_workers, 2, dtype=torch.float64)
        self.start[:, 0] = torch.arange(num_workers)
        self.num_trained = 1

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        targets = torch.tensor(list(ranks), dtype=torch.float64).unsqueeze(1)
        return Gradients(x[:, :1] - targets, targets)

    def evaluate(self, x: Tensor) -> Evaluation:
        return Evaluation(loss=float(x[0]), metric=float(x[1]))


def test_all_reduce_takes_the_step_of_the_mean_gradient_everywhere():
    optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    scenario = replace(EVEN, objective=Pull(), optimizer=optimizer, num_steps=3, num_records=3)
    shares: list[float] = []
    trace = simulate(scenario, "allreduce", shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    # All start from rank 0's row, x = 0, and follow the mean of the targets, 1.5.
    x, momentum, expected = 0.0, 0.0, [0.0]
    for _ in range(3):
        momentum = 0.5 * momentum + (x - 1.5)
        x -= 0.5 * momentum
        expected.append(x)
    assert trace.column("loss").tolist() == pytest.approx(expected)
    # Each worker's own buffer, judged at the mean.
    assert trace.column("metric").tolist() == pytest.approx([0.0, 1.5, 3.0, 4.5])
    assert trace.column("consensus_distance").tolist() == [0.0] * 4
    assert trace.column("gradient_steps").tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_the_cost_of_an_all_reduce_is_that_of_its_slowest_link(num_workers):
    links = LinkModel(Link(0.01, 1000.0), overrides={(1, 0): Link(0.02, 500.0)})
    scenario = replace(EVEN, num_workers=num_workers, links=links, model_bytes=400.0)
    trace = simulate(replace(scenario, num_steps=40, num_records=4), "allreduce")
    hops = 2 * (num_workers - 1)
    round_s = 1.0 + hops / num_workers * 400 / 500 + hops * 0.02
    assert trace.worker_steps == [int(40 / round_s)] * num_workers
    assert trace.records[-1].idle_share == pytest.approx(1 - 1 / round_s)
    num_edges = {1: 0, 2: 1, 8: 8}[num_workers]
    assert trace.records[-1].exchanges == num_edges * trace.worker_steps[0]
