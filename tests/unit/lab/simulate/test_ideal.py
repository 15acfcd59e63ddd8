"""The ``ideal`` fidelity has the decay rates of the paper's model."""

from __future__ import annotations

import pytest

from gossipdp_lab.simulate.ideal import run_ideal
from gossipdp_lab.simulate.objectives import Consensus
from gossipdp_lab.simulate.scenario import ConstantTime, Scenario, SlowedTime
from gossipdp_lab.simulate.trace import Trace


def run(method: str, **settings: object) -> Trace:
    return run_ideal(Scenario(**settings), method, lambda share: None)  # type: ignore[arg-type]


# The decay rates of the design, simulated once more; spread about 5%.
@pytest.mark.parametrize(
    ("graph", "num_workers", "num_steps", "gossip", "a2cid2"),
    [
        ("ring", 16, 700, 0.078, 0.234),
        ("ring", 64, 4000, 0.0048, 0.059),
        ("torus", 64, 300, 0.148, 0.282),
        ("complete", 64, 90, 0.515, 0.515),
    ],
)
def test_decay_rates(
    graph: str, num_workers: int, num_steps: float, gossip: float, a2cid2: float
) -> None:
    for method, expected in (("gossip", gossip), ("a2cid2", a2cid2)):
        trace = run(
            method,
            graph=graph,
            num_workers=num_workers,
            num_steps=num_steps,
            num_records=200,
            stop_below=1e-22,
        )
        assert trace.decay_per_exchange() == pytest.approx(expected, rel=0.1)
        assert trace.records[-1].drift < 1e-13
        assert trace.achieved_comm_rate == pytest.approx(1.0, abs=0.08)


def test_the_decay_per_exchange_does_not_depend_on_the_comm_rate() -> None:
    rates = [
        run("a2cid2", comm_rate=comm_rate, num_steps=300 / comm_rate).decay_per_exchange()
        for comm_rate in (0.25, 1.0, 4.0)
    ]
    assert max(rates) < 1.1 * min(rates)


def test_the_released_exchange_moves_the_mean() -> None:
    ours, theirs = (run(method, num_workers=64, num_steps=500) for method in ("a2cid2", "released"))
    assert theirs.records[-1].drift > 1e10 * ours.records[-1].drift
    assert theirs.records[-1].consensus_distance > 1e3 * ours.records[-1].consensus_distance


def test_workers_apart_stay_apart() -> None:
    trace = run("none", num_steps=50)
    assert trace.records[-1].consensus_distance == trace.records[0].consensus_distance
    assert trace.records[-1].exchanges == 0


def test_the_same_seed_gives_the_same_trace() -> None:
    settings = {
        "num_steps": 20,
        "keep_timeline": True,
        "compute_time": SlowedTime(ConstantTime(), {1: 4.0}),
        "objective": Consensus(8),
    }
    first, again, other = (run("a2cid2", seed=seed, **settings) for seed in (5, 5, 6))
    assert first.digest() == again.digest() != other.digest()
    assert first.worker_steps[1] in (4, 5, 6)
    assert first.worker_steps[2] in (19, 20, 21)
    assert {interval.activity for interval in first.intervals} == {"computing"}


def test_a_run_ends_where_it_is_told_to() -> None:
    trace = run("a2cid2", num_steps=10_000, num_records=1000, stop_below=1e-6)
    shares = trace.column("consensus_distance") / trace.records[0].consensus_distance
    assert shares[-1] < 1e-6 <= shares[-2]
    shares = []
    run_ideal(Scenario(num_steps=5, num_records=5), "gossip", shares.append)
    assert shares == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_multipliers_scale_the_constants() -> None:
    plain = run("gossip", num_steps=30)
    switched_off = run("a2cid2", num_steps=30, alpha_tilde_factor=0.0)
    assert switched_off.records[-1].consensus_distance == pytest.approx(
        plain.records[-1].consensus_distance
    )
    tuned = run("a2cid2", num_steps=30, eta_factor=0.5)
    assert tuned.records[-1].consensus_distance != pytest.approx(
        run("a2cid2", num_steps=30).records[-1].consensus_distance
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"comm_rate": 0.0}, "comm_rate is 0.0"),
        ({"num_steps": float("inf")}, "num_steps is inf"),
        ({"stop_below": 1.0}, "stop_below is 1.0"),
        ({"num_records": 0}, "num_records is 0"),
        ({"model_bytes": -1}, "model_bytes is -1"),
        ({"fidelity": "real"}, "no fidelity 'real'"),
        ({"alpha_tilde_factor": -0.1}, "alpha_tilde_factor is -0.1"),
    ],
)
def test_scenarios_check_themselves(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario(**settings)  # type: ignore[arg-type]
