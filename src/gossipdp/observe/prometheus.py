"""A worker's status in Prometheus's text format, the answer to ``GET /metrics``.

Names follow its conventions: base units, ``_total`` for what only grows. Every sample has the label
``rank``; what is not known yet is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    (
        "achieved_comm_rate",
        "achieved_comm_rate",
        "Exchanges per gradient step: twice those that this worker asked for.",
    ),
    (
        "exchanges_failed_total",
        "exchanges_failed",
        "Exchanges that were stopped before their end.",
    ),
    ("exchange_seconds_total", "exchange_seconds", "Time with an exchange under way."),
    (
        "edge_distance",
        "edge_distance",
        "Half the mean squared distance to the partner, last exchanges.",
    ),
    ("checkpoints_total", "checkpoints", "Checkpoints written."),
    ("checkpoints_failed_total", "checkpoints_failed", "Checkpoints that could not be written."),
)


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
        status = self._status
        about = {
            "run_id": status.run_id,
            "method": status.method,
            "graph": status.graph,
            "comm_rate": f"{status.comm_rate:g}",
            "host": status.host,
            "state": status.state,
        }
        yield from self._family("info", "What this worker runs; always 1.", [(about, 1)])
        for name, attribute, text in _PLAIN:
            yield from self._family(name, text, [({}, getattr(status, attribute))])
        yield from self._traffic()
        yield from self._others()
        yield from self._family(
            "logged",
            "What the script logged last.",
            [({"name": name}, value) for name, value in status.logged.items()],
        )

    def _traffic(self) -> Iterator[Metric]:
        status = self._status
        yield from self._family(
            "exchanges_total",
            "Completed exchanges, by who asked for them.",
            [
                ({"role": "initiated"}, status.exchanges_initiated),
                ({"role": "answered"}, status.exchanges_answered),
            ],
        )
        for direction in ("sent", "received"):
            yield from self._family(
                f"{direction}_bytes_total",
                f"Bytes {direction}, by sockets and by shared memory.",
                [
                    ({"by": "network"}, getattr(status, f"bytes_{direction}")),
                    ({"by": "shared_memory"}, getattr(status, f"shared_bytes_{direction}")),
                ],
            )

    def _others(self) -> Iterator[Metric]:
        neighbours, members = self._status.neighbours, self._status.members
        yield from self._family(
            "neighbour_exchanges_total",
            "Completed exchanges with a neighbour.",
            [
                ({"neighbour": str(each.rank)}, each.exchanges)
                for each in neighbours
                if each.is_neighbour or each.exchanges
            ],
        )
        yield from self._family(
            "neighbour_exchange_seconds",
            "Mean duration of the last exchanges with a neighbour.",
            [({"neighbour": str(each.rank)}, each.exchange_seconds) for each in neighbours],
        )
        yield from self._family(
            "link_up",
            "Whether there is a link to a neighbour of the graph.",
            [
                ({"neighbour": str(each.rank)}, each.is_linked)
                for each in neighbours
                if each.is_neighbour
            ],
        )
        yield from self._family(
            "members",
            "Workers known here, by state.",
            [
                ({"state": state}, sum(member.state == state for member in members))
                for state in get_args(MemberState)
            ],
        )
        silent = sum(member.is_silent for member in members)
        yield from self._family(
            "members_silent",
            "Linked workers that have been silent for the time-out.",
            [({}, silent)],
        )

    def _family(
        self, name: str, text: str, samples: list[tuple[dict[str, str], float | None]]
    ) -> Iterator[Metric]:
        """The metric, without the samples that are not known; nothing where none is."""
        known = [(labels, value) for labels, value in samples if value is not None]
        if not known:
            return
        kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        labels = ["rank", *known[0][0]]
        metric = kind(f"gossipdp_{name.removesuffix('_total')}", text, labels=labels)
        for values, value in known:
            metric.add_metric([str(self._status.rank), *values.values()], value)
        yield metric
