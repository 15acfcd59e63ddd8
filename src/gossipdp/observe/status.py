"""What a worker says of itself and of the others: the answer to ``GET /status``, as JSON.

A worker knows from gossip whether every other lives, how far it is, and where it shows its own
status. So one answer names the whole job; for more about a worker, ask that worker. Numbers not
known yet are null. Readers ignore fields that they do not know, so that some may be added.

:func:`ask` asks one worker; :class:`StatusPoll` asks many, without waiting for those that do not
answer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal, Self, TypeAlias

import msgspec

from gossipdp.launcher.environment import read_addresses, show_address

STATUS_PATH = "/status"
METRICS_PATH = "/metrics"
# Far more than a job of a thousand workers says.
MAX_STATUS_BYTES = 4 << 20
IDLE_AFTER_S = 5.0
MAX_IDLE = 16
ANSWER_WITHIN_S = 2.0
MAX_AT_ONCE = 32
MAX_HEAD_BYTES = 8 << 10

MemberState: TypeAlias = Literal["joining", "training", "done", "left", "dead"]


class MemberStatus(msgspec.Struct, frozen=True):
    """One worker as another knows it.

    ``state``: ``done`` trains no more and waits for the others, ``left`` went after the final
    average. ``is_silent``: its link here is open, and nothing came for the time-out. ``samples``
    and ``gradient_steps`` are over all its lives, as last heard; ``since_step_s``: since they were
    heard to grow, however often it beats. ``status_address``: HOST:PORT where it shows its own
    status; empty: nowhere.
    """

    rank: int
    incarnation: int
    state: MemberState
    is_silent: bool = False
    gradient_steps: int = 0
    samples: int = 0
    status_address: str = ""
    since_step_s: float | None = None


def idle_seconds(members: Iterable[MemberStatus]) -> dict[int, float]:
    """By rank, how long those stand still that should train: at most 16, the longest.

    So a worker is seen whose training loop hangs while its gossip thread beats.

    Example:
        >>> idle_seconds([MemberStatus(3, 0, "training", since_step_s=12.34)])
        {3: 12.3}
    """
    training = (each for each in members if each.state == "training" and not each.is_silent)
    ages = {each.rank: each.since_step_s or 0.0 for each in training}
    longest = sorted(ages, key=lambda rank: -ages[rank])[:MAX_IDLE]
    return {rank: round(ages[rank], 1) for rank in longest if ages[rank] > IDLE_AFTER_S}


class NeighbourStatus(msgspec.Struct, frozen=True):
    """A worker that this one may exchange with, is linked with, or has exchanged with.

    ``is_neighbour``: whether it may exchange with it, in the graph over those that live now; other
    links serve the start, and questions about third workers. ``exchanges`` are those completed, of
    this process. ``heard_ago_s``, ``bytes_sent`` and ``bytes_received`` are of the present link:
    null and 0 without one; the bytes count those that went by shared memory.
    ``exchange_seconds``: mean duration of the last exchanges with it.
    """

    rank: int
    exchanges: int = 0
    is_neighbour: bool = False
    is_linked: bool = False
    heard_ago_s: float | None = None
    exchange_seconds: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0


class NoticeStatus(msgspec.Struct, frozen=True):
    """What this worker noticed of ``rank``: see :class:`gossipdp.gossip.published.Notice`."""

    rank: int
    kind: str
    ago_s: float


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker's answer.

    Attributes:
        rank, incarnation, num_workers: who, in which of its lives, of how many at the start.
        run_id, method, graph, comm_rate: of the run; ``graph`` is its name.
        host, process_id: where it runs.
        state: ``training``, or ``averaging`` from ``consolidate()`` on.
        gradient_steps, samples: over all lives of this rank.
        run_samples: of all workers, as far as this one knows.
        budget_samples: what they are to train on together.
        step_seconds: running median of the duration of a gradient step.
        since_step_s: since the last one ended.
        logged: what the script logged last, such as ``loss``.
        achieved_comm_rate, edge_distance, waited_seconds and what counts exchanges, bytes and
            checkpoints: as in ``GossipDataParallel.stats()``.
        members: all workers that this one knows of, itself included, by rank.
        neighbours: by rank.
        notices: the latest, oldest first.
    """

    rank: int
    incarnation: int
    num_workers: int
    run_id: str
    method: str
    graph: str
    comm_rate: float
    host: str
    process_id: int
    state: Literal["training", "averaging"]
    gradient_steps: int
    samples: int
    run_samples: int
    budget_samples: int | None = None
    step_seconds: float | None = None
    since_step_s: float | None = None
    logged: dict[str, float | None] = {}
    achieved_comm_rate: float | None = None
    exchanges_initiated: int = 0
    exchanges_answered: int = 0
    exchanges_failed: int = 0
    exchange_seconds: float = 0.0
    edge_distance: float | None = None
    waited_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    shared_bytes_sent: int = 0
    shared_bytes_received: int = 0
    checkpoints: int = 0
    checkpoints_failed: int = 0
    members: tuple[MemberStatus, ...] = ()
    neighbours: tuple[NeighbourStatus, ...] = ()
    notices: tuple[NoticeStatus, ...] = ()

    @property
    def exchanges(self) -> int:
        """Completed exchanges, initiated or answered."""
        return self.exchanges_initiated + self.exchanges_answered


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(WorkerStatus)


def encode_status(status: WorkerStatus) -> bytes:
    """The JSON text; NaN and infinity, which JSON has not, become null."""
    return _encoder.encode(status)


def decode_status(data: bytes) -> WorkerStatus:
    """The status in ``data``.

    Raises:
        ValueError: it is none.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{len(data)} bytes are no worker's status: {error}") from None


def ask(
    address: str, timeout_s: float = ANSWER_WITHIN_S, clock: Callable[[], float] = time.monotonic
) -> WorkerStatus:
    """The status of the worker at HOST:PORT.

    Raises:
        OSError: nobody answers there, or not all within ``timeout_s``, however it trickles in.
        ValueError: ``address`` is none, or what answers is no worker.
    """
    ((host, port),) = read_addresses("the address", address)
    deadline_s = clock() + timeout_s
    request = f"GET {STATUS_PATH} HTTP/1.0\r\nHost: {show_address(host, port)}\r\n\r\n"
    answer = bytearray()
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(request.encode())
        while len(answer) <= MAX_STATUS_BYTES + MAX_HEAD_BYTES:
            left_s = deadline_s - clock()
            if left_s <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left_s)
            received = connection.recv(1 << 16)
            if not received:
                break
            answer += received
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    version, _, told = head.partition(b"\r\n")[0].partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"what answers at {address} is no worker's status port")
    if not told.startswith(b"200"):
        raise ValueError(f"{address} answers {told[:80].decode('latin-1')}")
    if len(body) > MAX_STATUS_BYTES:
        raise ValueError(f"{address} answers more than {MAX_STATUS_BYTES} bytes")
    return decode_status(body)


Answer: TypeAlias = WorkerStatus | Exception


class StatusPoll:
    """Asks a number of addresses again and again.

    An address that does not answer in time delays no other: its answer, or that there is none,
    comes with a later call. ``ask``: for tests.
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
        """Ask those that are not being asked already; what has come within ``wait_s``."""
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
