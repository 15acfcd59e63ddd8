"""The conditions of a run: step times, links between workers, and the faults of the race."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from support.hosts import EmulatedHosts, ShapedHosts

from gossipdp.launcher.faults import FaultPlan
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
        base = LognormalTime(self.step_s, self.spread)
        return SlowedTime(base, dict(enumerate(self.slowness)))

    def speeds(self, num_workers: int) -> list[float]:
        """Return the speed of each worker, in full batches per ``step_s``."""
        return [1 / factor for factor in self.slowness] or [1.0] * num_workers

    def ideal_s(self, num_workers: int, steps: int) -> float:
        """Return how long ``steps`` of each worker, shared by speed, take, without waits."""
        return steps * num_workers * self.step_s / sum(self.speeds(num_workers))

    def hosts(self, num_workers: int, num_parameters: int) -> ShapedHosts | EmulatedHosts | None:
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

SHARES = (1.0, 0.5, 0.25)
"""Of its core, which a worker with a changing quota gets in turn."""


@dataclass(frozen=True)
class RaceCondition:
    """The faults and the network that a run meets.

    faults: the plan, as for ``gossipdp run --faults``; "" for none.
    least_s: a run lasts at least so long, for a plan with longer periods.
    spread: standard deviation of the logarithm of step times.
    kill_mean_s: a worker is killed at random times so far apart (a Poisson clock); 0: nobody is.
    quota_s: the last worker gets another of ``SHARES`` of its core after each such time; 0: never.
    network: None: one machine. "hosts": a namespace each; a worker that is killed vanishes with its
        host, and starts again on another host. "bad_link": a namespace each, and the last worker's
        link is slower.
    """

    text: str
    faults: str = ""
    least_s: float = 0.0
    spread: float = 0.0
    kill_mean_s: float = 0.0
    quota_s: float = 0.0
    network: Literal["hosts", "bad_link"] | None = None

    def plan(self, seed: int, seconds: float, signalled: int | None = None) -> FaultPlan:
        """Return the faults of a run.

        signalled: the worker whose quota changes, where signals have to take the place of quotas.
        """
        texts, draw, at_s = [self.faults] if self.faults else [], Random(seed), 0.0
        if self.kill_mean_s:
            while (at_s := at_s + draw.expovariate(1 / self.kill_mean_s)) < seconds:
                texts.append(f"kill at {at_s:.2f}s")
        if signalled is not None:
            for turn in range(1, int(seconds // self.quota_s) + 1):
                share, when = SHARES[turn % len(SHARES)], f"at {turn * self.quota_s:g}s"
                if share < 1:
                    texts.append(f"slow {1 / share:g}x {signalled} {when} for {self.quota_s:g}s")
        return FaultPlan.parse("; ".join(texts)) if texts else FaultPlan()

    @property
    def kills(self) -> bool:
        return bool(self.kill_mean_s) or "kill" in self.faults

    def seconds(self, seconds: float) -> float:
        return float(max(seconds, self.least_s))  # an equal int would have another key

    def stretched(self, factor: float) -> RaceCondition:
        """Return the same with all times so many times as long."""
        clauses = tuple(
            replace(
                clause,
                time_s=round(factor * clause.time_s, 3),
                for_s=None if clause.for_s is None else round(factor * clause.for_s, 3),
            )
            for clause in (FaultPlan.parse(self.faults).clauses if self.faults else ())
        )
        times = {name: factor * getattr(self, name) for name in ("kill_mean_s", "quota_s")}
        least_s = factor * self.least_s if factor >= 1 else 0.0
        return replace(self, faults=str(FaultPlan(clauses)), least_s=least_s, **times)


def _kills(period_s: float, also: str = "", least_s: float = 0.0) -> RaceCondition:
    text = f"kill -9 of one worker every {period_s:g} s, which is started again"
    faults = f"kill every {period_s:g}s"
    if also:
        text, faults = f"{text}; every 10 s another one is 4 times slower", f"{faults}; {also}"
    return RaceCondition(text, faults, least_s)


MOVING = "slow 4x every 10s"
RACE_CONDITIONS = {
    "calm": RaceCondition("nothing happens"),
    "slow": RaceCondition("one worker is 4 times slower all the time", "slow 4x 0"),
    "moving": RaceCondition("every 10 s another worker is 4 times slower", MOVING),
    "jitter": RaceCondition(CONDITIONS["jitter"].text, spread=0.3),
    "stops": RaceCondition(
        "a worker stands still (SIGSTOP) for 2 s at 10 s and every 25 s, 5 s at 20 s, 8 s at 35 s",
        "stop 2s at 10s; stop 5s at 20s; stop 8s at 35s; stop 2s every 25s",
    ),
    "kills10": _kills(10),
    "kills30": _kills(30),
    "kills120": _kills(120, least_s=300),
    "kills10_moving": _kills(10, MOVING),
    "starved": RaceCondition(
        "one worker has its whole core, half of it and a quarter in turn, 30 s each; a worker is "
        "killed at random times, one a minute (a Poisson clock)",
        kill_mean_s=60,
        quota_s=30,
    ),
    "vanish": RaceCondition(
        "every 30 s a worker's host vanishes, and its connections stay open at their other ends; "
        "the worker starts again on another host (a namespace each)",
        "kill every 30s",
        network="hosts",
    ),
    "bad_link": RaceCondition(
        "one worker behind 100 Mbit/s, the others behind 1 Gbit/s (a namespace each, veth, the "
        "kernel's tbf; as for a model of a million parameters)",
        network="bad_link",
    ),
}
"""By name, in the order of the report."""
