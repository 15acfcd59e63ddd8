"""How far step times may be spread: what predictions and simulations of a run agree on."""

from __future__ import annotations

LARGEST_STEP_SPREAD = 3.0
"""With more the mean comes from steps so rare that a run does not see them: nearly all of its steps
take next to no time, and there is no end of them."""


def check_step_spread(name: str, spread: float) -> None:
    """Raise a ValueError unless ``spread`` can be the spread of the logarithm of step times."""
    if not 0.0 <= spread <= LARGEST_STEP_SPREAD:
        raise ValueError(
            f"{name} is {spread:g}, but must be from 0 to {LARGEST_STEP_SPREAD:g}: it is the "
            "standard deviation of the logarithm of step times, 0.1 is typical"
        )
