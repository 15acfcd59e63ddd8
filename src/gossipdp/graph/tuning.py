"""Multipliers of the paper's eta and alpha_tilde that suit a stated gradient noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from gossipdp.graph.constants import Constants
from gossipdp.graph.gradient_noise import GradientNoise
from gossipdp.graph.second_moments import Modes, SecondMoments

LARGEST_FACTOR = 4.0
"""Factors are searched from one over this to this. Pure drift alone has no best factors: the
smaller eta and the larger alpha_tilde, the smaller the distance, and the slower it settles."""

MAX_FEEDBACK = 0.95
"""The stability margin: of 1, where nothing is stationary. Where the paper's constants are nearer
to 1 (a path of 256), as near as they."""

GRID_OCTAVES = 1.0
TOLERANCE_OCTAVES = 2.0**-6


@dataclass(frozen=True)
class Tuning:
    """Factors found by `tune`, and the stationary consensus distance with and without them.

    Distances are per coordinate at learning rate 1 and gradient variance as ``noise`` says; for
    another learning rate gamma they are gamma^2 times as large, ratios stay.
    """

    noise: GradientNoise

    eta_factor: float
    """Multiplies eta."""

    alpha_tilde_factor: float
    """Multiplies the excess alpha_tilde - 1/2."""

    eta: float
    alpha_tilde: float

    distance_gossip: float
    """Plain gossip: eta = 0, alpha_tilde = 1/2."""

    distance_paper: float
    """A2CiD2 with the paper's constants."""

    distance_tuned: float
    """A2CiD2 with the factors."""

    decay_gossip: float
    """Exact decay of E consensus distance per exchange per worker without noise."""

    decay_paper: float
    decay_tuned: float

    @property
    def gain(self) -> float:
        """distance_paper / distance_tuned; 1 for one worker."""
        return self.distance_paper / self.distance_tuned if self.distance_tuned else 1.0

    @property
    def is_at_limit(self) -> bool:
        """Whether a factor lies on the border of the search, so that going on might gain more."""
        factors = (self.eta_factor, self.alpha_tilde_factor)
        return not all(1.0 / LARGEST_FACTOR < factor < LARGEST_FACTOR for factor in factors)


def tune(
    constants: Constants,
    noise: GradientNoise,
    *,
    on_evaluation: Callable[[], None] = lambda: None,
) -> Tuning:
    """Minimise the stationary consensus distance over factors of eta and alpha_tilde - 1/2.

    A grid over the logarithms of both factors, then from its best point steps to the best of the
    eight neighbours, halved where none is better. Distances are exact: no sampling. Factors that
    leave less than the stability margin are not considered.
    Where alpha_tilde is 1/2 (complete graph, one worker) there is no excess to multiply: both
    factors are 1. The factors hold for the comm rate of ``constants``.

    Args:
        constants: Graph, rates, and the paper's constants that the factors multiply.
        noise: What the gradients do.
        on_evaluation: Called after each of about a hundred, for progress.

    Example:
        >>> from gossipdp.graph import build_graph
        >>> from gossipdp.graph.gradient_noise import NOISE_MODELS
        >>> tuning = tune(Constants.of(build_graph("ring", 64)), NOISE_MODELS["white"])
        >>> round(tuning.distance_gossip, 1), round(tuning.distance_paper, 1)
        (11.6, 9.7)
        >>> round(tuning.distance_tuned, 1), round(tuning.alpha_tilde_factor, 1)
        (5.9, 0.6)
    """
    modes = Modes.of(constants)
    excess = constants.alpha_tilde - 0.5
    gossip = SecondMoments.gossip(constants)
    paper = SecondMoments.of(constants)
    most_feedback = max(MAX_FEEDBACK, paper.feedback)
    octaves = math.log2(LARGEST_FACTOR)

    def moments_at(eta_octaves: float, excess_octaves: float) -> SecondMoments:
        return SecondMoments(
            modes, constants.eta * 2.0**eta_octaves, 0.5 + excess * 2.0**excess_octaves
        )

    @cache
    def distance(point: tuple[float, float]) -> float:
        if max(map(abs, point)) > octaves:
            return math.inf
        moments = moments_at(*point)
        allowed = moments.feedback <= most_feedback
        reached = moments.stationary_distance(noise) if allowed else math.inf
        on_evaluation()
        return reached

    best = (0.0, 0.0)
    if constants.edges and not paper.is_plain:
        steps = np.arange(-octaves, octaves + GRID_OCTAVES, GRID_OCTAVES).tolist()
        best = min(((0.0, 0.0), *product(steps, steps)), key=distance)
        side = GRID_OCTAVES / 2
        while side >= TOLERANCE_OCTAVES:
            around = ((best[0] + a, best[1] + b) for a, b in product((-side, 0.0, side), repeat=2))
            nearest = min(around, key=distance)
            if distance(nearest) < distance(best):
                best = nearest
            else:
                side /= 2
    tuned = moments_at(*best)
    return Tuning(
        noise=noise,
        eta_factor=2.0 ** best[0],
        alpha_tilde_factor=2.0 ** best[1],
        eta=tuned.eta,
        alpha_tilde=tuned.alpha_tilde,
        distance_gossip=gossip.stationary_distance(noise),
        distance_paper=paper.stationary_distance(noise),
        distance_tuned=tuned.stationary_distance(noise),
        decay_gossip=gossip.decay_per_exchange,
        decay_paper=paper.decay_per_exchange,
        decay_tuned=tuned.decay_per_exchange,
    )
