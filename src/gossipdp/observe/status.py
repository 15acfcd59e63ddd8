"""A worker's account of itself and of the others: as JSON, and as metrics for Prometheus.

A worker learns by gossip whether each other one lives, how far it is, and where it shows its own
status. So one answer to ``GET /status`` names the whole job; for more about a worker, ask it.
Numbers that are not known yet are null: JSON has no NaN. Readers ignore fields that they do not
know, so some may be added.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

import msgspec

from gossipdp.gossip.counters import Counters, Metric, decode, metrics_of
from gossipdp.launcher.environment import read_addresses
from gossipdp.logs import printable
from gossipdp.rules import shown_rate

STATUS_PATH = "/status"
METRICS_PATH = "/metrics"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Far more than the status of a worker in a job of a thousand.
MAX_STATUS_BYTES = 4 << 20
IDLE_AFTER_S = 5.0
ANSWER_WITHIN_S = 2.0
MAX_AT_ONCE = 32

MemberState: TypeAlias = Literal["joining", "training", "done", "left", "lost"]


class MemberStatus(msgspec.Struct, frozen=True):
    """One worker as another knows it.

    Attributes:
        incarnation: rises with a new process, and when the same one answers after it was lost.
        state: ``done``: it trains no more and waits for the others; ``left``: it went after the
            final average; ``lost``: no worker hears it, and the others go on without it.
        is_silent: its link here is open, and nothing has come for the time-out.
        gradient_steps, samples: over all its lives, as last heard.
        status_address: HOST:PORT where it shows its own status; empty if it shows none.
        since_step_s: since its steps were last heard to grow; heartbeats do not count.
        restarts: processes of this rank before this one.
        is_neighbour: the two may exchange, in the graph of the live workers. Other links serve the
            start, and questions about third workers.
        heard_ago_s: since its link here last brought something; null without a link.
        exchange_seconds: mean duration of the last exchanges with it.
    """

    rank: int
    incarnation: int
    state: MemberState
    is_silent: bool = False
    gradient_steps: int = 0
    samples: int = 0
    status_address: str = ""
    since_step_s: float | None = None
    restarts: int = 0
    is_neighbour: bool = False
    heard_ago_s: float | None = None
    exchange_seconds: float | None = None


class WorkerStatus(Counters, frozen=True):
    """One worker's answer, with its counters.

    Attributes:
        state: ``training``, or ``averaging`` from ``consolidate()`` on.
        members: all workers that this one knows of, itself included, by rank.
    """

    incarnation: Annotated[
        int, Metric("Rises when the rank is restarted, or was lost and answers again.", "gauge")
    ]
    run_id: str
    method: str
    graph: str
    comm_rate: float | str
    host: str
    process_id: int
    state: Literal["training", "averaging"]
    run_samples: Annotated[int, Metric("Samples of all workers, as far as this one knows.")]
    budget_samples: Annotated[
        int | None, Metric("Samples that all workers are to train on.", "gauge")
    ] = None
    since_step_s: Annotated[float, Metric("Time since the last gradient step.", "gauge")] = math.nan
    restarts: Annotated[int, Metric("Processes of this rank before this one.", "gauge")] = 0
    logged: Annotated[
        dict[str, float | None], Metric("Numbers that the script logged last.", "gauge", "name")
    ] = msgspec.field(default_factory=dict)
    members: tuple[MemberStatus, ...] = ()


# Built by the importing thread: msgspec (0.22) crashes if two threads need a struct's types first.
msgspec.json.Decoder(WorkerStatus)


def decode_status(data: bytes) -> WorkerStatus:
    """Return the status in ``data``; raise ValueError if there is none."""
    try:
        return decode(data, WorkerStatus)
    except ValueError as error:
        raise ValueError(f"{len(data)} bytes are no worker's status: {error}") from None


def ask(address: str, timeout_s: float = ANSWER_WITHIN_S) -> WorkerStatus:
    """Return the status of the worker at HOST:PORT.

    Raises:
        OSError: nobody answers there, or the answer is not whole in time, though it trickles in.
        ValueError: ``address`` is invalid, or the answer is not a worker's.
    """
    (there,) = read_addresses("the address", address)
    deadline_s, answer = time.monotonic() + timeout_s, bytearray()
    with socket.create_connection(there, timeout_s) as connection:
        connection.sendall(f"GET {STATUS_PATH} HTTP/1.0\r\n\r\n".encode())
        while True:
            left_s = deadline_s - time.monotonic()  # the socket's time-out restarts with each byte
            if left_s <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left_s)
            more = connection.recv(1 << 16)
            if not more:
                break
            answer += more
            if len(answer) > MAX_STATUS_BYTES:
                raise ValueError(f"{address} answers more than {MAX_STATUS_BYTES} bytes")
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    version, _, outcome = printable(head.partition(b"\r\n")[0].decode("latin-1")).partition(" ")
    if not version.startswith("HTTP/"):
        raise ValueError(f"{address} is no worker's status port: it answers {version[:80]!r}")
    if outcome[:4] != "200 ":
        raise ValueError(f"{address} answers {outcome[:80]}")
    return decode_status(body)


Answer: TypeAlias = WorkerStatus | Exception


class StatusPoll:
    """A pool of threads that asks a number of addresses again and again.

    An address that does not answer in time delays no other: its answer or its failure comes with a
    later call. ``ask`` is for tests.
    """

    def __init__(self, ask: Callable[[str], WorkerStatus] = ask) -> None:
        self._ask = ask
        self._pool = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="gossipdp-ask")
        self._open: dict[str, Future[WorkerStatus]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def answers(self, addresses: Iterable[str], wait_s: float) -> dict[str, Answer]:
        """Ask those that are not being asked yet; return what came within ``wait_s``."""
        for address in addresses:
            if address not in self._open:
                self._open[address] = self._pool.submit(self._ask, address)
        answers: dict[str, Answer] = {}
        done = wait(self._open.values(), wait_s).done
        for address in [each for each, future in self._open.items() if future in done]:
            try:
                answers[address] = self._open.pop(address).result()
            except (OSError, ValueError) as error:
                answers[address] = error
        return answers


# For Prometheus.

ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

# Each value with its labels, except for the rank.
_Samples: TypeAlias = list[tuple[dict[str, object], float | None]]


def metrics_text(status: WorkerStatus) -> bytes:
    """Return the status in Prometheus's text format, the answer to ``GET /metrics``.

    A metric has the name of its field, with ``gossipdp_`` before it and, if it only grows,
    ``_total`` after it. Every sample has the label ``rank``. A value that is not known yet is left
    out.
    """
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
    metric = Metric("Mean duration of the last exchanges with a neighbour.", "gauge")
    samples = [({"neighbour": each.rank}, each.exchange_seconds) for each in members]
    yield "neighbour_exchange_seconds", metric, samples
    metric = Metric("1 if there is a link to a neighbour of the graph, else 0.", "gauge")
    near = [each for each in members if each.is_neighbour]
    samples = [({"neighbour": each.rank}, each.heard_ago_s is not None) for each in near]
    yield "link_up", metric, samples
    states = [member.state for member in members]
    samples = [({"state": state}, states.count(state)) for state in get_args(MemberState)]
    yield "members", Metric("Workers known here, by state.", "gauge"), samples
    metric = Metric("Linked workers that have been silent for the time-out.", "gauge")
    yield "members_silent", metric, [({}, sum(member.is_silent for member in members))]
