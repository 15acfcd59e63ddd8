"""Asks workers for their status, many at a time, without waiting for those that do not answer."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from gossipdp.observe.status import MAX_STATUS_BYTES, STATUS_PATH, WorkerStatus, decode_status
from gossipdp.runtime.environment import read_addresses

ANSWER_WITHIN_S = 2.0
MAX_AT_ONCE = 32


def ask(address: str, timeout_s: float = ANSWER_WITHIN_S) -> WorkerStatus:
    """The status of the worker at HOST:PORT.

    Raises:
        OSError: nobody answers there, or not within ``timeout_s`` of silence.
        ValueError: ``address`` is none, or what answers is no worker.
    """
    ((host, port),) = read_addresses("the address", address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", STATUS_PATH)
        response = connection.getresponse()
        body = response.read(MAX_STATUS_BYTES + 1)
    except http.client.HTTPException as error:
        raise ValueError(f"what answers at {address} is no worker's status port: {error}") from None
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise ValueError(f"{address} answers {response.status} {response.reason}")
    if len(body) > MAX_STATUS_BYTES:
        raise ValueError(f"{address} answers more than {MAX_STATUS_BYTES} bytes")
    return decode_status(body)


Answer = WorkerStatus | Exception


class StatusPoll:
    """Asks a number of addresses again and again.

    One that does not answer in time delays nobody: its answer, or that there is none, comes with a
    later call.

    Args:
        ask: for tests.
    """

    def __init__(self, ask: Callable[[str], WorkerStatus] = ask) -> None:
        self._ask = ask
        self._pool = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="gossipdp-ask")
        self._open: dict[str, Future[WorkerStatus]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def answers(self, addresses: Iterable[str], wait_s: float) -> dict[str, Answer]:
        """Ask those that are not being asked already; what has come within ``wait_s``."""
        for address in addresses:
            if address not in self._open:
                self._open[address] = self._pool.submit(self._ask, address)
        wait(self._open.values(), wait_s)
        answers: dict[str, Answer] = {}
        for address, future in list(self._open.items()):
            if future.done():
                del self._open[address]
                try:
                    answers[address] = future.result()
                except (OSError, ValueError) as error:
                    answers[address] = error
        return answers
