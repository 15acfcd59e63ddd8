"""The choice of the exchanges with which an optimizer's moments travel."""

from collections.abc import Collection
from typing import final


@final
class MomentsDue:
    """The periods of the moments that are due with a worker's next exchange.

    A moment of period k is due with every k-th exchange of a worker, whichever worker asks for it,
    and sooner where exchanges are so rare that ``num_steps`` gradient steps have passed since the
    last one that carried it. So this needs no comm rate, which may be unknown and may change. The
    worker that asks for an exchange chooses, and PROPOSE tells the other one.

    Args:
        periods: those of all moments.
        num_steps: after so many steps each moment is due, whatever its period.
    """

    def __init__(self, periods: Collection[int], num_steps: float) -> None:
        self._num_steps = num_steps
        # Exchanges and steps since the last exchange that carried the moments of a period.
        self._since = dict.fromkeys(sorted(set(periods)), (0, 0))

    def step(self) -> None:
        """Count a gradient step."""
        self._since = {each: (n, steps + 1) for each, (n, steps) in self._since.items()}

    def began(self, carried: Collection[int]) -> None:
        """Count an exchange that begins, with the periods of the moments that it carries."""
        for period, (exchanges, steps) in self._since.items():
            self._since[period] = (0, 0) if period in carried else (exchanges + 1, steps)

    def now(self) -> tuple[int, ...]:
        """Return the periods that are due with an exchange that is proposed now."""
        return tuple(
            period
            for period, (exchanges, steps) in self._since.items()
            if exchanges + 1 >= period or steps >= self._num_steps
        )
