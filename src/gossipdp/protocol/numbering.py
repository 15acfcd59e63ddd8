"""The choice of the exchanges with which an optimizer's moments travel, by their numbers."""

from collections.abc import Callable
from typing import final

MOST_SKIPPED = 16


@final
class Numbering:
    """The numbers of the exchanges that a worker asks for, so that moments travel when due.

    The number of an exchange says whether the optimizer's moments travel with it, and the worker
    that asks for the exchange chooses the number. Moments are due with every
    ``num_exchanges``-th exchange of a worker, whichever worker asks for it, and sooner where
    exchanges are so rare that ``num_steps`` gradient steps have passed since the last one with
    moments. So this needs no comm rate, which may be unknown and may change.

    Args:
        carries: whether moments travel with the exchange of a number.
        num_exchanges: one exchange in so many carries moments.
        num_steps: or the first exchange after so many steps.
    """

    def __init__(
        self, carries: Callable[[int], bool], *, num_exchanges: int, num_steps: float
    ) -> None:
        self._carries = carries
        self._num_exchanges, self._num_steps = num_exchanges, num_steps
        self._exchanges = self._steps = 0  # since the last exchange with moments

    def step(self) -> None:
        """Count a gradient step."""
        self._steps += 1

    def began(self, number: int) -> None:
        """Count an exchange that begins."""
        self._exchanges += 1
        if self._carries(number):
            self._exchanges = self._steps = 0

    def from_(self, number: int) -> int:
        """Return the first number from this one on that carries moments if and only if due.

        If there is none near, return this one: moments may have been given up.
        """
        is_due = self._exchanges + 1 >= self._num_exchanges or self._steps >= self._num_steps
        near = range(number, number + MOST_SKIPPED)
        return next((each for each in near if self._carries(each) == is_due), number)
