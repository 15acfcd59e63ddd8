"""What a simulated network is like: how long everything takes, and what is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

Seconds = Callable[[int, int], float]
"""A duration for something that goes from one rank to another."""


@dataclass(frozen=True)
class Conditions:
    """What the network is like; every duration in seconds of virtual time.

    Args:
        latency_s: how long a message travels from one rank to another.
        transfer_s: how long the data of one exchange need to get onto the link. Asked once for
            each exchange: chunk by chunk each end waits for the other (the runtime's window), so
            that the two directions take equally long.
        step_s: how long the next gradient step of a rank takes.
        detection_s: how long until an end learns that its link was cut.
        reconnect_s: how long after a cut the link is there again.
        dial_timeout_s: how long until a dial that nobody answers is given up.
        cut_at_messages: the numbers of those messages, counted over the network, at whose
            sending their link is cut.
    """

    latency_s: Seconds
    transfer_s: Seconds
    step_s: Callable[[int], float]
    detection_s: Seconds = lambda _sender, _receiver: 0.01
    reconnect_s: float = 0.2
    dial_timeout_s: float = 1.0
    cut_at_messages: Collection[int] = ()
