"""The speed of agreement: over quick and saturated links, and as the paper and theory say."""

from functools import partial
from statistics import fmean

import numpy as np
import pytest
import torch
from policies import NEIGHBOUR_POLICIES

from gossipdp_lab.simulate import ConstantTime, Link, LinkModel, LognormalTime, Scenario, SlowedTime
from gossipdp_lab.simulate.links import run_links
from gossipdp_lab.simulate.objectives import Quadratic
from gossipdp_lab.simulate.study import simulate
from gossipdp_lab.simulate.trace import Trace

STEP_S = 0.1
MODEL_BYTES = 1e6


def links(transfer_steps: float, jitter: float = 0.0) -> LinkModel:
    """Return links on which an exchange takes so many gradient steps; messages are quick."""
    speed = MODEL_BYTES / (transfer_steps * STEP_S) if transfer_steps else float("inf")
    return LinkModel(Link(latency_s=1e-4, bytes_per_s=speed), jitter=jitter)


def run(graph: str, num_workers: int, method: str = "a2cid2", **settings: object) -> Trace:
    settings |= {"num_workers": num_workers, "model_bytes": MODEL_BYTES, "num_records": 150}
    scenario = Scenario(graph=graph, fidelity="links", stop_below=1e-20, **settings)  # type: ignore
    trace = run_links(scenario, method, lambda share: None)
    assert trace.column("drift").max() < 1e-12
    return trace


# With even ticks; with Poisson ticks a2cid2 was at 0.30 and 0.23 on the ring, the design's figures.
@pytest.mark.parametrize(
    ("graph", "num_workers", "method", "policy", "lowest", "highest"),
    [
        ("ring", 16, "a2cid2", "fresh", 0.32, 0.38),
        ("ring", 16, "a2cid2", "poisson", 0.23, 0.30),
        ("ring", 16, "gossip", "fresh", 0.13, 0.155),
        ("ring", 16, "gossip", "poisson", 0.075, 0.095),
        ("torus", 36, "a2cid2", "fresh", 0.47, 0.59),
        ("torus", 36, "a2cid2", "poisson", 0.34, 0.44),
        ("complete", 16, "a2cid2", "fresh", 0.68, 0.86),
    ],
)
def test_decay_with_quick_exchanges(graph, num_workers, *, method, policy, lowest, highest):
    options = {"neighbour_policy": NEIGHBOUR_POLICIES[policy], "links": links(0)}
    options["num_steps"] = 300 if graph == "ring" else 90
    traces = [run(graph, num_workers, method, seed=seed, **options) for seed in range(2)]
    assert lowest < fmean(trace.decay_per_exchange() for trace in traces) < highest


@pytest.mark.parametrize(
    ("graph", "num_workers", "comm_rate"), [("ring", 16, 4.0), ("torus", 64, 1.0)]
)
def test_saturated_links_do_not_stop_agreement(graph, num_workers, comm_rate):
    """An exchange takes 1.5 steps, so that more than 2/3 of one a step is asked in vain."""
    trace = run(graph, num_workers, links=links(1.5), comm_rate=comm_rate, num_steps=120)
    assert 0.5 < trace.achieved_comm_rate < 1 / 1.5
    assert trace.decay_per_exchange() > 0.2


@pytest.mark.parametrize(
    ("graph", "transfer_steps", "jitter", "compute_time"),
    [
        ("ring", 1.5, 0.0, ConstantTime(STEP_S)),
        ("ring", 6.0, 0.0, ConstantTime(STEP_S)),
        ("ring", 1.5, 1.0, LognormalTime(STEP_S, spread=1.0)),
        ("ring", 0.5, 0.0, SlowedTime(ConstantTime(STEP_S), {3: 8.0})),
        ("star", 0.5, 0.0, ConstantTime(STEP_S)),
        ("path", 1.5, 0.5, ConstantTime(STEP_S)),
    ],
)
def test_a2cid2_is_stable_whatever_the_links_sustain(graph, transfer_steps, jitter, compute_time):
    options = {"links": links(transfer_steps, jitter), "compute_time": compute_time}
    num_steps = 250 * max(1.0, transfer_steps / 1.5)
    trace = run(graph, 16, comm_rate=2.0, num_steps=num_steps, **options)
    distances = trace.column("consensus_distance")
    assert distances.max() <= distances[0]
    assert distances[-1] < 1e-4 * distances[0]
    if graph == "ring":  # twice the gossip of `fresh`, as with quick exchanges
        assert trace.decay_per_exchange() > 0.25


# The paper's claims, and the distance that theory says, on small simulated runs.

MOMENTUM = 0.9
WHITE = Quadratic(dimension=8, mu=0.0, smoothness=0.0, noise_variance=8.0)


def stationary_distance(method: str, comm_rate: float, momentum: float) -> float:
    """Mean consensus distance per coordinate over the second half of a run on a ring of 64."""
    # The same movement in the long run, whatever the momentum.
    optimizer = partial(torch.optim.SGD, lr=1.0 - momentum, momentum=momentum)
    sizes = {"num_workers": 64, "num_steps": 800, "comm_rate": comm_rate}
    scenario = Scenario(graph="ring", objective=WHITE, optimizer=optimizer, **sizes)
    distances = simulate(scenario, method).column("consensus_distance")
    return float(np.mean(distances[len(distances) // 2 :])) / WHITE.dimension


def test_on_a_ring_a2cid2_is_worth_more_than_twice_the_exchanges():
    """The paper's claim (its figure 1 and section 4), with SGD momentum 0.9."""
    accelerated = stationary_distance("a2cid2", 1.0, MOMENTUM)
    doubled = stationary_distance("gossip", 2.0, MOMENTUM)
    plain = stationary_distance("gossip", 1.0, MOMENTUM)
    assert accelerated < doubled < plain


@pytest.mark.parametrize(("method", "expected"), [("gossip", 11.633), ("a2cid2", 9.700)])
def test_simulated_noise_keeps_workers_as_far_apart_as_theory_says(method, expected):
    # The covariance of the ideal network with white noise of variance 1, solved exactly. Without
    # momentum it makes no difference that simulated steps are regular, those of theory Poisson.
    # Eight coordinates over 400 units of time; the slowest mode of gossip forgets within 200.
    assert stationary_distance(method, 1.0, 0.0) == pytest.approx(expected, rel=0.25)
