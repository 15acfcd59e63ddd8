"""A clock for tests, which inject it where the code would look at the time."""

from dataclasses import dataclass


@dataclass
class Clock:
    """Seconds that pass when the test says so."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
