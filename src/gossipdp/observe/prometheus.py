"""A worker's status in Prometheus's text format, the answer to ``GET /metrics``.

A metric has the name of its field, with ``gossipdp_`` before it and, if it only grows, ``_total``
after it. Every sample has the label ``rank``. A value that is not known yet is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias, get_args

from gossipdp.gossip.counters import Metric, metrics_of
from gossipdp.observe.status import MemberState, WorkerStatus
from gossipdp.rules import shown_rate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

# Each value with its labels, except for the rank.
_Samples: TypeAlias = list[tuple[dict[str, object], float | None]]


def metrics_text(status: WorkerStatus) -> bytes:
    """Return the page."""
    lines = []
    for field, metric, samples in _families(status):
        stem = f"{field.removesuffix('_s')}_seconds" if field.endswith("_s") else field
        name = f"gossipdp_{stem}" + ("_total" if metric.kind == "counter" else "")
        known = [each for each in samples if each[1] is not None and math.isfinite(each[1])]
        if known:
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for labels, value in known:
            pairs = {"rank": status.rank, **labels}.items()
            shown = ",".join(f'{key}="{str(each).translate(ESCAPED)}"' for key, each in pairs)
            lines.append(f"{name}{{{shown}}} {float(value or 0.0)}")
    return ("\n".join(lines) + "\n").encode()


def _families(status: WorkerStatus) -> Iterator[tuple[str, Metric, _Samples]]:
    about = {name: getattr(status, name) for name in ("run_id", "method", "graph", "host", "state")}
    about["comm_rate"] = shown_rate(status.comm_rate)
    yield "info", Metric("The run of this worker; always 1.", "gauge"), [(about, 1)]
    for name, metric in metrics_of(WorkerStatus).items():
        value = getattr(status, name)
        samples: list[tuple[dict[str, object], Any]] = [({}, value)]
        if metric.label:
            samples = [({metric.label: key}, each) for key, each in value.items()]
        if metric.kind == "word":
            metric = Metric(metric.help, "gauge")
            samples = [({**labels, "word": word}, 1) for labels, word in samples]
        yield name, metric, samples
    members = status.members
    yield (
        "neighbour_exchange_seconds",
        Metric("Mean duration of the last exchanges with a neighbour.", "gauge"),
        [({"neighbour": each.rank}, each.exchange_seconds) for each in members],
    )
    yield (
        "link_up",
        Metric("1 if there is a link to a neighbour of the graph, else 0.", "gauge"),
        [
            ({"neighbour": each.rank}, each.heard_ago_s is not None)
            for each in members
            if each.is_neighbour
        ],
    )
    states = [member.state for member in members]
    yield (
        "members",
        Metric("Workers known here, by state.", "gauge"),
        [({"state": state}, states.count(state)) for state in get_args(MemberState)],
    )
    yield (
        "members_silent",
        Metric("Linked workers that have been silent for the time-out.", "gauge"),
        [({}, sum(member.is_silent for member in members))],
    )
