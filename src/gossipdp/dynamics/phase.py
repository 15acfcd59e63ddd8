"""The phase of a worker: the flow of its momentum, in its own communication periods."""

import math
import threading

# Between two exchanges the phase advances by at most this many periods, or a stalled worker would
# flow its momentum away in one go; on a ring of 64, an uncapped stall of everyone doubles the
# consensus distance.
MAX_PERIODS = 4.0

# A gap counts in the running mean with at most this many times the mean, so that no pause slows
# the clock for the exchanges after it. A Poisson process exceeds it once in exp(10) = 22,000 gaps.
MAX_GAP_IN_MEANS = 10.0


class Phase:
    r"""The phase theta of one worker: it grows between exchanges and stands still during them.

    .. math:: \theta = \int \eta\, d\tau, \qquad d\tau = \frac{dt}{R\,\bar g}

    with :math:`\eta` → ``eta`` (the mixing speed at comm rate 1), :math:`R` → ``worker_rate``
    (:math:`\sum_j \lambda_{ij}` at comm rate 1) and :math:`\bar g` the running mean of the gaps
    from exchange start to exchange start, in seconds. So the periods are those that the network
    sustains, whatever the nominal rate: a ring of 64 with saturated links diverges if eta is taken
    at the nominal rate (the paper's section 4.1 assumes rates that are met).

    The caller passes the time; an earlier one than before changes nothing. Two threads may call. An
    exchange freezes theta at or after every value that a boundary has read, and a boundary that
    read an older value finds the chunk ahead of it and flows nothing. So every chunk sees the same
    flow between two exchanges.

    Example:
        >>> phase = Phase(eta=0.5, worker_rate=1.0)
        >>> for start_s in (0.0, 1.0, 2.0):
        ...     theta = phase.start_exchange(start_s)
        ...     phase.end_exchange(start_s)
        >>> theta
        0.5
    """

    def __init__(self, eta: float, worker_rate: float) -> None:
        self._speed = self._speed_of(eta, worker_rate)
        self._theta = 0.0
        # NaN before the second exchange, and before the first: no period is greater than another.
        self._mean_gap_s = self._last_start_s = math.nan
        self._num_gaps = 0
        self._counted_periods = 0.0
        self._start_s: float | None = None  # of the exchange under way
        self._lock = threading.Lock()  # guards all of the above

    @staticmethod
    def _speed_of(eta: float, worker_rate: float) -> float:
        """Return the phase gained in one period; a worker without neighbours has no periods."""
        return eta / worker_rate if worker_rate > 0 else 0.0

    def at(self, now_s: float) -> float:
        """Return theta at ``now_s``. It stands still while an exchange is under way."""
        with self._lock:
            if self._start_s is None:
                self._advance(now_s)
            return self._theta

    def start_exchange(self, now_s: float) -> float:
        """Freeze and return theta."""
        with self._lock:
            assert self._start_s is None, "one exchange at a time per worker"
            self._advance(now_s)
            self._start_s = now_s
            return self._theta

    def end_exchange(self, now_s: float, *, is_withdrawn: bool = False) -> None:
        """Let theta go on, after an exchange that finished, was stopped or was withdrawn.

        The gap between its start and the one before enters the mean. A withdrawn exchange moved
        nothing: theta goes on as if it had never begun.
        """
        with self._lock:
            assert self._start_s is not None, "no exchange to end"
            if not is_withdrawn:
                self._count_gap(self._start_s - self._last_start_s)
                self._last_start_s = self._start_s
                self._counted_periods = 0.0
            self._start_s = None
            self._advance(now_s)

    def set_speed(self, eta: float, worker_rate: float, now_s: float) -> None:
        """Change the speed from now on, for a new graph; theta itself does not jump."""
        self.at(now_s)
        with self._lock:
            self._speed = self._speed_of(eta, worker_rate)

    def _advance(self, now_s: float) -> None:
        periods = min((now_s - self._last_start_s) / self._mean_gap_s, MAX_PERIODS)
        if periods > self._counted_periods:
            self._theta += self._speed * (periods - self._counted_periods)
            self._counted_periods = periods

    def _count_gap(self, gap_s: float) -> None:
        if not gap_s > 0.0:  # the first start has none, and a mean of 0 would stay
            return
        self._num_gaps += 1
        if self._num_gaps == 1:
            self._mean_gap_s = gap_s
        gap_s = min(gap_s, MAX_GAP_IN_MEANS * self._mean_gap_s)
        self._mean_gap_s += max(0.1, 1.0 / self._num_gaps) * (gap_s - self._mean_gap_s)
