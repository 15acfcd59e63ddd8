"""Training times by one compute-time spread and one link model, and their fit to the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

BYTES_PER_PARAMETER = 4
RESNET18_PARAMETERS, RESNET50_PARAMETERS = 11_173_962, 25_557_032
CIFAR_STEPS = 300 * 50_000 / 128
"""Of all workers together: 300 epochs of 50,000 images in batches of 128."""
IMAGENET_STEPS = 64 * 14_000
"""Of all workers together: the paper's 14k steps on each of 64 workers."""


class Measurement(msgspec.Struct, frozen=True):
    """A time that the paper reports."""

    task: str
    """"cifar" or "imagenet"."""
    method: str
    """"allreduce" or "ours"."""
    num_workers: int
    minutes: float
    rounding: float
    """It is printed to so many minutes, more or less."""

    @property
    def model_bytes(self) -> float:
        """Of the task's network, in float32."""
        is_small = self.task == "cifar"
        return BYTES_PER_PARAMETER * float(RESNET18_PARAMETERS if is_small else RESNET50_PARAMETERS)

    @property
    def num_steps(self) -> float:
        """Of all workers together."""
        return CIFAR_STEPS if self.task == "cifar" else IMAGENET_STEPS


_SIZES = (4, 8, 16, 32, 64)
_MINUTES = {"allreduce": (21.9, 11.1, 6.6, 3.2, 1.8), "ours": (20.9, 10.5, 5.2, 2.7, 1.5)}
PAPER_TIMES = (
    *(
        Measurement("cifar", method, num_workers, minutes, 0.05)
        for method, times in _MINUTES.items()
        for num_workers, minutes in zip(_SIZES, times, strict=True)
    ),
    Measurement("imagenet", "allreduce", 64, 170.0, 5.0),
    Measurement("imagenet", "ours", 64, 150.0, 5.0),
)
PAPER_SLOWEST_OVER_FASTEST = 13.0 / 14.0
"""Gradient steps of the slowest and the fastest of 64 workers on ImageNet."""
SLOWEST_ROUNDING = 0.05
RUN_TO_RUN = 0.02
"""Relative error granted to every time beside its rounding: the paper reports none."""


class TimeModel(msgspec.Struct, frozen=True):
    """What a training time is made of.

        step of worker i = mean x exp(between z_i) x exp(within z), both factors of mean 1
        all-reduce: rounds x (slowest step + 2 (n-1)/n bytes x s_per_byte + 2 (n-1) latency_s)
        ours:       steps / sum_i (steps of worker i per second)
        both:       + fixed_s

    The communication term is that of :func:`gossipdp.simulate.synchronous.run_allreduce`.
    """

    cifar_step_s: float
    imagenet_step_s: float
    between: float
    """Spread of workers: standard deviation of the logarithm of a worker's own factor."""
    within: float
    """Spread from step to step: the same of each step's."""
    latency_s: float
    s_per_byte: float
    fixed_s: float
    """Of a run, whatever its length."""

    def step_s(self, task: str) -> float:
        """The mean step of a task."""
        return self.cifar_step_s if task == "cifar" else self.imagenet_step_s


# What the parameters are measured in while fitted, so that all are of the order of one.
SCALES = TimeModel(0.04, 0.6, 0.02, 0.1, 1e-5, 1e-10, 5.0)
FITS: Mapping[str, tuple[str, ...]] = {
    "spread and links": (),
    "spread alone": ("latency_s", "s_per_byte"),
    "links alone": ("between", "within"),
}
"""The fits, and the parameters that each holds at zero."""


@dataclass(frozen=True)
class Draws:
    """Normal numbers for the expectations, the same at every evaluation so that fits are smooth.

    Attributes:
        between: (networks, 64).
        within: (networks, rounds, 64).
    """

    between: FloatArray
    within: FloatArray

    @classmethod
    def of(cls, num_networks: int, num_rounds: int, seed: int = 0) -> Draws:
        """Draw them."""
        random = np.random.default_rng(seed)
        return cls(
            random.standard_normal((num_networks, max(_SIZES))),
            random.standard_normal((num_networks, num_rounds, max(_SIZES))),
        )


def predict(
    model: TimeModel, times: Sequence[Measurement], draws: Draws
) -> tuple[list[float], float]:
    """Minutes of each of ``times``, and the slowest worker's steps over the fastest's of 64."""
    factors = np.exp(model.between * draws.between - model.between**2 / 2)
    steps = np.exp(model.within * draws.within - model.within**2 / 2) * factors[:, None, :]
    minutes = []
    for one in times:
        n = one.num_workers
        step_s, hops = model.step_s(one.task), 2 * (n - 1)
        if one.method == "ours":
            # A worker's mean step is its factor, and everyone works until all steps are done.
            round_s = step_s * float(np.mean(1.0 / np.mean(1.0 / factors[:, :n], axis=1)))
        else:
            round_s = (
                step_s * float(np.mean(steps[:, :, :n].max(axis=2)))
                + hops / n * one.model_bytes * model.s_per_byte
                + hops * model.latency_s
            )
        minutes.append((one.num_steps / n * round_s + model.fixed_s) / 60.0)
    slowest_over_fastest = float(np.mean(factors.min(axis=1) / factors.max(axis=1)))
    return minutes, slowest_over_fastest


class Fit(msgspec.Struct, frozen=True):
    """A fitted model and how well it fits."""

    name: str
    model: TimeModel
    minutes: list[float]
    """Predicted, in the order of the times fitted to."""
    slowest_over_fastest: float
    chi_squared: float
    """Sum of squared residuals over their granted errors."""
    num_free: int
    """Parameters fitted."""


def fit(name: str, times: Sequence[Measurement], slowest_over_fastest: float, draws: Draws) -> Fit:
    """Fit the model, all parameters at least zero, by weighted least squares of log times.

    Args:
        name: one of :data:`FITS`.
        times: what to fit to.
        slowest_over_fastest: steps of the slowest worker over those of the fastest, of 64.
        draws: for the expectations.
    """
    from scipy.optimize import least_squares

    names = [field for field in TimeModel.__struct_fields__ if field not in FITS[name]]
    scales = np.array([getattr(SCALES, field) for field in names])

    def model_of(values: FloatArray) -> TimeModel:
        zero = dict.fromkeys(TimeModel.__struct_fields__, 0.0)
        return TimeModel(**zero | dict(zip(names, (values * scales).tolist(), strict=True)))

    def residuals(values: FloatArray) -> FloatArray:
        minutes, ratio = predict(model_of(values), times, draws)
        found = [
            np.log(mine / one.minutes) / np.hypot(RUN_TO_RUN, one.rounding / one.minutes)
            for mine, one in zip(minutes, times, strict=True)
        ]
        return np.array([*found, (ratio - slowest_over_fastest) / SLOWEST_ROUNDING])

    best = min(
        (
            least_squares(
                residuals,
                np.full(len(names), start),
                bounds=(0.0, np.inf),
                diff_step=[1e-3] * len(names),
            )
            for start in (0.3, 1.0, 2.0)
        ),
        key=lambda solution: float(solution.cost),
    )
    model = model_of(best.x)
    minutes, ratio = predict(model, times, draws)
    return Fit(name, model, minutes, ratio, 2.0 * float(best.cost), len(names))
