"""A worker's status in Prometheus's text format, the answer to ``GET /metrics``.

Names follow its conventions: base units, ``_total`` for what only grows. Every sample has the label
``rank``; what is not known yet is left out.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from gossipdp.observe.status import MemberState, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Labels = dict[str, str | int]
_Sample = tuple[_Labels, float | None]


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
        gossipdp_gradient_steps_total{rank="3"} 9
    """
    lines: list[str] = []
    for name, kind, text, samples in _metrics(status):
        known = [(labels, value) for labels, value in samples if value is not None]
        if not known:
            continue
        lines.append(f"# HELP gossipdp_{name} {text}")
        lines.append(f"# TYPE gossipdp_{name} {kind}")
        for labels, value in known:
            pairs = {"rank": status.rank, **labels}
            shown = ",".join(f'{key}="{_escaped(str(each))}"' for key, each in pairs.items())
            lines.append(f"gossipdp_{name}{{{shown}}} {value!r}")
    return ("\n".join(lines) + "\n").encode()


def _metrics(status: WorkerStatus) -> Iterable[tuple[str, str, str, list[_Sample]]]:
    """Name, type, help and samples of each metric."""
    about: _Labels = {
        "run_id": status.run_id,
        "method": status.method,
        "graph": status.graph,
        "comm_rate": f"{status.comm_rate:g}",
        "host": status.host,
        "state": status.state,
    }
    yield "info", "gauge", "What this worker runs; always 1.", [(about, 1)]
    for name, kind, text, value in (
        (
            "gradient_steps_total",
            "counter",
            "Gradient steps over all lives of this rank.",
            status.gradient_steps,
        ),
        ("samples_total", "counter", "Samples over all lives of this rank.", status.samples),
        (
            "run_samples_total",
            "counter",
            "Samples of all workers, as far as this one knows.",
            status.run_samples,
        ),
        ("budget_samples", "gauge", "Samples all are to train on.", status.budget_samples),
        ("incarnation", "gauge", "Lives of this rank before this one.", status.incarnation),
        ("step_seconds", "gauge", "Running median of a step's duration.", status.step_seconds),
        ("since_step_seconds", "gauge", "Since the last gradient step.", status.since_step_s),
        (
            "waited_seconds_total",
            "counter",
            "Time that training waited for others.",
            status.waited_seconds,
        ),
        (
            "achieved_comm_rate",
            "gauge",
            "Exchanges per gradient step, asked for by this worker, twice.",
            status.achieved_comm_rate,
        ),
        (
            "exchanges_failed_total",
            "counter",
            "Exchanges that were stopped before their end.",
            status.exchanges_failed,
        ),
        (
            "exchange_seconds_total",
            "counter",
            "Time with an exchange under way.",
            status.exchange_seconds,
        ),
        (
            "edge_distance",
            "gauge",
            "Half the mean squared distance to the partner, last exchanges.",
            status.edge_distance,
        ),
        ("checkpoints_total", "counter", "Checkpoints written.", status.checkpoints),
        (
            "checkpoints_failed_total",
            "counter",
            "Checkpoints that could not be written.",
            status.checkpoints_failed,
        ),
    ):
        yield name, kind, text, [({}, value)]
    yield from _traffic(status)
    yield from _others(status)
    yield (
        "logged",
        "gauge",
        "What the script logged last.",
        [({"name": name}, value) for name, value in status.logged.items()],
    )


def _traffic(status: WorkerStatus) -> Iterable[tuple[str, str, str, list[_Sample]]]:
    yield (
        "exchanges_total",
        "counter",
        "Completed exchanges, by who asked for them.",
        [
            ({"role": "initiated"}, status.exchanges_initiated),
            ({"role": "answered"}, status.exchanges_answered),
        ],
    )
    for direction, network, shared in (
        ("sent", status.bytes_sent, status.shared_bytes_sent),
        ("received", status.bytes_received, status.shared_bytes_received),
    ):
        yield (
            f"{direction}_bytes_total",
            "counter",
            f"Bytes {direction}, by sockets and by shared memory.",
            [({"by": "network"}, network), ({"by": "shared_memory"}, shared)],
        )


def _others(status: WorkerStatus) -> Iterable[tuple[str, str, str, list[_Sample]]]:
    yield (
        "neighbour_exchanges_total",
        "counter",
        "Completed exchanges with a neighbour.",
        [
            ({"neighbour": each.rank}, each.exchanges)
            for each in status.neighbours
            if each.is_neighbour or each.exchanges
        ],
    )
    yield (
        "neighbour_exchange_seconds",
        "gauge",
        "Mean duration of the last exchanges with a neighbour.",
        [({"neighbour": each.rank}, each.exchange_seconds) for each in status.neighbours],
    )
    yield (
        "link_up",
        "gauge",
        "Whether there is a link to a neighbour of the graph.",
        [
            ({"neighbour": each.rank}, int(each.is_linked))
            for each in status.neighbours
            if each.is_neighbour
        ],
    )
    yield (
        "members",
        "gauge",
        "Workers known here, by state.",
        [
            ({"state": state}, sum(member.state == state for member in status.members))
            for state in get_args(MemberState)
        ],
    )
    yield (
        "members_silent",
        "gauge",
        "Linked workers that have been silent for the time-out.",
        [({}, sum(member.is_silent for member in status.members))],
    )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
