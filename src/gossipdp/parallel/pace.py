"""A gradient step's answer to exchanges that lag behind: it waits for them, or warns once."""

import logging
import math
import time
from collections.abc import Callable

from gossipdp.gossip.snapshot import LoopSnapshot
from gossipdp.gossip.thread import GossipThread
from gossipdp.logs import OF_RUN
from gossipdp.parallel.options import Options
from gossipdp.protocol.pairing import MAX_BACKLOG
from gossipdp.protocol.worker import WorkerProtocol

logger = logging.getLogger("gossipdp")

TURN_WHILE_WAITING_S = 0.002
# The most unserved demands of this worker's own under pace="strict".
MAX_LAG = 2
# A low share of served demands gets a warning after this many steps of a worker: links are up then.
# If exchanges are rare, the warning also waits for enough demands, which may take hours.
MIN_STEPS_FOR_RATE_WARNING = 200
# A short run gets no such warning.
MIN_SECONDS_FOR_RATE_WARNING = 60.0
MIN_TICKS_FOR_RATE_WARNING = 20
RATE_WARNING_BELOW = 0.8


class Pace:
    """Follows how many of a worker's exchanges are served. The main thread's.

    Attributes:
        waited_s: time that training has waited for them.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.waited_s = 0.0
        self._first_link_due_s: float | None = None
        self._is_warning_due = options.fixed_comm_rate is not None
        self._began_s = time.monotonic()

    def wait(
        self, protocol: WorkerProtocol, thread: GossipThread, take: Callable[[], object]
    ) -> None:
        """Wait while more than ``MAX_LAG`` own demands are unserved and someone could serve them.

        ``take`` adds what exchanges bring meanwhile. If the gossip thread lacks a core, it has not
        seen the latest steps. They count as one demand each: it would find more demands than a
        backlog holds. At the start every neighbour is expected to be linked within ``timeout_s``.
        The protocol's values are read without a lock: each is one object, replaced whole by the
        gossip thread, and a stale one costs a turn.

        It does not wait while this worker may exchange with no other: it may be up to this very
        thread to end that, as when the parameters are poisoned.
        """
        pairing = protocol.pairing
        started_s = time.monotonic()
        if self._first_link_due_s is None:
            self._first_link_due_s = started_s + self._options.network.timeout_s
        while pairing.answers and pairing.backlog + thread.steps_behind > MAX_LAG:
            if pairing.available:
                self._first_link_due_s = -math.inf
            elif not protocol.neighbours or time.monotonic() >= self._first_link_due_s:
                break
            thread.check()
            time.sleep(TURN_WHILE_WAITING_S)
            take()
        self.waited_s += time.monotonic() - started_s

    def warn_if_low(self, snapshot: LoopSnapshot, rank: int, num_steps: int) -> None:
        """Warn once if too few of the exchanges are served that a fixed rate asks for."""
        if not self._is_warning_due:
            return
        due, served = snapshot.num_ticks, snapshot.counters.exchanges_initiated
        if is_rate_low(num_steps, due, served, time.monotonic() - self._began_s):
            self._is_warning_due = False
            logger.warning(
                "worker %d exchanges at %.0f%% of the comm rate %g: links or neighbours are too "
                "slow for it. Training does not wait; lower comm_rate, or wait for the exchanges "
                "with exchange=Exchange(pace='strict')",
                *(rank, 100 * served / due, self._options.asked_comm_rate),
                extra=OF_RUN,
            )


def is_rate_low(num_steps: int, num_due: int, num_served: int, seconds: float) -> bool:
    """Return whether a worker is served too few of the exchanges that it has asked for.

    Exchanges that wait in its backlog are not late yet.
    """
    if num_steps < MIN_STEPS_FOR_RATE_WARNING or num_due < MIN_TICKS_FOR_RATE_WARNING:
        return False
    if seconds < MIN_SECONDS_FOR_RATE_WARNING:
        return False
    return num_served + MAX_BACKLOG < RATE_WARNING_BELOW * num_due
