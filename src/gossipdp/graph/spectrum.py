"""The Laplacian of a graph with rates: its second eigenvalue and effective resistances."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]

MAX_DENSE_WORKERS = 256
"""Up to here dense numpy is as quick, and a worker need not import scipy."""

LANCZOS_TOLERANCE = 1e-12
RESISTANCE_BLOCK = 256


class Spectrum(NamedTuple):
    """What the constants need to know of a Laplacian."""

    lambda_2: float
    """The second smallest eigenvalue; its inverse is chi1."""

    resistances: FloatArray
    """Effective resistance of each edge: (e_i - e_j)^T L^+ (e_i - e_j). Shape (edges,)."""


def spectrum(num_workers: int, edges: IndexArray, rates: FloatArray) -> Spectrum:
    """Second eigenvalue and effective resistances of L = sum rates_ij (e_i-e_j)(e_i-e_j)^T."""
    if num_workers <= MAX_DENSE_WORKERS:
        return dense_spectrum(num_workers, edges, rates)
    return sparse_spectrum(num_workers, edges, rates)


def laplacian_matrix(num_workers: int, edges: IndexArray, rates: FloatArray) -> FloatArray:
    """The dense Laplacian. Shape (n, n); ``edges`` as in `spectrum`."""
    laplacian = np.zeros((num_workers, num_workers))
    left, right = edges[:, 0], edges[:, 1]
    laplacian[left, right] = laplacian[right, left] = -rates
    np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
    return laplacian


def dense_spectrum(num_workers: int, edges: IndexArray, rates: FloatArray) -> Spectrum:
    """One full eigendecomposition gives both, since L^+ = sum_k>1 v_k v_k^T / lambda_k."""
    values, vectors = np.linalg.eigh(laplacian_matrix(num_workers, edges, rates))
    # The first eigenvector is the constant one; its eigenvalue is zero but for rounding.
    pseudo_inverse = (vectors[:, 1:] / values[1:]) @ vectors[:, 1:].T
    left, right = edges[:, 0], edges[:, 1]
    diagonal = np.diagonal(pseudo_inverse)
    resistances = diagonal[left] + diagonal[right] - 2.0 * pseudo_inverse[left, right]
    return Spectrum(float(values[1]), resistances)


def sparse_spectrum(num_workers: int, edges: IndexArray, rates: FloatArray) -> Spectrum:
    """Both from one sparse factorisation of the Laplacian grounded at the first worker.

    With row and column 0 deleted L is positive definite. Solving with it and removing the mean
    applies L^+, whose largest eigenvalue 1/lambda_2 Lanczos finds in a few steps (a shift-invert
    about zero); the entries of its inverse at the edges are the effective resistances.
    """
    from scipy import sparse
    from scipy.sparse import linalg

    left, right = edges[:, 0], edges[:, 1]
    incidence = sparse.csr_array(
        (
            np.concatenate([np.ones(len(edges)), -np.ones(len(edges))]),
            (np.tile(np.arange(len(edges)), 2), np.concatenate([left, right])),
        ),
        shape=(len(edges), num_workers),
    )[:, 1:]
    grounded = sparse.csc_array(incidence.T @ (sparse.diags_array(rates) @ incidence))
    factor = linalg.splu(
        grounded,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )

    def apply_pseudo_inverse(vector: FloatArray) -> FloatArray:
        solution = np.zeros(num_workers)
        solution[1:] = factor.solve((vector - vector.mean())[1:])
        solution -= solution.mean()
        return solution

    operator: Any = linalg.LinearOperator(
        (num_workers, num_workers), matvec=apply_pseudo_inverse, dtype=np.float64
    )
    largest = linalg.eigsh(
        operator,
        k=1,
        which="LA",
        # A fixed start, so that the same graph gives the same bits.
        v0=np.random.default_rng(0).standard_normal(num_workers),
        tol=LANCZOS_TOLERANCE,
        return_eigenvectors=False,
    )
    return Spectrum(float(1.0 / largest[0]), _grounded_resistances(factor, num_workers, edges))


def _grounded_resistances(factor: Any, num_workers: int, edges: IndexArray) -> FloatArray:
    """R_ij = G_ii + G_jj - 2 G_ij with G the grounded inverse, a block of its columns at a time."""
    left, right = edges[:, 0], edges[:, 1]
    diagonal = np.zeros(num_workers)
    across = np.zeros(len(edges))
    for start in range(1, num_workers, RESISTANCE_BLOCK):
        stop = min(start + RESISTANCE_BLOCK, num_workers)
        unit_columns = np.zeros((num_workers - 1, stop - start))
        unit_columns[np.arange(start, stop) - 1, np.arange(stop - start)] = 1.0
        columns = np.zeros((num_workers, stop - start))
        columns[1:] = factor.solve(unit_columns)
        diagonal[start:stop] = columns[np.arange(start, stop), np.arange(stop - start)]
        here = (left >= start) & (left < stop)
        across[here] = columns[right[here], left[here] - start]
    resistances: FloatArray = diagonal[left] + diagonal[right] - 2.0 * across
    return resistances
