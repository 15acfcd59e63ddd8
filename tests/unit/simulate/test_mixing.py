"""Mixing matrices, Chebyshev weights, and how many rounds agreement takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipdp.graph.topology import build_graph
from gossipdp.simulate.mixing import (
    ChebyshevWeights,
    Mixer,
    consensus_rounds,
    mixing_matrix,
    multiplications_per_step,
    second_eigenvalue,
)

CONNECTED = st.sampled_from(["ring", "path", "star", "complete", "exponential", "erdos-renyi"])


@given(CONNECTED, st.integers(1, 20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_mixing_matrices_are_symmetric_and_doubly_stochastic(name: str, n: int, lazy: bool) -> None:
    graph = build_graph(name, n)
    matrix = mixing_matrix(graph, lazy=lazy)
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
    lazy = mixing_matrix(build_graph("complete", 9), lazy=True)
    assert second_eigenvalue(lazy) == pytest.approx(0.5)


def test_weights_are_those_of_the_chebyshev_polynomials() -> None:
    gamma, value = 0.97, 0.4
    weights = ChebyshevWeights(gamma)
    before, now = 1.0, 1.0
    for degree in range(1, 12):
        omega = weights.take()
        before, now = now, (1 + omega) * value * now - omega * before
        unit = [0.0] * degree + [1.0]
        chebyshev = np.polynomial.chebyshev.Chebyshev(unit)
        assert now == pytest.approx(chebyshev(value / gamma) / chebyshev(1 / gamma), abs=1e-12)
    for _ in range(200):
        omega = weights.take()
    assert omega == pytest.approx(weights.limit, rel=1e-12)
    assert ChebyshevWeights(0.0).take() == 0.0
    with pytest.raises(ValueError, match="gamma is 1"):
        ChebyshevWeights(1.0)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 0.9968, 0.99999])
def test_so_many_multiplications_halve_the_disagreement(gamma: float) -> None:
    count = multiplications_per_step(gamma)
    if gamma:
        assert 1 / math.cosh(count * math.acosh(1 / gamma)) < 0.47
    assert count < 1 / math.sqrt(1 - gamma) + 1


@pytest.mark.parametrize(("name", "n"), [("ring", 40), ("complete", 7)])
def test_sparse_and_dense_multiplication_agree(name: str, n: int) -> None:
    matrix = mixing_matrix(build_graph(name, n))
    rows = np.random.default_rng(0).standard_normal((n, 3))
    np.testing.assert_allclose(Mixer(matrix).multiply(rows), matrix @ rows, atol=1e-14)


@pytest.mark.parametrize("chebyshev", [False, True])
def test_consensus_rounds_decay_as_the_second_eigenvalue_says(chebyshev: bool) -> None:
    matrix = mixing_matrix(build_graph("ring", 16), lazy=True)
    start = np.random.default_rng(0).standard_normal((16, 4))
    distances = consensus_rounds(matrix, start, chebyshev=chebyshev)
    centred = start - start.mean(axis=0)
    assert distances[0] == pytest.approx((centred**2).sum() / 16)
    assert distances[-1] < 1e-12 * distances[0] <= distances[-2]
    shares = distances / distances[0]
    tail = np.flatnonzero(shares < 1e-6)
    slope, _ = np.polyfit(tail, -np.log(shares[tail]), 1)
    gamma = second_eigenvalue(matrix)
    factor = ChebyshevWeights(gamma).limit if chebyshev else gamma**2
    # All eigenvalues below gamma oscillate under the Chebyshev envelope.
    assert slope == pytest.approx(-math.log(factor), rel=0.1 if chebyshev else 1e-3)


def test_consensus_rounds_end_where_they_must() -> None:
    complete = mixing_matrix(build_graph("complete", 6))
    start = np.arange(12.0).reshape(6, 2)
    assert len(consensus_rounds(complete, start)) == 2
    assert len(consensus_rounds(mixing_matrix(build_graph("path", 6)), start, max_rounds=5)) == 6
    assert consensus_rounds(complete, np.ones((6, 2))).tolist() == [0.0]
