import math

import pytest

from gossipdp.reproduce.mixing import MixingJob, measure_point
from gossipdp.reproduce.mixing_text import MixingPoint, MixingResult, write


def test_synchronous_rounds_on_a_complete_graph_shrink_by_a_quarter():
    point = measure_point(MixingJob("complete", "dpsgd", 8, 1))
    assert point.communications[0] == pytest.approx(28 / math.log(4), rel=1e-6)
    assert point.prediction == pytest.approx(28 / math.log(4))


def test_the_number_is_that_of_the_method_that_was_simulated():
    points = {
        method: measure_point(MixingJob("ring", method, 16, 2))
        for method in ("gossip", "a2cid2", "dpsgd", "dpsgd-chebyshev")
    }
    mean = {method: sum(point.communications) / 2 for method, point in points.items()}
    assert mean["a2cid2"] < 0.6 * mean["gossip"]
    assert mean["dpsgd-chebyshev"] < 0.2 * mean["dpsgd"]
    # The bound holds for the asynchronous methods, and is not what is returned.
    for method in ("gossip", "a2cid2"):
        assert 0.3 < mean[method] / points[method].prediction < 0.95
        first, second = points[method].communications
        assert first != second


def test_more_workers_need_more():
    small, large = (
        measure_point(MixingJob("star", "a2cid2", n, 2)).communications for n in (8, 16)
    )
    assert min(large) > max(small)


def result_with(exponent_error: float) -> MixingResult:
    from gossipdp.reproduce.mixing_text import PAPER_EXPONENTS

    points = [
        MixingPoint(graph, method, n, [n ** (paper + exponent_error)], 1.0)
        for method, by_graph in PAPER_EXPONENTS.items()
        for graph, paper in by_graph.items()
        for n in (8, 16, 32, 64)
    ]
    return MixingResult(points, dimension=16, tail=(1e-6, 1e-12))


@pytest.mark.parametrize(
    ("error", "expected"),
    [(0.0, "**reproduced**. 12 of 12"), (0.14, "12 of 12"), (0.2, "**not reproduced**. 0 of 12")],
)
def test_the_verdict_follows_from_the_exponents(error, expected):
    assert any(expected in block for block in write(result_with(error)))
