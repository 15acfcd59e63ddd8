import numpy as np
import pytest

from gossipdp.graph import GRAPH_NAMES, build_graph
from gossipdp.graph.constants import dense_spectrum, laplacian_matrix, sparse_spectrum, spectrum


def edges_and_rates(name, num_workers):
    edges = np.array(build_graph(name, num_workers).edges)
    return edges, np.random.default_rng(0).uniform(0.2, 1.0, len(edges))


@pytest.mark.parametrize("name", GRAPH_NAMES)
@pytest.mark.parametrize("solve", [dense_spectrum, sparse_spectrum])
def test_both_solvers_agree_with_the_pseudo_inverse(name, solve):
    edges, rates = edges_and_rates(name, 16)
    laplacian = laplacian_matrix(16, edges, rates)
    pseudo_inverse = np.linalg.pinv(laplacian)
    difference = np.eye(16)[edges[:, 0]] - np.eye(16)[edges[:, 1]]
    expected = np.einsum("ei,ij,ej->e", difference, pseudo_inverse, difference)
    lambda_2, resistances = solve(16, edges, rates)
    assert lambda_2 == pytest.approx(np.linalg.eigvalsh(laplacian)[1], rel=1e-9)
    np.testing.assert_allclose(resistances, expected, rtol=1e-9)


def test_the_sparse_solver_works_in_blocks():
    # More workers than one block of columns holds, against the dense solver.
    edges, rates = edges_and_rates("random-regular", 600)
    expected = dense_spectrum(600, edges, rates)
    lambda_2, resistances = spectrum(600, edges, rates)
    assert lambda_2 == pytest.approx(expected.lambda_2, rel=1e-9)
    np.testing.assert_allclose(resistances, expected.resistances, rtol=1e-9)


def test_the_sparse_solver_gives_the_same_bits_twice():
    edges, rates = edges_and_rates("torus", 300)
    first, second = (spectrum(300, edges, rates) for _ in range(2))
    assert first.lambda_2 == second.lambda_2
    assert np.array_equal(first.resistances, second.resistances)


def test_the_laplacian_of_a_path():
    laplacian = laplacian_matrix(3, np.array([(0, 1), (1, 2)]), np.array([0.5, 0.25]))
    assert laplacian.tolist() == [[0.5, -0.5, 0.0], [-0.5, 0.75, -0.25], [0.0, -0.25, 0.25]]


def test_laplacian_rows_sum_to_zero():
    edges, rates = edges_and_rates("erdos-renyi", 12)
    laplacian = laplacian_matrix(12, edges, rates)
    np.testing.assert_allclose(laplacian.sum(axis=1), 0.0, atol=1e-12)
    assert np.array_equal(laplacian, laplacian.T)
