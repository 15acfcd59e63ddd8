"""A worker's status in Prometheus's text format, the answer to ``GET /metrics``.

Names follow its conventions: base units, ``_total`` for what only grows. Every sample has the label
``rank``; what is not known yet is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gossipdp.observe.status import MemberState, WorkerStatus

__all__ = ["CONTENT_TYPE", "metrics_text"]

# Name, attribute of the status, help. A name that ends in _total is a counter's.
_PLAIN = (
    ("gradient_steps_total", "gradient_steps", "Gradient steps over all lives of this rank."),
    ("samples_total", "samples", "Samples over all lives of this rank."),
    ("run_samples_total", "run_samples", "Samples of all workers, as far as this one knows."),
    ("budget_samples", "budget_samples", "Samples that all workers are to train on."),
    ("incarnation", "incarnation", "Lives of this rank before this one."),
    ("step_seconds", "step_seconds", "Running median of a step's duration."),
    ("since_step_seconds", "since_step_s", "Time since the last gradient step."),
    ("waited_seconds_total", "waited_seconds", "Time that training waited for others."),
    ("achieved_comm_rate", "achieved_comm_rate", "Exchanges asked for per gradient step, twice."),
    ("exchanges_failed_total", "exchanges_failed", "Exchanges stopped before their end."),
    ("exchange_seconds_total", "exchange_seconds", "Time with an exchange under way."),
    ("edge_distance", "edge_distance", "Half the mean squared distance to the last partners."),
    ("checkpoints_total", "checkpoints", "Checkpoints written."),
    ("checkpoints_failed_total", "checkpoints_failed", "Checkpoints that could not be written."),
)

# Of one metric: the labels, if any, but for the rank, and the value.
_Samples = Iterable[tuple[dict[str, str], float | None]]


def metrics_text(status: WorkerStatus) -> bytes:
    """The page.

    Example:
        >>> status = WorkerStatus(
        ...     3, 0, 4, "7f", "gossip", "ring", 1.0, "node", 1, "training", 9, 72, 80
        ... )
        >>> for line in metrics_text(status).decode().splitlines()[3:6]:
        ...     print(line)
        # HELP gossipdp_gradient_steps_total Gradient steps over all lives of this rank.
        # TYPE gossipdp_gradient_steps_total counter
        gossipdp_gradient_steps_total{rank="3"} 9.0
    """
    return generate_latest(_Collector(status))


class _Collector:
    """What ``generate_latest`` asks; a registry would hold on to it."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        for name, text, samples in _metrics(self._status):
            known = [(labels, value) for labels, value in samples if value is not None]
            if not known:
                continue
            kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            labels = ["rank", *known[0][0]]
            metric = kind(f"gossipdp_{name.removesuffix('_total')}", text, labels=labels)
            for values, value in known:
                metric.add_metric([str(self._status.rank), *values.values()], value)
            yield metric


def _metrics(status: WorkerStatus) -> Iterator[tuple[str, str, _Samples]]:
    """Name, help and samples."""
    about = {name: getattr(status, name) for name in ("run_id", "method", "graph")}
    about |= {"comm_rate": f"{status.comm_rate:g}", "host": status.host, "state": status.state}
    yield "info", "What this worker runs; always 1.", [(about, 1)]
    for name, attribute, text in _PLAIN:
        yield name, text, [({}, getattr(status, attribute))]
    roles = {"initiated": status.exchanges_initiated, "answered": status.exchanges_answered}
    yield "exchanges_total", "Completed exchanges, by who asked for them.", _by("role", roles)
    for direction in ("sent", "received"):
        text = f"Bytes {direction}, by sockets and by shared memory."
        counts = {
            "network": getattr(status, f"bytes_{direction}"),
            "shared_memory": getattr(status, f"shared_bytes_{direction}"),
        }
        yield f"{direction}_bytes_total", text, _by("by", counts)
    neighbours = status.neighbours
    exchanged = {e.rank: e.exchanges for e in neighbours if e.is_neighbour or e.exchanges}
    text = "Completed exchanges with a neighbour."
    yield "neighbour_exchanges_total", text, _by("neighbour", exchanged)
    durations = {each.rank: each.exchange_seconds for each in neighbours}
    text = "Mean duration of the last exchanges with a neighbour."
    yield "neighbour_exchange_seconds", text, _by("neighbour", durations)
    links = {each.rank: each.is_linked for each in neighbours if each.is_neighbour}
    text = "Whether there is a link to a neighbour of the graph."
    yield "link_up", text, _by("neighbour", links)
    states = [member.state for member in status.members]
    numbers = {state: states.count(state) for state in get_args(MemberState)}
    yield "members", "Workers known here, by state.", _by("state", numbers)
    silent = sum(member.is_silent for member in status.members)
    text = "Linked workers that have been silent for the time-out."
    yield "members_silent", text, [({}, silent)]
    yield "logged", "What the script logged last.", _by("name", status.logged)


def _by(label: str, values: Any) -> _Samples:
    return [({label: str(key)}, value) for key, value in values.items()]
