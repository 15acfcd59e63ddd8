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
        self._exchanges = self._steps = 0
        # The counts of exchanges and steps as moments of each period travelled last.
        self._last = dict.fromkeys(sorted(set(periods)), (0, 0))

    def step(self) -> None:
        """Count a gradient step."""
        self._steps += 1

    def began(self, carried: Collection[int]) -> None:
        """Count an exchange that begins, with the periods of the moments that it carries."""
        self._exchanges += 1
        for period in self._last.keys() & set(carried):
            self._last[period] = self._exchanges, self._steps

    def now(self) -> tuple[int, ...]:
        """Return the periods that are due with an exchange that is proposed now."""
        return tuple(
            period
            for period, (exchanges, steps) in self._last.items()
            if self._exchanges + 1 - exchanges >= period or self._steps - steps >= self._num_steps
        )
