"""Means and spreads over seeds, the tail of the decay, and how long runs must be for it."""

from __future__ import annotations

import math

import pytest

from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.consensus_length import LEAST_STEPS, steps_to_agree
from gossipdp.simulate.ensemble import TAIL_LOWEST, Ensemble, Estimate, lowest_share, tail_decay
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import simulate
from gossipdp.simulate.trace import Record, Trace


def trace(distances: list[float], *, steps: list[int] | None = None) -> Trace:
    """Four workers; one exchange a worker between two records."""
    records = [
        Record(
            time_s=0.1 * number,
            loss=math.nan,
            batch_loss=math.nan,
            metric=math.nan,
            consensus_distance=distance,
            exchanges=2 * number,
            gradient_steps=4 * number,
            idle_share=0.0,
            drift=0.0,
        )
        for number, distance in enumerate(distances)
    ]
    return Trace("gossip", 4, 0.1, records, worker_steps=steps or [0] * 4)


def test_estimate() -> None:
    assert Estimate.of([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)), (1.0, 3.0))
    assert Estimate.of([1.0]) == (1.0, 0.0, (1.0,))
    assert math.isnan(Estimate.of([1.0, math.nan]).mean)


def test_series_go_as_far_as_all_traces() -> None:
    ensemble = Ensemble("two", [trace([4.0, 2.0, 1.0]), trace([8.0, 6.0])])
    assert ensemble.mean("consensus_distance").tolist() == [6.0, 4.0]
    assert ensemble.spread("consensus_distance") == pytest.approx([math.sqrt(8)] * 2)
    assert ensemble.last("consensus_distance").by_seed == (1.0, 6.0)
    assert ensemble.exchanges_per_worker.by_seed == (2.0, 1.0)
    assert ensemble.achieved_comm_rate.mean == 1.0
    assert Ensemble("one", [trace([4.0, 2.0])]).spread("consensus_distance").tolist() == [0, 0]
    with pytest.raises(ValueError, match="at least one trace"):
        Ensemble("none", [])


def test_steps_of_the_slowest_and_the_fastest() -> None:
    simulated = Ensemble("a", [trace([1.0, 1.0], steps=[1, 5, 3, 3]), trace([1.0], steps=[3] * 4)])
    assert simulated.gradient_steps == (2.0, 4.0)
    counted = Ensemble("b", [trace([1.0] * 8)])
    assert counted.gradient_steps == (7.0, 7.0)


def test_the_tail_is_what_lasts() -> None:
    # A fast mode that is most of the start, and a slow one that lasts.
    two_modes = [math.exp(-2.0 * k) + 1e-2 * math.exp(-0.5 * k) for k in range(200)]
    assert tail_decay(trace(two_modes)) == pytest.approx(0.5, rel=1e-3)
    # Rounding at the end plays no part.
    rounded = [max(distance, 1e-30) for distance in two_modes]
    assert tail_decay(trace(rounded)) == tail_decay(trace(two_modes))


def test_a_run_that_is_too_short_for_the_tail() -> None:
    decay = [math.exp(-0.5 * k) for k in range(20)]
    short = trace([math.exp(-2.0 * k) + distance for k, distance in enumerate(decay)])
    assert lowest_share(short) > TAIL_LOWEST
    assert tail_decay(short) == pytest.approx(0.5, rel=0.01)
    assert math.isnan(tail_decay(trace(decay[:8])))  # not below a hundredth
    assert math.isnan(tail_decay(trace([1.0, 1e-32, 1e-32])))  # within one record
    assert math.isnan(tail_decay(trace([0.0, 0.0])))  # nothing to agree about
    assert lowest_share(trace([0.0, 0.0])) == 1.0


@pytest.mark.parametrize("graph", ["ring", "complete", "star"])
@pytest.mark.parametrize("method", ["a2cid2", "gossip", "dpsgd", "dpsgd-chebyshev", "allreduce"])
def test_runs_are_long_enough_to_agree(graph: str, method: str) -> None:
    scenario = Scenario(
        graph=graph, num_workers=8, objective=Consensus(16), stop_below=TAIL_LOWEST, seed=1
    )
    length = steps_to_agree(scenario, method, values_per_worker=16)
    assert not length.is_cut
    run = simulate(Scenario(**{**vars(scenario), "num_steps": length.num_steps}), method)
    assert lowest_share(run) < TAIL_LOWEST
    if length.num_steps > LEAST_STEPS:  # and not many times too long
        assert run.records[-1].time_s > 0.2 * length.num_steps * run.unit_s


def test_a_length_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(graph="ring", num_workers=4096)
    gossip = steps_to_agree(scenario, "gossip", values_per_worker=64)
    assert gossip.is_cut
    longer_rows = steps_to_agree(scenario, "gossip", values_per_worker=640)
    assert longer_rows.num_steps == pytest.approx(gossip.num_steps / 10, rel=0.01)
    assert longer_rows.needed == gossip.needed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    by_torch = steps_to_agree(scenario, "gossip", values_per_worker=64)
    assert by_torch.num_steps < gossip.num_steps / 10
    assert not steps_to_agree(scenario, "none", values_per_worker=64).is_cut
