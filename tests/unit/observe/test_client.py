"""Asking workers, those included that do not answer or are none."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from gossipdp.launcher.environment import show_address
from gossipdp.observe import client
from gossipdp.observe.client import StatusPoll, ask
from gossipdp.observe.server import Page, StatusServer
from gossipdp.observe.status import WorkerStatus, encode_status

STATUS = WorkerStatus(0, 0, 1, "7f", "none", "ring", 1.0, "node", 1, "training", 9, 72, 72)
Show = Callable[[bytes], str]


@pytest.fixture
def show() -> Iterator[Show]:
    servers: list[StatusServer] = []

    def start(body: bytes) -> str:
        server = StatusServer("127.0.0.1", 0)
        servers.append(server)
        server.serve({"/status": Page("application/json", lambda: body)})
        return show_address(*server.address)

    yield start
    for server in servers:
        server.close()


def test_a_worker_is_asked(show: Show) -> None:
    assert ask(show(encode_status(STATUS))) == STATUS


def test_who_answers_something_else_is_no_worker(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no worker's status"):
        ask(show(b"{}"))
    monkeypatch.setattr(client, "STATUS_PATH", "/elsewhere")
    with pytest.raises(ValueError, match="answers 404"):
        ask(show(b"{}"))
    monkeypatch.undo()
    monkeypatch.setattr(client, "MAX_STATUS_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        ask(show(b" " * 101))


def test_what_is_no_http_and_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = show_address(*listener.getsockname())

        def shout() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(4096)
                accepted.sendall(b"hello there\r\n\r\n")

        thread = threading.Thread(target=shout)
        thread.start()
        with pytest.raises(ValueError, match="no worker's status port"):
            ask(address)
        thread.join()
        with pytest.raises(TimeoutError):
            ask(address, timeout_s=0.05)
    with pytest.raises(ConnectionRefusedError):
        ask(address)


def test_an_answer_that_trickles_in_has_one_deadline_in_all() -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.4
        return now_s

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            accepted, _ = listener.accept()
            with accepted, contextlib.suppress(OSError):
                while True:
                    accepted.sendall(b"H")

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(TimeoutError):
            client.ask(show_address(*listener.getsockname()), timeout_s=2.0, clock=clock)
        thread.join()
    assert now_s < 4


def test_one_that_hangs_delays_no_other() -> None:
    release = threading.Event()
    asked: list[str] = []

    def slow_ask(address: str) -> WorkerStatus:
        asked.append(address)
        if address == "slow:1":
            release.wait(30)
        if address == "gone:1":
            raise ConnectionRefusedError(111, "refused")
        return STATUS

    with StatusPoll(slow_ask) as poll:
        answers = poll.answers(["quick:1", "slow:1", "gone:1"], 0.2)
        assert answers["quick:1"] is STATUS
        assert isinstance(answers["gone:1"], ConnectionRefusedError)
        assert "slow:1" not in answers
        # It is not asked a second time while the first question is open.
        assert set(poll.answers(["quick:1", "slow:1"], 0.2)) == {"quick:1"}
        release.set()
        assert poll.answers([], 10)["slow:1"] is STATUS
    assert asked.count("slow:1") == 1
