"""What links are like: latency and bytes per second, the same everywhere or link by link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

ExchangeTimes = Callable[[int, int], float]
"""Draws how long the data of one exchange occupy the link between two ranks, in seconds."""


@dataclass(frozen=True)
class Link:
    """One link, the same in both directions.

    Args:
        latency_s: how long a byte travels, in seconds.
        bytes_per_s: how fast bytes leave, in each direction.
    """

    latency_s: float = 0.0005
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is {self.latency_s}; it must be a number of at least 0")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; it must be positive")


@dataclass(frozen=True)
class LinkModel:
    """All links of a network.

    The data of an exchange occupy their link for model_bytes / bytes_per_s, times a lognormal
    factor of mean 1, and arrive a latency later. With ``durations_s`` the whole exchange takes a
    duration drawn from that list instead, but no less than the latency, and model_bytes,
    bytes_per_s and jitter play no part.

    There is one draw an exchange, not one an end: real workers send chunk by chunk, within a window
    of what the other has sent, so that the slower direction holds back the faster one.

    Args:
        every: what links are like.
        overrides: the links (i, j), in either order, that are different.
        jitter: standard deviation of the logarithm of that factor; 0 for none.
        durations_s: measured durations of exchanges, each from its start to its end at one worker.
    """

    every: Link = Link()
    overrides: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    jitter: float = 0.0
    durations_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ValueError(f"jitter is {self.jitter}; it must be a number of at least 0")
        for duration_s in self.durations_s:
            if not (math.isfinite(duration_s) and duration_s >= 0):
                raise ValueError(f"{duration_s} is no duration of an exchange in seconds")
        for pair in self.overrides:
            if pair[0] == pair[1]:
                raise ValueError(f"link {pair} joins a rank with itself: give two ranks")
            if pair[::-1] in self.overrides:
                raise ValueError(f"link {pair} is given twice, in both orders: give it once")

    def link(self, sender: int, receiver: int) -> Link:
        """The link between two ranks."""
        pair = (sender, receiver)
        return self.overrides.get(pair) or self.overrides.get(pair[::-1], self.every)

    def latency_s(self, sender: int, receiver: int) -> float:
        """How long a message from one rank to another travels."""
        return self.link(sender, receiver).latency_s

    def begin(self, seed: int, model_bytes: float) -> ExchangeTimes:
        """The transfer times of one run for a model of ``model_bytes``."""
        random = Random(f"{seed} links")
        if self.durations_s:
            durations_s = tuple(self.durations_s)
            return lambda sender, receiver: max(
                0.0, random.choice(durations_s) - self.latency_s(sender, receiver)
            )

        def transfer_s(sender: int, receiver: int) -> float:
            seconds = model_bytes / self.link(sender, receiver).bytes_per_s
            if self.jitter:
                seconds *= random.lognormvariate(-(self.jitter**2) / 2, self.jitter)
            return seconds

        return transfer_s
