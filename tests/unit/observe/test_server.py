import errno
import http.client
import itertools
import os
import re
import select
import socket
from contextlib import closing

import msgspec
import pytest
from links import in_child
from waiting import LONGEST_S, wait_until

from gossipdp.launcher.environment import show_address
from gossipdp.links.sockets import Listener
from gossipdp.observe import server as status_server
from gossipdp.observe.server import JobView, Page, StatusServer, pages_of
from gossipdp.observe.status import MemberStatus, WorkerStatus


def get(
    server: StatusServer, path: str = "/status", method: str = "GET"
) -> tuple[http.client.HTTPResponse, bytes]:
    with closing(http.client.HTTPConnection(*server.address, timeout=LONGEST_S)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        return response, response.read()


def say(server: StatusServer, data: bytes) -> bytes:
    """Return all that comes back, to the end of the connection."""
    with socket.create_connection(server.address, timeout=LONGEST_S) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as answer:
            return answer.read()


def test_a_page_is_shown_with_its_type_and_others_are_named(serve):
    server = serve(lambda: b'{"rank":1}')
    for method, shown in (("GET", b'{"rank":1}'), ("HEAD", b"")):
        response, body = get(server, "/status?any=thing", method)
        assert (response.status, body) == (200, shown)
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["Content-Length"] == "10"
    response, body = get(server, "/secret")
    assert (response.status, body) == (404, b"there are /status\n")
    assert get(server, method="POST")[0].status == 501


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /status HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /status HTTP/1.0\n\n", b"200"),
        (b"GET /status\r\n\r\n", b"200"),
        (b"/status\r\n\r\n", b"400"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", b"404"),
        # A web page whose name was made to lead here says that name.
        (b"GET /status HTTP/1.1\r\nHost: 127.0.0.1:9400\r\n\r\n", b"200"),
        (b"GET /status HTTP/1.1\r\nHost: [::1]:9400\r\n\r\n", b"200"),
        (b"GET /status HTTP/1.1\r\nHost: localhost:9400\r\n\r\n", b"200"),
        (b"GET /status HTTP/1.1\r\nHost: rebound.example\r\n\r\n", b"403"),
        (b"GET /status HTTP/1.1\r\nHost: [half\r\n\r\n", b"403"),
    ],
)
def test_requests_good_and_bad(serve, request_, status):
    assert say(serve(), request_).split()[1] == status
    everywhere = serve(host="0.0.0.0")  # which has names
    assert say(everywhere, request_).split()[1] == (b"200" if status == b"403" else status)


def test_a_request_in_pieces_and_one_cut_off(serve):
    server = serve()
    with socket.create_connection(server.address, timeout=LONGEST_S) as connection:
        for piece in (b"GET /sta", b"tus HTTP/1.1\r\n", b"\r\n"):
            connection.sendall(piece)
        assert connection.recv(4096).startswith(b"HTTP/1.0 200 OK\r\n")
    with socket.create_connection(server.address, timeout=LONGEST_S) as connection:
        connection.sendall(b"GET /status")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096).startswith(b"HTTP/1.0 400 ")


def test_a_request_without_end_is_refused(serve):
    longest = b"GET /status HTTP/1.1\r\nX: ".ljust(8188, b"x") + b"\r\n\r\n"
    assert say(serve(), longest).startswith(b"HTTP/1.0 200 ")
    assert say(serve(), b"x" * 8193).startswith(b"HTTP/1.0 431 ")


def test_who_says_nothing_is_dropped_in_time(serve, monkeypatch):
    monkeypatch.setattr(status_server, "CONNECTION_S", 1.0)
    assert say(serve(), b"GET /status HTTP/1.1\r\n") == b""


def test_of_too_many_the_oldest_goes(serve, monkeypatch):
    monkeypatch.setattr(status_server, "MAX_CONNECTIONS", 3)
    server, gone = serve(), socket.socket()  # as one that its other end has reset
    server._connections[gone] = None
    server._end(1)
    server.close_request(gone)
    silent = [socket.create_connection(server.address, timeout=LONGEST_S) for _ in range(2)]
    assert get(server)[0].status == 200
    assert not select.select(silent, [], [], 0)[0], "three are not too many"
    wait_until(lambda: len(server._connections) == 2, "the one that was answered has gone")
    silent.append(socket.create_connection(server.address, timeout=LONGEST_S))
    assert get(server)[0].status == 200
    assert silent[0].recv(1) == b""
    assert not select.select(silent[1:], [], [], 0)[0]
    for each in silent:
        each.close()


def test_a_page_is_built_at_most_so_often(serve):
    now_s, built = [0.0], itertools.count(1)
    server = serve(lambda: b"%d" % next(built), clock=lambda: now_s[0])
    assert [get(server)[1], get(server)[1]] == [b"1", b"1"]
    now_s[0] = 0.99 * status_server.REBUILD_S
    assert get(server)[1] == b"1"
    now_s[0] = status_server.REBUILD_S
    assert get(server)[1] == b"2"


def test_a_page_that_fails_is_an_answer_and_one_warning(serve, caplog):
    server = serve({}.popitem)  # a KeyError
    assert [get(server)[0].status for _ in range(2)] == [500, 500]
    assert caplog.text.count("cannot show /status") == 1


def account(rank: int, *members: MemberStatus) -> WorkerStatus:
    about = ("7f", "a2cid2", "ring", 1.0, "node", 1, "training", 300)
    return WorkerStatus(0, *about, rank=rank, world_size=3, logged={"loss": rank}, members=members)


def test_a_worker_shows_the_whole_job_by_asking_the_others(serve, monkeypatch):
    monkeypatch.setattr(status_server, "JOB_WAIT_S", LONGEST_S)
    members: list[MemberStatus] = []
    servers = [serve(pages_of(lambda at=at: account(at, *members))) for at in range(2)]
    places = [*(show_address(*each.address) for each in servers), "127.0.0.1:1"]
    members += [MemberStatus(at, 0, "training", status_address=it) for at, it in enumerate(places)]
    job = msgspec.json.decode(get(servers[0], "/job")[1])["job"]
    seen = [(each["state"], each["loss"]) for each in job["workers"]]
    assert seen == [("training", 0), ("training", 1), ("no answer", None)]


def test_the_page_for_a_browser_is_whole_and_takes_no_text_for_markup(serve):
    response, body = get(serve(pages_of(lambda: account(0))), "/")
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert body.endswith(b"</html>\n")
    assert not re.findall(rb"https?:|src=|@import|url\(|HTML\b(?<!DOCTYPE HTML)|\.write", body)


@pytest.mark.parametrize("pause_s", [LONGEST_S, -1.0])
def test_a_worker_that_was_lost_is_not_shown_as_one_that_answers(serve, monkeypatch, pause_s):
    monkeypatch.setattr(status_server, "JOB_PAUSE_S", pause_s)
    monkeypatch.setattr(status_server, "JOB_WAIT_S", LONGEST_S)
    there = serve(pages_of(lambda: account(1)))
    member = MemberStatus(1, 0, "training", status_address=show_address(*there.address))
    own = [account(0, member)]
    view = JobView(lambda: own[0])
    assert b'"state":"training"' in view.build()
    if pause_s > 0:  # it is asked once more
        there.close()
    own[0] = account(0, msgspec.structs.replace(member, state="lost"))
    assert b'"state":"lost"' in view.build()


def test_a_page_that_waits_delays_no_other(serve):
    waits = Page("", lambda: get(server)[1])
    server = serve({"/job": waits, "/status": Page("", lambda: b"mine")})
    assert get(server, "/job")[1] == b"mine"


def test_a_failure_of_the_thread_ends_it_with_a_warning(caplog, monkeypatch):
    def fail(server: StatusServer) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(StatusServer, "service_actions", fail)
    server = StatusServer("127.0.0.1", 0)
    server.serve({})
    assert server._thread is not None
    server._thread.join(LONGEST_S)
    assert "shows nothing any more" in caplog.text
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, timeout=1)
    server.close()


def test_without_a_descriptor_to_accept_with_it_pauses_and_then_goes_on(serve, caplog, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(status_server.time, "sleep", pauses.append)
    server, accept = serve(), Listener.accept

    def fail(listener: Listener) -> object:
        monkeypatch.setattr(Listener, "accept", accept)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Listener, "accept", fail)
    assert get(server)[0].status == 200
    assert pauses == [status_server.PAUSE_S]
    assert "Too many open files" in caplog.text


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_keeps_nothing_of_it(serve):
    server = serve()
    with socket.create_connection(server.address, timeout=LONGEST_S) as connection:
        connection.sendall(b"GET /sta")
        wait_until(lambda: server._connections, "the server holds the connection")
        paths = [f"/proc/self/fd/{each.fileno()}" for each in (server.socket, *server._connections)]
        assert len(paths) == 2
        assert in_child(lambda: any(map(os.path.exists, paths))) == "False"
        connection.sendall(b"tus HTTP/1.1\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.0 200 OK")
