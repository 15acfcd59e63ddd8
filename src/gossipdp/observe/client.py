"""Asks workers for their status, many at a time, without waiting for those that do not answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

from gossipdp.launcher.environment import read_addresses, show_address
from gossipdp.observe.status import MAX_STATUS_BYTES, STATUS_PATH, WorkerStatus, decode_status

ANSWER_WITHIN_S = 2.0
MAX_AT_ONCE = 32
MAX_HEAD_BYTES = 8 << 10


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


Answer = WorkerStatus | Exception


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
