"""Finding the networks of a run, by asking its workers."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher import joining
from gossipdp.launcher.joining import JoinInfo, ask_join_infos, ask_run_id
from gossipdp.links.handshake import MAGIC, VERSION, Handshake, Identity
from gossipdp.links.tls import Tls


def answer_as_a_worker(connection: socket.socket) -> None:
    identity = Identity(2, 0, 5, "the run", "model", "a2cid2", "ring", "1", "float32")
    handshake = Handshake(identity, b"a secret of this test", dialler=False)
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


def test_the_networks_to_join_are_told_by_their_run_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (("10.0.0.1", port) for port in (1, 2, 3))
    run_ids = {first: "r-shard-1-of-2", second: "r-shard-0-of-2", third: "r-shard-1-of-2"}
    monkeypatch.setattr(joining, "_ask", lambda address, *_: run_ids[address])
    assert ask_join_infos([first, second, third], 2) == [
        JoinInfo("r-shard-0-of-2", join=(second,)),
        JoinInfo("r-shard-1-of-2", join=(first, third)),
    ]
    # Where workers are single processes, any that answers says it for all.
    monkeypatch.setattr(joining, "_ask", lambda *_: "r")
    assert ask_join_infos([first, second], 1) == [JoinInfo("r", join=(first, second))]


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


def test_one_that_answers_by_drops_is_not_waited_for() -> None:
    def drip(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(MAGIC + bytes(VERSION) + (4000).to_bytes(2, "little"))
            while True:  # until it is closed at the other end
                connection.sendall(b"\0")
                time.sleep(0.02)

    with listening(drip) as address, pytest.raises(RendezvousError):
        ask_run_id([address], timeout_s=0.2)


def test_another_reason_to_refuse_is_passed_on() -> None:
    def refuse(connection: socket.socket) -> None:
        identity = Identity(2, 0, 5, "the run", "model", "a2cid2", "ring", "1", "float32")
        handshake = Handshake(identity, b"a secret of this test", dialler=False)
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
