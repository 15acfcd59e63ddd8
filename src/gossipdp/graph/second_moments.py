"""Exact second moments of gossip and A2CiD2 on the ideal network: no simulation, no sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from scipy.linalg import expm
from scipy.optimize import brentq
from scipy.sparse.linalg import LinearOperator, eigsh

from gossipdp.graph.constants import Constants
from gossipdp.graph.gradient_noise import GradientNoise
from gossipdp.graph.spectrum import FloatArray, IndexArray

SOLVE_TOLERANCE = 1e-10
MAX_SOLVE_STEPS = 10_000
EIGENVALUE_TOLERANCE = 1e-9
DECAY_TOLERANCE = 1e-8

MAX_DENSE_EDGES = 16
"""Up to here the edge operator is written out: Lanczos wants more dimensions than it finds."""

NO_MOMENTUM = 1e-12
"""An excess alpha_tilde - 1/2 below this is rounding: on a complete graph it is zero."""


@dataclass(frozen=True, eq=False)
class Modes:
    """The eigenvectors of a graph's Laplacian but the constant one, and its edges."""

    eigenvalues: FloatArray
    """mu_k, ascending. Shape (n - 1,)."""

    vectors: FloatArray
    """V. Shape (n, n - 1)."""

    edges: IndexArray
    """Positions of each edge's ends. Shape (m, 2)."""

    rates: FloatArray
    """lambda_e. Shape (m,)."""

    @classmethod
    def of(cls, constants: Constants) -> Self:
        """The modes of a graph with its rates; one dense eigendecomposition."""
        values, vectors = np.linalg.eigh(constants.laplacian)
        edges = np.searchsorted(constants.workers, np.array(constants.edges).reshape(-1, 2))
        return cls(values[1:], vectors[:, 1:], edges, np.array(constants.rates))

    @property
    def num_workers(self) -> int:
        """How many workers, n."""
        return len(self.vectors)

    @property
    def exchanges_per_worker(self) -> float:
        """Mean exchanges of a worker per unit of time."""
        return 2.0 * float(self.rates.sum()) / self.num_workers

    def across_edges(self, matrix: FloatArray) -> FloatArray:
        """d_e^T V matrix V^T d_e of every edge, with d_e = e_i - e_j. Shape (m,)."""
        full = self.vectors @ matrix @ self.vectors.T
        left, right = self.edges.T
        diagonal = np.diagonal(full)
        differences: FloatArray = diagonal[left] + diagonal[right] - 2.0 * full[left, right]
        return differences

    def from_edges(self, weights: FloatArray) -> FloatArray:
        """V^T (sum_e weights_e d_e d_e^T) V, the adjoint of `across_edges`. Shape (n-1, n-1)."""
        left, right = self.edges.T
        laplacian = np.zeros((self.num_workers, self.num_workers))
        laplacian[left, right] = laplacian[right, left] = -weights
        np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
        product: FloatArray = self.vectors.T @ laplacian @ self.vectors
        return product


@dataclass(frozen=True, eq=False)
class SecondMoments:
    """The covariance of x and c under Poisson edges, instantaneous exchanges, any eta, alpha_tilde.

    One coordinate is a state z = (x, c) of 2n numbers; all else follows from its covariance P.
    With d_e = e_i - e_j and kappa = alpha_tilde - 1/2:

        flow          dx = eta c dt,   dc = -2 eta c dt
        exchange      z <- z - u_e v_e^T z,   u_e = (1/2 d_e, kappa d_e),   v_e = (d_e, 0)
        gradient      x <- x - g, zero on average over workers (its mean moves all alike)

    An exchange is a map of rank one, so with p_e = v_e^T P v_e = E (x_i - x_j)^2

        dP/dt = M P + P M^T + sum_e lambda_e p_e u_e u_e^T + source
        M     = [[-1/2 L, eta I], [-kappa L, -2 eta I]]

    In the eigenbasis of L the matrix M falls into blocks M_k of 2 x 2, one per eigenvalue mu_k,
    and u_e u_e^T into (V^T d_e)_k (V^T d_e)_l w w^T with w = (1/2, kappa). So P is known from the
    m numbers p_e, and these obey a linear equation of their own:

        p = p_0 + K diag(lambda) p,    K_ef = sum_kl g_kl D_ke D_le D_kf D_lf,    D = V^T [d_e]
        M_k Y + Y M_l^T = -w w^T,      g_kl = Y_xx

    with p_0 what the source alone gives. K is symmetric and has no negative entry; one product
    with it costs four products of n x n matrices. Lanczos and conjugate gradients need a few tens.

    M_k is always stable (its trace is negative, its determinant positive), and the maps keep
    covariances positive: by Perron and Frobenius a stationary state exists exactly where the
    largest eigenvalue of K diag(lambda), the ``feedback``, is below 1. Covariances decay as
    exp(-rho t) where the same matrix, with M_k + rho/2 for M_k, has largest eigenvalue 1.

    The source. A worker's increments form a sequence of autocovariance s beta^j after j steps
    (white: s = 1, beta = 0; momentum: s = (1 - beta)/(1 + beta); drift: s = 1, beta = 1). The
    noise does not depend on z, and between steps E z follows M, so in each mode

        source = s e e^T + C e^T + e C^T,   e = (1, 0)
        C = s beta ((1 - beta) I - M)^-1 e                  steps of a Poisson process
        C = s beta exp(M) (I - beta exp(M))^-1 e            regular steps

    Without momentum (eta = 0 or kappa = 0, c starts at 0 and never matters) z is x alone.

    References:
        Nabli, Belilovsky, Oyallon, 2023, arXiv 2306.08289, section 3, for the dynamics; the
        moments are ours. The paper bounds the decay; here it is exact.

    Example:
        >>> from gossipdp.graph import Constants, build_graph
        >>> from gossipdp.graph.gradient_noise import NOISE_MODELS
        >>> constants = Constants.of(build_graph("ring", 64))
        >>> for moments in (SecondMoments.gossip(constants), SecondMoments.of(constants)):
        ...     distance = moments.stationary_distance(NOISE_MODELS["momentum"])
        ...     print(round(distance, 2), round(moments.decay_per_exchange, 4))
        9.63 0.0048
        2.18 0.0567
    """

    modes: Modes
    eta: float
    alpha_tilde: float

    @classmethod
    def of(cls, constants: Constants) -> Self:
        """A2CiD2 with the paper's constants."""
        return cls(Modes.of(constants), constants.eta, constants.alpha_tilde)

    @classmethod
    def gossip(cls, constants: Constants) -> Self:
        """Plain pairwise averaging."""
        return cls(Modes.of(constants), 0.0, 0.5)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eta) and self.eta >= 0):
            raise ValueError(f"eta {self.eta} must be 0 (plain gossip) or a positive number")
        if not (math.isfinite(self.alpha_tilde) and self.alpha_tilde >= 0.5 - NO_MOMENTUM):
            raise ValueError(f"alpha_tilde {self.alpha_tilde} must be at least 1/2 (plain gossip)")

    @cached_property
    def feedback(self) -> float:
        """Largest eigenvalue of K diag(lambda): 1 and above has no stationary state.

        The variance that exchanges make on their way is fed back; in sum over all rounds the
        disagreement across edges is at most 1 / (1 - feedback) times what the source gives.
        """
        return self._feedback_at(0.0)

    @property
    def is_stable(self) -> bool:
        """Whether the consensus distance stays bounded."""
        return self.feedback < 1.0 - EIGENVALUE_TOLERANCE

    def stationary_distance(self, noise: GradientNoise) -> float:
        """(1/n) E sum_i (x_i - mean)^2 of one coordinate; infinite where nothing is stationary."""
        if not self.modes.edges.size:
            return 0.0
        if not self.is_stable:
            return math.inf
        from_source = self._lyapunov(self._blocks, self._blocks, self._source(noise))
        roots = np.sqrt(self.modes.rates)
        right_hand = roots * self.modes.across_edges(np.diag(from_source))
        weights = self._solve_edges(right_hand)
        from_edges = np.diagonal(self.modes.from_edges(roots * weights))
        gains = np.diagonal(self._gains(0.0))
        return float((from_source + gains * from_edges).sum()) / self.modes.num_workers

    @cached_property
    def decay_rate(self) -> float:
        """rho, where E consensus distance goes as exp(-rho t) without noise; negative if it grows.

        The spectral abscissa of the second-moment operator, its sign changed; 0 for one worker.
        """
        if not self.modes.edges.size:
            return 0.0
        fastest = -2.0 * float(np.linalg.eigvals(self._blocks).real.max())

        def excess(rate: float) -> float:
            return 1.0 - 1.0 / self._feedback_at(rate)

        upper = fastest * (1.0 - EIGENVALUE_TOLERANCE)
        if excess(upper) <= 0:  # no exchange excites the slowest mode
            return fastest
        lower = 0.0
        while excess(lower) >= 0:
            lower = 2.0 * lower - fastest
        return float(brentq(excess, lower, upper, xtol=DECAY_TOLERANCE * fastest))

    @property
    def decay_per_exchange(self) -> float:
        """`decay_rate` per mean exchange of a worker."""
        return self.decay_rate / self.modes.exchanges_per_worker if self.decay_rate else 0.0

    def _solve_edges(self, right_hand: FloatArray) -> FloatArray:
        """(I - sqrt(lambda) K sqrt(lambda))^-1 right_hand, by conjugate gradients."""
        operator = self._edge_operator(0.0)
        solution = np.zeros_like(right_hand)
        residual = right_hand.copy()
        direction = residual.copy()
        squared = float(residual @ residual)
        target = squared * SOLVE_TOLERANCE**2
        for _ in range(MAX_SOLVE_STEPS):
            if squared <= target:
                return solution
            image = direction - operator @ direction
            length = squared / float(direction @ image)
            solution += length * direction
            residual -= length * image
            previous, squared = squared, float(residual @ residual)
            direction = residual + (squared / previous) * direction
        raise ValueError(
            f"the moments of {self.modes.num_workers} workers did not converge at eta "
            f"{self.eta:.6g}, alpha_tilde {self.alpha_tilde:.6g}, so near to instability "
            f"(feedback {self.feedback:.9f}): take them smaller"
        )

    @cached_property
    def is_plain(self) -> bool:
        """Whether c never matters: plain gossip."""
        return self.eta == 0.0 or self.alpha_tilde - 0.5 <= NO_MOMENTUM

    @cached_property
    def _blocks(self) -> FloatArray:
        """M_k of every mode. Shape (n - 1, d, d), d = 1 without momentum, else 2."""
        eigenvalues = self.modes.eigenvalues
        blocks = np.empty((len(eigenvalues), 2, 2))
        blocks[:, 0, 0] = -0.5 * eigenvalues
        blocks[:, 0, 1] = self.eta
        blocks[:, 1, 0] = -(self.alpha_tilde - 0.5) * eigenvalues
        blocks[:, 1, 1] = -2.0 * self.eta
        return blocks[:, :1, :1] if self.is_plain else blocks

    def _source(self, noise: GradientNoise) -> FloatArray:
        beta = noise.momentum
        source = noise.white * self._source_of(
            (1.0 - beta) / (1.0 + beta), beta, noise.steps == "regular"
        )
        if noise.drift:
            source += noise.drift * self._source_of(1.0, 1.0, noise.steps == "regular")
        return source

    def _source_of(self, variance: float, persistence: float, is_regular: bool) -> FloatArray:
        """The source s e e^T + C e^T + e C^T of every mode. Shape (n - 1, d, d)."""
        identity = np.eye(self._blocks.shape[-1])
        if is_regular:
            step = expm(self._blocks)
            response = step @ np.linalg.inv(identity - persistence * step)
        else:
            response = np.linalg.inv((1.0 - persistence) * identity - self._blocks)
        source = np.zeros_like(self._blocks)
        source[:, :, 0] += variance * persistence * response[:, :, 0]
        source[:, 0, :] += variance * persistence * response[:, :, 0]
        source[:, 0, 0] += variance
        return source

    def _gains(self, rate: float) -> FloatArray:
        """g_kl at M_k + rate/2. Shape (n - 1, n - 1)."""
        size = self._blocks.shape[-1]
        blocks = self._blocks + 0.5 * rate * np.eye(size)
        kick = np.array([0.5, self.alpha_tilde - 0.5])[:size]
        return self._lyapunov(blocks[:, None], blocks[None, :], np.outer(kick, kick))

    @staticmethod
    def _lyapunov(left: FloatArray, right: FloatArray, source: FloatArray) -> FloatArray:
        """Y_xx of left Y + Y right^T = -source, over leading axes that broadcast."""
        size = left.shape[-1]
        identity = np.eye(size)
        operator = np.einsum("...ij,kl->...ikjl", left, identity)
        operator = operator + np.einsum("ij,...kl->...ikjl", identity, right)
        shape = operator.shape[:-4]
        right_hand = np.broadcast_to(-source.reshape(*source.shape[:-2], -1), (*shape, size**2))
        solved = np.linalg.solve(operator.reshape(*shape, size**2, size**2), right_hand[..., None])
        first: FloatArray = solved[..., 0, 0]
        return first

    def _edge_operator(self, rate: float) -> Any:
        """sqrt(lambda) K sqrt(lambda), which has the eigenvalues of K diag(lambda)."""
        gains = self._gains(rate)
        roots = np.sqrt(self.modes.rates)

        def apply(vector: FloatArray) -> FloatArray:
            spread = gains * self.modes.from_edges(roots * np.ravel(vector))
            return roots * self.modes.across_edges(spread)

        return LinearOperator((len(roots), len(roots)), matvec=apply, dtype=np.float64)

    def _feedback_at(self, rate: float) -> float:
        size = len(self.modes.rates)
        if size == 0:
            return 0.0
        operator = self._edge_operator(rate)
        if size <= MAX_DENSE_EDGES:
            columns = operator.matmat(np.eye(size))
            return float(np.linalg.eigvalsh(0.5 * (columns + columns.T))[-1])
        # The Perron vector is positive, so that a start of ones is never orthogonal to it.
        largest = eigsh(
            operator,
            k=1,
            which="LA",
            v0=np.ones(size),
            tol=EIGENVALUE_TOLERANCE,
            return_eigenvectors=False,
        )
        return float(largest[0])
