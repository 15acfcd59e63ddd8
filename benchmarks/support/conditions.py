"""The conditions of a run: step times of each worker, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from support.hosts import EmulatedHosts, Hosts, ShapedHosts

from gossipdp_lab.simulate.scenario import ComputeTime, LognormalTime, SlowedTime

MODEL_PARAMETERS = 1_000_000


@dataclass(frozen=True)
class Condition:
    """The conditions that a run is timed under.

    step_s: what the gradients of a full batch take on a worker of ordinary speed, the mean.
    slowness: by rank, how many times as long they take; of none: all are equal.
    spread: standard deviation of the logarithm of step times.
    mbits_per_s: of each worker's link, both ways at once, for a model of a million parameters: for
        a smaller one the link is slower in proportion, so that a model takes as long to send. None:
        all are on one machine.
    delay_ms: from each worker to each other, one way.
    """

    text: str
    step_s: float = 0.040
    slowness: tuple[float, ...] = ()
    spread: float = 0.0
    mbits_per_s: float | None = None
    delay_ms: float = 0.0

    @property
    def compute(self) -> ComputeTime:
        """Return the step times by rank."""
        base = LognormalTime(self.step_s, self.spread)
        return SlowedTime(base, dict(enumerate(self.slowness)))

    def speeds(self, num_workers: int) -> list[float]:
        """Return the speed of each worker, in full batches per ``step_s``."""
        return [1 / factor for factor in self.slowness] or [1.0] * num_workers

    def ideal_s(self, num_workers: int, steps: int) -> float:
        """Return how long ``steps`` of each worker, shared by speed, take, without waits."""
        return steps * num_workers * self.step_s / sum(self.speeds(num_workers))

    def hosts(self, num_workers: int, num_parameters: int) -> Hosts | None:
        """Return a network of namespaces, one a worker; None on one machine."""
        if self.mbits_per_s is None:
            return None
        rate = self.mbits_per_s * num_parameters / MODEL_PARAMETERS
        if self.delay_ms:
            return EmulatedHosts(num_workers, rate, self.delay_ms)
        return ShapedHosts(num_workers, rate)


CONDITIONS = {
    "slow_link": Condition(
        "each worker behind 100 Mbit/s, 20 ms one way from every other (a namespace each, TUN "
        "devices, the kernel's TCP over a link emulator)",
        mbits_per_s=100,
        delay_ms=20,
    ),
    "slow": Condition("one of four workers is 4 times slower", slowness=(1, 1, 4, 1)),
    "speeds": Condition("four workers of speeds 8:4:2:1", step_s=0.020, slowness=(1, 2, 4, 8)),
    "equal": Condition("four equal workers on one machine"),
    "gigabit": Condition(
        "each worker behind 1 Gbit/s (a namespace each, veth, the kernel's tbf)", mbits_per_s=1_000
    ),
    "jitter": Condition(
        "step times lognormal, their logarithm's deviation 0.3 (three times what is typical)",
        spread=0.3,
    ),
}
"""By the name of the table, in the order in which they matter."""
