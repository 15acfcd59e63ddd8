"""The exchange rate that a worker can afford: ``comm_rate="auto"``.

A worker takes part in

    r = min(4, t / (2 d), a((1 - c) p / t), a((1 - i) q / t)),

    a(s) = max(0.02 / s, min(1, m / s)), m = 0.05, on a GPU 0.03,

exchanges a step. t is the duration of a gradient step, and d that of an exchange. For one exchange
gossip takes the processor time p, of which it spends q in Python. c is the share of one core that
the machine leaves idle, and i the share of time for which the training thread is idle: only one
thread runs Python at a time, so gossip's Python stops a training thread that runs Python, however
many cores there are. Exchanges come at any time, so the share 1 - c, or 1 - i, of what they take is
taken from training. Where the limit of a container lets a thread run only for a share l of the time
that it wants, a step has only l t of the processor: p / l and q / l count. On a GPU q = p, because
Python launches its work. There a training thread that waits for the one that launches its backward
pass counts as busy.

At this rate exchanges fill at most half of a worker's time. They take 2% of it from training, or up
to m where that buys no more than one exchange a step: below one, an exchange lowers the loss by
more than the steps are worth that it takes (benchmarks/NOTES.md). At 4 a step, 16 simulated workers
end less than 1% above all-reduce (docs/quality.md); more was not tried.

All are running medians: one exchange that stood still for seconds says nothing of the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Literal, TypeAlias, final

Bound: TypeAlias = Literal["start", "ceiling", "link", "processor"]
"""The limit that keeps the rate from being higher."""

CEILING = 4.0
START_RATE = 1.0
NUM_TO_KNOW = 4
"""Exchanges, and their durations, after which the rate is no longer ``START_RATE``."""
LINK_SHARE = 0.5
TAKEN_SHARE, TAKEN_SHARE_BELOW_ONE, TAKEN_SHARE_ON_CARD = 0.02, 0.05, 0.03
"""The share of training that exchanges may take: beyond one a step, up to one, up to one on a GPU.
"""
LAST_COSTS = 9
HYSTERESIS = 1.25
SPARE = 1.5
"""A worker's exchanges, asked for and answered, are at most so many times the rate in force."""
BURST = 4.0
"""Exchanges that a worker may save up while it exchanges less than it can afford."""


def affordable_rate(
    step_s: float,
    exchange_s: float,
    processor: Iterable[tuple[float, float]] = (),
    most_taken: float = TAKEN_SHARE_BELOW_ONE,
) -> tuple[float, Bound]:
    """Return r of the module's text, and the bound that keeps it from being higher.

    Args:
        step_s, exchange_s: t and d.
        processor: (seconds of an exchange, idle share) pairs: p / l with c, q / l with i.
        most_taken: m.
    """
    link_rate = LINK_SHARE * step_s / max(exchange_s, 1e-9)
    allowed: dict[Bound, float] = {"ceiling": CEILING, "link": link_rate}
    for used_s, idle in processor:
        share = max((1.0 - idle) * used_s, 1e-9) / step_s
        most = max(TAKEN_SHARE / share, min(1.0, most_taken / share))
        allowed["processor"] = min(most, allowed.get("processor", math.inf))
    bound = min(allowed, key=lambda each: allowed[each])
    return allowed[bound], bound


@final
class ExchangeRate:
    """One worker's ``rate``, in exchanges a gradient step, from what it has measured.

    ``bound`` is the limit that keeps it from being higher, ``most_taken`` m of the module's text.
    """

    def __init__(self, most_taken: float = TAKEN_SHARE_BELOW_ONE) -> None:
        self._most_taken = most_taken
        self.rate = START_RATE
        self.bound: Bound = "start"
        self._duration_s = _last()
        self._processor_s, self._python_s = _last(), _last()
        self._idle_core, self._idle_thread, self._ran = _last(), _last(), _last()
        self._tokens, self._tokens_at = BURST, -math.inf
        self._step_s: float | None = None

    def exchanged(self, duration_s: float) -> None:
        self._duration_s.append(duration_s)

    def took_processor(self, processor_s: float, arrays_s: float) -> None:
        """Note the processor time that the gossip thread took from an exchange's begin to its end.

        The time between exchanges does not count: the thread's other work would make rare exchanges
        look expensive, and so rarer still. ``arrays_s``: of that, the time on arrays, outside of
        Python.
        """
        self._processor_s.append(processor_s)
        self._python_s.append(max(0.0, processor_s - arrays_s))

    def saw_idle(self, core: float, thread: float, ran: float = 1.0) -> None:
        """Note the shares of about the last second: c, i and l of the module's text."""
        self._idle_core.append(max(0.0, core))
        self._idle_thread.append(max(0.0, thread))
        self._ran.append(ran)

    def stepped(self, step_s: float | None) -> bool:
        """Look at the duration of a gradient step; return whether another rate is in force now.

        It changes only if the allowed rate differs by more than a quarter, or reaches 4 a step: a
        rate that trembles would change the gaps between exchanges for nothing.
        """
        self._step_s = step_s
        if step_s is None or len(self._duration_s) < NUM_TO_KNOW:
            return False
        processor: list[tuple[float, float]] = []
        if self._processor_s and self._idle_core:
            ran = max(1e-3, median(self._ran))
            processor = [
                (median(self._processor_s) / ran, median(self._idle_core)),
                (median(self._python_s) / ran, median(self._idle_thread)),
            ]
        allowed, bound = affordable_rate(
            step_s, median(self._duration_s), processor, self._most_taken
        )
        is_near = self.rate / HYSTERESIS <= allowed <= self.rate * HYSTERESIS
        if self.bound != "start" and is_near and (allowed < CEILING or self.rate == CEILING):
            return False
        has_changed = allowed != self.rate
        self.rate, self.bound = allowed, bound
        return has_changed

    # --- all exchanges, asked for and answered ---------------------------------------------

    def began(self, now: float) -> None:
        """Spend the cost of an exchange that begins, whether asked for or answered.

        Nobody falls into debt. Before the first known step every exchange is answered, and a debt
        from a first step of a minute would keep the worker closed for hundreds of steps.
        """
        self._earn(now)
        self._tokens = max(0.0, self._tokens - 1.0)

    def withdrawn(self) -> None:
        """Give back the cost of an exchange that was withdrawn before its first chunk."""
        self._tokens = min(BURST, self._tokens + 1.0)

    def opens_at(self, now: float) -> float:
        """Return when the worker can afford another exchange: now, or later.

        A worker asks for half of its r exchanges. It also answers others, which have rates of their
        own and may afford more. So all its exchanges are limited to ``SPARE`` r. When its tokens
        run out, it neither asks nor accepts until it has earned one.
        """
        self._earn(now)
        missing = 1.0 - self._tokens
        if self._step_s is None or missing <= 0.0:
            return now
        return self._tokens_at + missing * self._step_s / (SPARE * self.rate)

    def _earn(self, now: float) -> None:
        if self._step_s is not None and now > self._tokens_at:
            earned = (now - self._tokens_at) * SPARE * self.rate / self._step_s
            self._tokens = min(BURST, self._tokens + earned)
        self._tokens_at = max(now, self._tokens_at)


def _last() -> deque[float]:
    return deque(maxlen=LAST_COSTS)
