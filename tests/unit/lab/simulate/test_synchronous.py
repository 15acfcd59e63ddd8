"""All-reduce and D-PSGD: mixing matrices, arithmetic, costs and records."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossipdp.graph.topology import build_graph
from gossipdp_lab.simulate.objectives import (
    Evaluation,
    Gradients,
    GradientSource,
    Objective,
)
from gossipdp_lab.simulate.optimizers import Sgd
from gossipdp_lab.simulate.scenario import (
    ConstantTime,
    Link,
    LinkModel,
    LognormalTime,
    Scenario,
    SlowedTime,
)
from gossipdp_lab.simulate.study import ROUNDS
from gossipdp_lab.simulate.synchronous import mixing_matrix, quick_to_multiply, second_eigenvalue
from gossipdp_lab.simulate.trace import Trace

CONNECTED = st.sampled_from(["ring", "path", "star", "complete", "exponential", "erdos-renyi"])


@given(CONNECTED, st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_mixing_matrices_are_symmetric_and_doubly_stochastic(name: str, n: int) -> None:
    graph = build_graph(name, n)
    matrix = mixing_matrix(graph)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=1e-12)
    assert (matrix >= -1e-15).all()
    edges = {(i, j) for i, j in np.argwhere(np.triu(matrix, 1) > 0)}
    assert edges == {(min(edge), max(edge)) for edge in graph.edges}
    assert second_eigenvalue(matrix) < 1.0


def test_metropolis_weights_of_a_star_and_a_ring() -> None:
    star = mixing_matrix(build_graph("star", 5))
    assert star[0, 1:] == pytest.approx([0.2] * 4)
    assert star[1, 1] == pytest.approx(0.8)
    ring = mixing_matrix(build_graph("ring", 12))
    assert ring[3, 2:5] == pytest.approx([1 / 3] * 3)
    gap = 2 / 3 * (1 - math.cos(2 * math.pi / 12))
    assert second_eigenvalue(ring) == pytest.approx(1 - gap)
    assert second_eigenvalue(mixing_matrix(build_graph("complete", 9))) == 0.0


@pytest.mark.parametrize(("name", "n"), [("ring", 40), ("complete", 7)])
def test_sparse_and_dense_multiplication_agree(name: str, n: int) -> None:
    matrix = mixing_matrix(build_graph(name, n))
    rows = np.random.default_rng(0).standard_normal((n, 3))
    np.testing.assert_allclose(quick_to_multiply(matrix) @ rows, matrix @ rows, atol=1e-14)


EVEN = Scenario(num_workers=4, compute_time=ConstantTime(1.0), links=LinkModel(Link(latency_s=0.0)))


@dataclass(frozen=True)
class Pull(Objective):
    """A pull of worker i towards i; one buffer column counts its steps times i."""

    name: ClassVar[str] = "pull"

    def begin(self, num_workers: int, seed: int) -> GradientSource:
        return _PullSource(num_workers)


class _PullSource(GradientSource):
    def __init__(self, num_workers: int) -> None:
        self.start = torch.zeros(num_workers, 2, dtype=torch.float64)
        self.start[:, 0] = torch.arange(num_workers)
        self.num_trained = 1

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        targets = torch.tensor(list(ranks), dtype=torch.float64).unsqueeze(1)
        pull = x[:, :1] - targets
        return Gradients(pull, targets, 0.5 * pull.square().squeeze(1))

    def evaluate(self, x: Tensor) -> Evaluation:
        return Evaluation(loss=float(x[0]), metric=float(x[1]))


def run(
    scenario: Scenario, method: str, on_progress: Callable[[float], None] = lambda share: None
) -> Trace:
    return ROUNDS[method](scenario, method, on_progress).run()


def test_all_reduce_takes_the_step_of_the_mean_gradient_everywhere() -> None:
    scenario = replace(
        EVEN, objective=Pull(), optimizer=Sgd(0.5, momentum=0.5), num_steps=3, num_records=3
    )
    shares: list[float] = []
    trace = run(scenario, "allreduce", shares.append)
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
    # The batches' losses at x = 0 in the first round: (0 + 1 + 4 + 9) / 2 / 4.
    assert math.isnan(trace.records[0].batch_loss)
    assert trace.records[1].batch_loss == pytest.approx(14 / 8)


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_the_cost_of_an_all_reduce_is_that_of_its_slowest_link(num_workers: int) -> None:
    links = LinkModel(Link(0.01, 1000.0), overrides={(1, 0): Link(0.02, 500.0)})
    changes = {"model_bytes": 400.0, "num_steps": 40, "num_records": 4}
    scenario = replace(EVEN, num_workers=num_workers, links=links, **changes)
    trace = run(scenario, "allreduce")
    hops = 2 * (num_workers - 1)
    round_s = 1.0 + hops / num_workers * 400 / 500 + hops * 0.02
    assert trace.worker_steps == [int(40 / round_s)] * num_workers
    assert trace.records[-1].idle_share == pytest.approx(1 - 1 / round_s)
    num_edges = {1: 0, 2: 1, 8: 8}[num_workers]
    assert trace.records[-1].exchanges == num_edges * trace.worker_steps[0]
    assert sum(trace.worker_exchanges) == 2 * trace.records[-1].exchanges


def test_all_reduce_waits_for_the_slowest() -> None:
    slowed = SlowedTime(ConstantTime(1.0), {2: 3.0})
    trace = run(replace(EVEN, compute_time=slowed, num_steps=12, keep_timeline=True), "allreduce")
    assert trace.worker_steps == [4] * 4
    assert trace.records[-1].idle_share == pytest.approx(3 * 2 / 12)
    first = [one[1:] for one in trace.intervals if one.end_s <= 3 and one.rank == 1]
    assert first == [("computing", 0, 1), ("waiting", 1, 3), ("exchanging", 3, 3)]


def test_dpsgd_is_mixing_and_each_workers_own_update() -> None:
    pulled = {"objective": Pull(), "optimizer": Sgd(0.1, momentum=0.9)}
    scenario = replace(EVEN, graph="path", num_workers=5, num_steps=4, num_records=4, **pulled)
    trace = run(scenario, "dpsgd")
    matrix = mixing_matrix(build_graph("path", 5))
    targets = np.arange(5.0)
    x, buffer, momentum, distances, buffers = targets.copy(), np.zeros(5), np.zeros(5), [2.0], [0.0]
    for _ in range(4):
        momentum = 0.9 * momentum + (x - targets)
        x = matrix @ x - 0.1 * momentum
        buffer = matrix @ buffer + targets
        distances.append(float(((x - x.mean()) ** 2).mean()))
        buffers.append(float(buffer.mean()))
    assert trace.column("consensus_distance").tolist() == pytest.approx(distances)
    assert trace.column("metric").tolist() == pytest.approx(buffers)
    assert trace.column("exchanges").tolist() == [0, 4, 8, 12, 16]
    assert trace.worker_exchanges == [4, 8, 8, 8, 4]
    assert trace.column("drift").max() < 1e-14


def test_dpsgd_waits_for_neighbours_only() -> None:
    slowed = SlowedTime(ConstantTime(1.0), {0: 10.0})
    scenario = replace(EVEN, graph="path", compute_time=slowed, num_steps=35, keep_timeline=True)
    trace = run(scenario, "dpsgd")
    starts = {
        rank: [
            interval.start_s
            for interval in trace.intervals
            if interval.rank == rank and interval.activity == "computing"
        ]
        for rank in range(4)
    }
    # The delay of rank 0 travels one edge a round.
    assert starts[0][:3] == [0, 10, 20]
    assert starts[1][:3] == [0, 10, 20]
    assert starts[2][:3] == [0, 1, 11]
    assert starts[3][:4] == [0, 1, 2, 12]


def test_one_card_sends_to_all_neighbours() -> None:
    links = LinkModel(Link(0.25, 1000.0))
    scenario = replace(
        EVEN, graph="star", num_workers=5, links=links, model_bytes=500.0, num_steps=14
    )
    trace = run(scenario, "dpsgd")
    # The hub sends four copies: 1 + 4 * 0.5 + 0.25 for the leaves; the hub itself ends at 3.0,
    # and then waits only for the leaves' rows, which leave 1.0 + 0.5 after they start.
    leaf, hub, rounds = 0.0, 0.0, 0
    while max(leaf, hub) <= 14:
        hub_sent, leaf_sent = hub + 3.0, leaf + 1.5
        hub, leaf = max(hub_sent, leaf_sent + 0.25), max(leaf_sent, hub_sent + 0.25)
        rounds += 1
    assert trace.worker_steps == [rounds - 1] * 5


@pytest.mark.parametrize("method", ["allreduce", "dpsgd"])
def test_the_same_seed_gives_the_same_trace(method: str) -> None:
    def digest(seed: int) -> str:
        scenario = Scenario(
            graph="exponential",
            num_workers=6,
            compute_time=LognormalTime(0.1, 0.3),
            links=LinkModel(Link(1e-3, 1e5), jitter=0.2),
            num_steps=20,
            seed=seed,
            keep_timeline=True,
        )
        return run(scenario, method).digest()

    assert digest(3) == digest(3) != digest(4)
