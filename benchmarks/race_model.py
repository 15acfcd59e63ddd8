"""Goodput against the rate of failures, in closed form. Pure.

A job on n workers, of which each fails at random, at the rate 1/M: λ = n/M failures a second.

*Synchronous, with restarts.* A failure ends the job. It starts again after R seconds, if no failure
comes meanwhile, and then saves every C seconds. Of the time T from one failure to the next, which
is exponential, only whole checkpoint intervals after the restart count:

    goodput = λ C Σ_k P(T >= R + k C) = λ C exp(-λ R) / (exp(λ C) - 1)    ≈ 1 - λ (R + C/2)

*Gossip.* A failure takes one worker of n away for R seconds:

    goodput = M / (M + R) = 1 / (1 + λ R / n)

So the first falls with the number of workers, and the second does not.
"""

from __future__ import annotations

import math


def synchronous_goodput(failures_per_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Return the goodput of a job that starts again as a whole.

    >>> round(synchronous_goodput(0.001, 100.0, 60.0), 3)
    0.895
    """
    per_interval = failures_per_s * checkpoint_s
    kept = per_interval / math.expm1(per_interval) if 0 < per_interval < 700 else 0.0
    return kept * math.exp(-failures_per_s * restart_s) if failures_per_s else 1.0


def gossip_goodput(failures_per_s: float, num_workers: int, restart_s: float) -> float:
    """Return the goodput of a run in which the others go on."""
    return 1 / (1 + failures_per_s * restart_s / num_workers)
