"""What a graph promises before anything is run.

plan                 its constants, and the speed of consensus that theory guarantees
stationary_distance  how far apart gradient noise keeps the workers, exactly
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gossipdp.graph.constants import Constants, FloatArray, laplacian_matrix
from gossipdp.graph.topology import graph_name

if TYPE_CHECKING:
    import networkx as nx

WORTHWHILE_SPEEDUP = 1.1
"""Below this the acceleration is lost in the noise of training."""

LATENCY_S = 0.0005
"""How long a message travels where nothing else is said: within one data center."""

LARGEST_STEP_SPREAD = 3.0
"""With more the mean comes from steps so rare that a run does not see them: nearly all of its steps
take next to no time, and there is no end of them."""

SOLVE_TOLERANCE = 1e-10

NO_MOMENTUM = 1e-12
"""An excess alpha_tilde - 1/2 below this is rounding: on a complete graph it is zero."""


@dataclass(frozen=True)
class Plan:
    """The constants of a graph at a comm rate, and the speed of consensus that theory guarantees.

    The bounds hold for the ideal network: exchanges are instantaneous, edges fire as Poisson
    clocks, and no gradients disturb. Then for any start the expected consensus distance falls as
    exp(-rate k), up to a constant factor of at most 2, with k the mean number of exchanges per
    worker and the rate at least

        gossip:  1 / (2 chi1)               per unit of time
        a2cid2:  1 / (2 sqrt(chi1 chi2))    per unit of time (this is eta)

    divided by the mean exchanges per worker per unit of time; so the bounds do not depend on the
    comm rate. Simulated rates are one to two times the bound: two for gossip on sparse graphs, 1.5
    to 1.8 for a2cid2, one for both on the complete graph.

    Why: an exchange takes 1/2 (x_i - x_j)^2 from the sum of squares, so under gossip
    d E|x|^2 = -1/2 x^T L x dt <= -|x|^2 / (2 chi1) dt. For A2CiD2 take the energy
    |x|^2 + x_tilde^T L^+ x_tilde / chi1, both centred; with the constants of `Constants` the mixed
    terms cancel and it falls at rate eta or faster.

    References:
        Boyd, Ghosh, Prabhakar, Shah, 2006 (gossip); Nabli, Belilovsky, Oyallon, 2023, arXiv
        2306.08289, section 3 (A2CiD2).
    """

    graph: str
    """What the graph is called, with its size."""

    num_workers: int
    num_edges: int

    comm_rate: float
    """Exchanges per worker per gradient step that each worker may take part in."""

    chi1: float
    chi2: float
    eta: float
    alpha_tilde: float

    exchanges_per_unit_time: float
    """Over the whole network, per gradient step of one worker."""

    gossip_decay_bound: float
    """Least decay rate of the consensus distance per exchange per worker, method gossip; 0 where
    one worker has nobody to agree with."""

    a2cid2_decay_bound: float
    """Least decay rate of the consensus distance per exchange per worker, method a2cid2."""

    @property
    def expected_speedup(self) -> float:
        """sqrt(chi1 / chi2): by how much the bound of A2CiD2 exceeds that of plain gossip."""
        return 2.0 * self.alpha_tilde

    @property
    def a2cid2_helps(self) -> bool:
        """Whether the expected speed-up is large enough to be seen."""
        return self.expected_speedup >= WORTHWHILE_SPEEDUP


def plan(graph: nx.Graph[int], comm_rate: float = 1.0) -> Plan:
    """Plan a run on ``graph`` with the default rates at ``comm_rate``.

    Raises:
        ValueError: As `Constants.of`.

    Example:
        >>> from gossipdp.graph import build_graph
        >>> ring = plan(build_graph("ring", 64))
        >>> round(ring.expected_speedup, 1), ring.a2cid2_helps
        (14.5, True)
        >>> plan(build_graph("complete", 64)).a2cid2_helps
        False
    """
    constants = Constants.of(graph, comm_rate)
    num_workers = len(constants.workers)
    total_rate = constants.exchanges_per_unit_time
    if constants.edges:
        units_per_exchange = num_workers / (2.0 * total_rate)
        gossip_decay_bound = units_per_exchange / (2.0 * constants.chi1)
        a2cid2_decay_bound = units_per_exchange * constants.eta
    else:
        gossip_decay_bound = a2cid2_decay_bound = 0.0
    return Plan(
        graph=graph_name(graph),
        num_workers=num_workers,
        num_edges=len(constants.edges),
        comm_rate=comm_rate,
        chi1=constants.chi1,
        chi2=constants.chi2,
        eta=constants.eta,
        alpha_tilde=constants.alpha_tilde,
        exchanges_per_unit_time=total_rate,
        gossip_decay_bound=gossip_decay_bound,
        a2cid2_decay_bound=a2cid2_decay_bound,
    )


def check_step_spread(name: str, spread: float) -> None:
    """Raise a ValueError unless ``spread`` can be the spread of the logarithm of step times."""
    if not 0.0 <= spread <= LARGEST_STEP_SPREAD:
        raise ValueError(
            f"{name} is {spread:g}, but must be from 0 to {LARGEST_STEP_SPREAD:g}: it is the "
            "standard deviation of the logarithm of step times, 0.1 is typical"
        )


@dataclass(frozen=True)
class GradientNoise:
    """What gradient steps add to one coordinate, at learning rate 1, one step per unit of time.

    Each worker's gradient is ``g = b_i + noise``: b_i is constant in time and of variance
    ``drift`` over workers, the noise is new in every step and of variance ``white``. Neither
    depends on x: this is the noise floor of training, without curvature. Steps happen at random
    moments, rate 1 per worker, as in the paper.

    With ``momentum`` beta the buffer is m <- beta m + g and the step x -= (1 - beta) m, which in
    the long run moves x as far as plain SGD does.
    """

    white: float = 0.0
    drift: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("white", "drift"):
            variance = getattr(self, name)
            if not (math.isfinite(variance) and variance >= 0):
                raise ValueError(f"the variance {name}={variance} must be 0 or a positive number")
        if self.white == self.drift == 0:
            raise ValueError("noise without any variance: set white or drift, such as white=1.0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum {self.momentum} must be at least 0 and below 1")


NOISE_MODELS = {
    "white": GradientNoise(white=1.0),
    "momentum": GradientNoise(white=1.0, momentum=0.9),
    "drift": GradientNoise(drift=1.0),
}
"""White gradient noise; the same under SGD with momentum 0.9; heterogeneous data alone."""


def stationary_distance(
    constants: Constants, noise: GradientNoise, method: Literal["a2cid2", "gossip"] = "a2cid2"
) -> float:
    """(1/n) E sum_i (x_i - mean)^2 of one coordinate, where exchanges and noise are in balance.

    Exact for the ideal network: exchanges are instantaneous and edges fire as Poisson clocks. One
    coordinate is a state z = (x, c) of 2n numbers, and P is its covariance. With d_e = e_i - e_j
    and kappa = alpha_tilde - 1/2:

        flow          dx = eta c dt,   dc = -2 eta c dt
        exchange      z <- z - u_e v_e^T z,   u_e = (1/2 d_e, kappa d_e),   v_e = (d_e, 0)
        gradient      x <- x - g, zero on average over workers (its mean moves all alike)

    An exchange is a map of rank one, so with p_e = v_e^T P v_e = E (x_i - x_j)^2

        dP/dt = M P + P M^T + sum_e lambda_e p_e u_e u_e^T + source
        M     = [[-1/2 L, eta I], [-kappa L, -2 eta I]]

    In the eigenbasis of L the matrix M falls into blocks M_k of 2 x 2, one per eigenvalue mu_k,
    and u_e u_e^T into (V^T d_e)_k (V^T d_e)_l w w^T with w = (1/2, kappa). So P is known from the
    m numbers p_e, which obey a linear equation of their own:

        p = p_0 + K diag(lambda) p,    K_ef = sum_kl g_kl D_ke D_le D_kf D_lf,    D = V^T [d_e]
        M_k Y + Y M_l^T = -w w^T,      g_kl = Y_xx

    with p_0 what the source alone gives. K is symmetric; one product with it costs four products
    of n x n matrices, and conjugate gradients need a few tens.

    The source. A worker's increments form a sequence of autocovariance s beta^j after j steps
    (white: s = 1, beta = 0; momentum: s = (1 - beta)/(1 + beta); drift: s = 1, beta = 1), so that
    in each mode

        source = s e e^T + C e^T + e C^T,   e = (1, 0),   C = s beta ((1 - beta) I - M)^-1 e

    Args:
        constants: The graph with its rates; without an edge the distance is 0.
        noise: What gradient steps add.
        method: ``a2cid2`` with the paper's constants, or plain ``gossip``.

    References:
        Nabli, Belilovsky, Oyallon, 2023, arXiv 2306.08289, section 3, for the dynamics; the
        covariance is ours.

    Example:
        >>> from gossipdp.graph import Constants, build_graph
        >>> ring = Constants.of(build_graph("ring", 64))
        >>> noise = GradientNoise(white=1.0, momentum=0.9)
        >>> [round(stationary_distance(ring, noise, m), 2) for m in ("gossip", "a2cid2")]
        [9.63, 2.18]
    """
    if not constants.edges:
        return 0.0
    from scipy.sparse.linalg import LinearOperator, cg

    num_workers = len(constants.workers)
    excess = constants.alpha_tilde - 0.5
    has_momentum = method == "a2cid2" and excess > NO_MOMENTUM
    values, vectors = np.linalg.eigh(constants.laplacian)
    eigenvalues, vectors = values[1:], vectors[:, 1:]  # the first one is constant
    # M_k of every mode. Without momentum c starts at 0 and never matters: z is x alone.
    blocks = np.empty((num_workers - 1, 2, 2))
    blocks[:, 0, 0] = -0.5 * eigenvalues
    blocks[:, 0, 1] = constants.eta
    blocks[:, 1, 0] = -excess * eigenvalues
    blocks[:, 1, 1] = -2.0 * constants.eta
    size = 2 if has_momentum else 1
    blocks = blocks[:, :size, :size]

    kick = np.array([0.5, excess])[:size]
    gains = _lyapunov(blocks[:, None], blocks[None, :], np.outer(kick, kick))
    from_source = _lyapunov(blocks, blocks, _source(blocks, noise))
    positions = np.searchsorted(constants.workers, np.array(constants.edges))
    left, right = positions.T
    roots = np.sqrt(constants.rates)

    def across_edges(matrix: FloatArray) -> FloatArray:
        """d_e^T V matrix V^T d_e of every edge."""
        full = vectors @ matrix @ vectors.T
        diagonal = np.diagonal(full)
        differences: FloatArray = diagonal[left] + diagonal[right] - 2.0 * full[left, right]
        return differences

    def from_edges(weights: FloatArray) -> FloatArray:
        """V^T (sum_e weights_e d_e d_e^T) V, the adjoint of `across_edges`."""
        product: FloatArray = (
            vectors.T @ laplacian_matrix(num_workers, positions, weights) @ vectors
        )
        return product

    def one_minus_feedback(vector: FloatArray) -> FloatArray:
        """(I - sqrt(lambda) K sqrt(lambda)) vector."""
        flat: FloatArray = np.ravel(vector)
        return flat - roots * across_edges(gains * from_edges(roots * flat))

    operator = LinearOperator((len(roots),) * 2, matvec=one_minus_feedback, dtype=np.float64)
    weights, failed = cg(
        operator, roots * across_edges(np.diag(from_source)), rtol=SOLVE_TOLERANCE, atol=0.0
    )
    if failed:
        raise ValueError(
            f"the consensus distance of {num_workers} workers did not converge: bring the rates "
            "of the edges closer together"
        )
    fed_back = np.diagonal(gains) * np.diagonal(from_edges(roots * weights))
    return float((from_source + fed_back).sum()) / num_workers


def _source(blocks: FloatArray, noise: GradientNoise) -> FloatArray:
    """What the noise adds to each mode's covariance per unit of time. Shape (n - 1, d, d)."""
    source = np.zeros_like(blocks)
    beta = noise.momentum
    for variance, persistence in (
        (noise.white * (1.0 - beta) / (1.0 + beta), beta),
        (noise.drift, 1.0),
    ):
        if variance:
            identity = np.eye(blocks.shape[-1])
            response = variance * persistence * np.linalg.inv((1 - persistence) * identity - blocks)
            source[:, :, 0] += response[:, :, 0]
            source[:, 0, :] += response[:, :, 0]
            source[:, 0, 0] += variance
    return source


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
