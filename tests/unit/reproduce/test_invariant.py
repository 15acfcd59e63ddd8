from gossipdp.reproduce.invariant import InvariantJob, measure_run
from gossipdp.reproduce.invariant_text import InvariantResult, InvariantRun, write


def test_only_the_released_exchange_drifts():
    runs = {
        method: measure_run(InvariantJob(method, 16, 120.0, seed=0))
        for method in ("a2cid2", "released", "gossip")
    }
    assert max(runs["a2cid2"].drifts) < 1e-13
    assert max(runs["gossip"].drifts) < 1e-13
    assert max(runs["released"].drifts) > 1e-2
    assert runs["a2cid2"].distances[-1] < 1e-3 * runs["gossip"].distances[-1]
    assert all(run.distances[0] == 1.0 for run in runs.values())


def run(method: str, distance: float, drift: float) -> InvariantRun:
    return InvariantRun(method, 0, [0.0, 5.0, 10.0], [1.0, 1e-3, distance], [0.0, drift, drift])


def test_the_verdict_follows_from_the_runs():
    others = [run("released", 1e-4, 1e-2), run("gossip", 1e-3, 1e-16)]
    good = InvariantResult([run("a2cid2", 1e-12, 1e-16), *others], 64, 10.0, [0], 64)
    bad = InvariantResult([run("a2cid2", 1e-12, 1e-9), *others], 64, 10.0, [0], 64)
    assert "**reproduced**" in write(good)[1]
    assert "**not reproduced**" in write(bad)[1]
    assert good.released_when_ours_at(1e-10) == [1e-4]
    assert good.released_when_ours_at(1e-15) == []
