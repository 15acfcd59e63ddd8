"""Mixing matrices, and how many rounds of them agreement takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipdp.graph.topology import build_graph
from gossipdp_lab.simulate.synchronous import mixing_matrix, quick_to_multiply, second_eigenvalue

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


@pytest.mark.parametrize(("name", "n"), [("ring", 40), ("complete", 7)])
def test_sparse_and_dense_multiplication_agree(name: str, n: int) -> None:
    matrix = mixing_matrix(build_graph(name, n))
    rows = np.random.default_rng(0).standard_normal((n, 3))
    np.testing.assert_allclose(quick_to_multiply(matrix) @ rows, matrix @ rows, atol=1e-14)
