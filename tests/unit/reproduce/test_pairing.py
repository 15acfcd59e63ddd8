import numpy as np
import pytest

from gossipdp.protocol.neighbours import NEIGHBOUR_POLICIES
from gossipdp.reproduce.pairing import PairingJob, measure_run
from gossipdp.reproduce.pairing_run import run_watched
from gossipdp.reproduce.pairing_text import PairingResult, PairingRun, gains, slow_runs
from gossipdp.simulate.compute_time import LognormalTime
from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.link_model import Link, LinkModel
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import simulate


def test_with_one_neighbour_it_is_the_simulator_s_own_run():
    """Where a policy has no choice, its random source plays no part."""
    scenario = Scenario(
        graph="path", num_workers=2, objective=Consensus(4), fidelity="links", num_steps=60,
        links=LinkModel(every=Link(0.001, 1000.0), jitter=0.2), model_bytes=50.0,
        compute_time=LognormalTime(0.1, 0.1), num_records=10,
    )  # fmt: skip
    watched = run_watched(scenario, "a2cid2", NEIGHBOUR_POLICIES["fresh"])
    # As arrays, to which NaN is NaN.
    np.testing.assert_equal(
        np.array(watched.trace.records), np.array(simulate(scenario, "a2cid2").records)
    )
    assert watched.trace.records[-1].exchanges > 20
    assert watched.repeated_share == 1.0


def run(policy: str, *, method="a2cid2", part="duration") -> PairingRun:
    return measure_run(PairingJob(part, method, "ring", 8, policy, 1.5, False, 0, 60.0))


def test_available_locks_in_and_fresh_does_not():
    fresh, available = run("fresh"), run("available")
    assert available.repeated_share > 0.75
    assert fresh.repeated_share < 0.25
    assert fresh.decay_per_exchange > 3 * available.decay_per_exchange
    # An exchange of 1.5 steps leaves room for two thirds of one a step.
    assert 0.4 < fresh.comm_rate < 0.7
    assert fresh.decay_per_step == pytest.approx(fresh.decay_per_exchange * fresh.comm_rate)


def test_the_method_counts():
    assert run("fresh").decay_per_exchange > 1.2 * run("fresh", method="gossip").decay_per_exchange


def searched(policy: str, network: str, seed: int, decay: float) -> PairingRun:
    return PairingRun("search", "a2cid2", network, 16, policy, 1.5, True, seed, decay, decay, 1, 0)


def test_gains_are_paired():
    runs = [
        searched(policy, graph, seed, scale * factor)
        for policy, factor in (("fresh", 1.0), ("other", 1.25))
        for graph, scale in (("ring", 0.1), ("torus", 1.0))
        for seed, scale in ((0, scale), (1, 2 * scale))
    ]
    found = gains(PairingResult(runs, 60.0, 16), "decay_per_step")
    assert found["fresh"] == (1.0, 0.0)
    assert found["other"][0] == pytest.approx(1.25)
    assert found["other"][1] == pytest.approx(0.0, abs=1e-9)


def test_slow_runs_of_fresh_are_found():
    runs = [
        PairingRun("duration", "a2cid2", "torus", 16, policy, 1.5, False, seed, decay, decay, 1, 0)
        for policy, decays in (("fresh", (0.8, 0.1, 0.9)), ("available", (0.01, 0.01, 0.01)))
        for seed, decay in enumerate(decays)
    ]
    assert slow_runs(PairingResult(runs, 60.0, 16)) == [runs[1]]
