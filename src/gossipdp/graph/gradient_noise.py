"""What gradient steps add to the parameters, as far as the consensus distance feels it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GradientNoise:
    """What gradient steps add to one coordinate, at learning rate 1, one step per unit of time.

    Each worker's gradient is ``g = b_i + noise``: b_i is constant in time and of variance
    ``drift`` over workers, the noise is new in every step and of variance ``white``. Neither
    depends on x: this is the noise floor of training, without curvature.

    With ``momentum`` beta the buffer is m <- beta m + g and the step x -= (1 - beta) m, which in
    the long run moves x as far as plain SGD does.

    ``steps`` says when steps happen: ``poisson`` (rate 1 per worker, as in the paper) or
    ``regular`` (one per unit of time, each worker at its own phase; distances are averaged over
    time). White noise gives the same distance under both.
    """

    white: float = 0.0
    drift: float = 0.0
    momentum: float = 0.0
    steps: Literal["poisson", "regular"] = "poisson"

    def __post_init__(self) -> None:
        for name in ("white", "drift"):
            variance = getattr(self, name)
            if not (math.isfinite(variance) and variance >= 0):
                raise ValueError(f"the variance {name}={variance} must be 0 or a positive number")
        if self.white == self.drift == 0:
            raise ValueError("noise without any variance: set white or drift, such as white=1.0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum {self.momentum} must be at least 0 and below 1")
        if self.steps not in ("poisson", "regular"):
            raise ValueError(f"steps {self.steps!r} must be 'poisson' or 'regular'")


NOISE_MODELS = {
    "white": GradientNoise(white=1.0),
    "momentum": GradientNoise(white=1.0, momentum=0.9),
    "drift": GradientNoise(drift=1.0),
}
"""White gradient noise; the same under SGD with momentum 0.9; heterogeneous data alone."""
