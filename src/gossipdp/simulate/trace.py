"""What a simulated run leaves: its time series, and what can be read off them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

Activity: TypeAlias = Literal["computing", "exchanging", "waiting"]


class Interval(NamedTuple):
    """What a worker did from one moment to another, in seconds of virtual time."""

    rank: int
    activity: Activity
    start_s: float
    end_s: float


class Record(NamedTuple):
    """The state of the network at one moment.

    Attributes:
        time_s: virtual time, in seconds.
        loss: of the mean of the workers, over the training objective; NaN without gradients.
        batch_loss: mean over the batches since the last record; NaN for none.
        metric: of the mean of the workers on held-out data; NaN where there is none.
        consensus_distance: (1/n) sum_i |x_i - mean|^2.
        exchanges: so far, over the network; a synchronous round counts the edges it used.
        gradient_steps: so far, of all workers.
        idle_share: share of all workers' time so far that was spent waiting.
        drift: distance of the mean of x + c/2 from where gradient steps alone would have moved it.
    """

    time_s: float
    loss: float
    batch_loss: float
    metric: float
    consensus_distance: float
    exchanges: int
    gradient_steps: int
    idle_share: float
    drift: float


@dataclass
class Trace:
    """One simulated run.

    Attributes:
        method: its method.
        num_workers: number of workers.
        unit_s: the duration of an ordinary gradient step: the unit of time.
        records: in the order of time; the first is the start.
        worker_steps: gradient steps of each worker.
        worker_exchanges: exchanges of each worker, both those it asked for and those it answered.
        worker_requests: exchanges that each worker asked for; empty where nobody asks.
        num_events: events that the engine and the edges handled.
        num_messages: control messages sent, by type; empty where there are none.
        intervals: what each worker did when, if the scenario asks for it.
        arithmetic: what computed the exchanges: "numba" or "torch".
        wall_s: how long the simulation itself took; not part of :meth:`digest`.
    """

    method: str
    num_workers: int
    unit_s: float
    records: list[Record] = field(default_factory=list)
    worker_steps: list[int] = field(default_factory=list)
    worker_exchanges: list[int] = field(default_factory=list)
    worker_requests: list[int] = field(default_factory=list)
    num_events: int = 0
    num_messages: dict[str, int] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    arithmetic: str = "torch"
    wall_s: float = 0.0

    def column(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """One time series by its name in :class:`Record`; (num_records + 1,)."""
        return np.array([getattr(record, name) for record in self.records], dtype=np.float64)

    @property
    def achieved_comm_rate(self) -> float:
        """Exchanges per worker per gradient step: 2 exchanges / all gradient steps; NaN if none."""
        last = self.records[-1]
        return 2 * last.exchanges / last.gradient_steps if last.gradient_steps else math.nan

    @property
    def events_per_s(self) -> float:
        """Events handled per second of real time."""
        return self.num_events / self.wall_s if self.wall_s > 0 else math.inf

    def digest(self) -> str:
        """A hash of all that the run did, but for how long it took: same seed, same digest."""
        content = {
            "method": self.method,
            # Bytes, since JSON and equality know no NaN.
            "records": np.array(self.records, dtype=np.float64).tobytes(),
            "worker_steps": self.worker_steps,
            "worker_exchanges": self.worker_exchanges,
            "worker_requests": self.worker_requests,
            "num_events": self.num_events,
            "num_messages": dict(sorted(self.num_messages.items())),
            "intervals": self.intervals,
            "arithmetic": self.arithmetic,
        }
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()

    def decay_per_exchange(self, highest: float = 1e-1, lowest: float = 1e-20) -> float:
        """Slope of -log(consensus distance) over exchanges per worker, by least squares.

        Args:
            highest, lowest: the part of the run that counts, as shares of the first consensus
                distance: its start is a transient, its end may be rounding.

        Raises:
            ValueError: fewer than three records lie in that part.
        """
        return decay_per_exchange(
            self.column("exchanges") * 2.0 / self.num_workers,
            self.column("consensus_distance"),
            highest=highest,
            lowest=lowest,
        )


MIN_DECAY_RECORDS = 3


def decay_per_exchange(
    exchanges_per_worker: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]],
    consensus_distances: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]],
    *,
    highest: float,
    lowest: float,
) -> float:
    """Slope of -log(distance) over exchanges per worker between two shares of the first distance.

    The part runs from the first record at or below ``highest`` to the last before the first one
    below ``lowest``.

    Raises:
        ValueError: fewer than three records lie in that part.
    """
    exchanges = np.asarray(exchanges_per_worker, dtype=np.float64)
    shares = np.asarray(consensus_distances, dtype=np.float64) / consensus_distances[0]
    begin = _first(shares <= highest)
    end = _first(shares < lowest)
    part = slice(begin, end)
    if end - begin < MIN_DECAY_RECORDS:
        raise ValueError(
            f"the consensus distance fell to {shares.min():.2g} of its first value, with "
            f"{max(0, end - begin)} records between {highest:g} and {lowest:g} of it; a slope "
            f"needs {MIN_DECAY_RECORDS}: simulate more steps, or record more often"
        )
    slope, _ = np.polyfit(exchanges[part], -np.log(shares[part]), 1)
    return float(slope)


def _first(condition: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """The first place where it holds; the length where it never does."""
    return int(np.argmax(condition)) if condition.any() else len(condition)
