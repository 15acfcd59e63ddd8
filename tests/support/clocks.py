"""A clock for tests, which inject it where the code would look at the time."""

import math
from dataclasses import dataclass


@dataclass
class Clock:
    """Seconds that pass when the test says so, or when the code sleeps, for so long at most."""

    now_s: float = 0.0
    longest_s: float = math.inf

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < self.longest_s, "it goes on for ever"
