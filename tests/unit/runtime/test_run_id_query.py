import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.runtime.handshake import Handshake
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.run_id_query import ask_run_id
from gossipdp.runtime.tls import Tls


def answer_as_a_worker(connection: socket.socket) -> None:
    identity = Identity(2, 0, 5, "the run", "model", "a2cid2", "ring", "1", "float32")
    handshake = Handshake(identity, b"secret", dialler=False)
    while handshake.num_wanted:
        handshake.receive(connection.recv(handshake.num_wanted))
    connection.sendall(handshake.take_output())


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[tuple[str, int]]:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[:2]
        thread.join()


def nobody() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[:2]


def test_a_worker_says_to_which_run_it_belongs() -> None:
    with listening(answer_as_a_worker) as address:
        assert ask_run_id([nobody(), address]) == "the run"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda connection: connection.sendall(b"HTTP/1.1 400 Bad\r\n"), "connection starts with"),
        (lambda connection: connection.recv(10), "closed the connection|reset by peer"),
    ],
)
def test_who_does_not_speak_our_language_is_no_worker(answer: Callable, message: str) -> None:
    with listening(answer) as address, pytest.raises(RendezvousError, match=message):
        ask_run_id([address])


def test_a_silent_one_is_not_waited_for() -> None:
    over = threading.Event()
    with listening(lambda connection: over.wait(20)) as address:
        with pytest.raises(RendezvousError, match="timed out"):
            ask_run_id([address], timeout_s=0.05)
        over.set()


def test_another_reason_to_refuse_is_passed_on() -> None:
    def refuse(connection: socket.socket) -> None:
        identity = Identity(2, 0, 5, "the run", "model", "a2cid2", "ring", "1", "float32")
        handshake = Handshake(identity, b"secret", dialler=False)
        handshake.receive(b"\x16\x03"[: handshake.num_wanted].ljust(handshake.num_wanted, b"\0"))
        connection.sendall(handshake.take_output())
        connection.recv(1000)

    with listening(refuse) as address, pytest.raises(RefusedError, match="TLS is off at the other"):
        ask_run_id([address])


def test_no_connection_is_left_where_tls_comes_to_nothing(
    authority: Any, open_descriptors: Callable[[], set[tuple[str, str]]]
) -> None:
    tls = Tls(authority.issue())
    before = open_descriptors()
    with (
        listening(lambda connection: connection.sendall(b"no TLS")) as address,
        pytest.raises(RendezvousError) as raised,
    ):
        ask_run_id([address], tls)
    assert open_descriptors() == before, raised  # which would keep a socket alive
