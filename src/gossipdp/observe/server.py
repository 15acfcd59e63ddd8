"""The HTTP server for a worker's pages. Training never waits for it.

One thread accepts connections, and each connection has a thread of its own. Guarantees, whatever
strangers do:

- At most ``MAX_CONNECTIONS`` connections live at once; if there are more, the oldest is ended. Each
  has ``CONNECTION_S`` for its request of at most ``MAX_REQUEST_BYTES``, and as long again to take
  the answer.
- A page is built at most once in its ``rebuild_s``; a request before that gets the last one built.
- The server shows the pages that it was given and reads no files.
- On a loopback address it answers a request only if its Host header, if there is one, holds an
  address or localhost. So no web page can read it through a domain name that leads here.
- An error in a page gives an answer 500 and one warning. An error in the accepting thread ends that
  thread, with a warning. Neither ends the training.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import ipaddress
import logging
import math
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gossipdp.errors import RendezvousError
from gossipdp.launcher.environment import show_address
from gossipdp.links import sockets
from gossipdp.logs import OnceLog
from gossipdp.observe.board import GONE, StatusBoard
from gossipdp.observe.status import (
    METRICS_PATH,
    METRICS_TYPE,
    STATUS_PATH,
    StatusPoll,
    WorkerStatus,
    metrics_text,
)

logger = logging.getLogger("gossipdp.observe")

MAX_CONNECTIONS = 32
CONNECTION_S = 5.0
MAX_REQUEST_BYTES = 8 << 10
REBUILD_S = 0.1
# If no descriptor is left to accept with, the listener is ready all the time: pause this long.
PAUSE_S = 0.2
LOOK_EVERY_S = 0.1
"""The time between two looks of the accepting thread at whether it must end."""
JOIN_TIMEOUT_S = 2.0
# The job is built at most this often, waits this long for the other workers, and forgets what it
# knew of them if nobody looked for this long.
JOB_REBUILD_S, JOB_WAIT_S, JOB_PAUSE_S = 1.0, 0.5, 10.0


@dataclass(frozen=True)
class Page:
    """The content of a path; a thread of the server calls ``build``."""

    content_type: str
    build: Callable[[], bytes]
    rebuild_s: float = REBUILD_S


def pages_of(status: Callable[[], WorkerStatus]) -> dict[str, Page]:
    """Return a worker's pages: the job for a browser, the JSON that it reads, and its status."""
    files = resources.files("gossipdp.observe")
    style, html = (files.joinpath(name).read_bytes() for name in ("style.css", "page.html"))
    html = html.replace(b"/* style.css */", style)
    return {
        "/": Page("text/html; charset=utf-8", lambda: html),
        "/job": Page("application/json", JobView(status).build, JOB_REBUILD_S),
        STATUS_PATH: Page("application/json", lambda: msgspec.json.encode(status())),
        METRICS_PATH: Page(METRICS_TYPE, lambda: metrics_text(status())),
    }


class JobView:
    """The job as ``gossipdp top`` shows it, seen from one worker, while somebody looks at it."""

    def __init__(self, status: Callable[[], WorkerStatus]) -> None:
        self._status = status
        self._built_s = -math.inf

    def build(self) -> bytes:
        """Return the job, its table, and its notices in words, as JSON."""
        if time.monotonic() > self._built_s + JOB_PAUSE_S:
            self._board, self._poll = StatusBoard(()), StatusPoll()
        own = self._status()
        known = {each.rank: each.status_address for each in own.members if each.state not in GONE}
        # Those of the look before are asked once more, so that the dead do not count as answering.
        others = {*self._board.addresses(), *known.values()} - {"", known.get(own.rank)}
        answers = self._poll.answers(others, JOB_WAIT_S)
        self._built_s = now_s = time.monotonic()
        self._board.take({"": own, **answers}, now_s)
        job = self._board.job(now_s)
        rows, words = [each.cells for each in job.workers], [each.words for each in job.notices]
        return msgspec.json.encode({"job": job, "rows": rows, "notice_words": words})


class StatusServer(http.server.ThreadingHTTPServer, sockets.DescriptorOwner):
    """A server that binds its port at once, by ``listen()``, and answers from :meth:`serve` on."""

    def __init__(
        self, host: str, port: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Not the base class's own socket, which every forked child would keep.
        socketserver.BaseServer.__init__(self, (host, port), _Handler)
        self.socket = sockets.listen(host, port)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        self.is_loopback = ipaddress.ip_address(self.address[0]).is_loopback
        self.pages: Mapping[str, Page] = {}
        self._clock = clock
        self._built: dict[str, tuple[float, bytes]] = {}
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        self._once = OnceLog(logger)
        self._thread: threading.Thread | None = None
        sockets.register(self)

    def serve(self, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        # One for each page: the job's waits for other workers, which may ask for this one's status.
        self._build_locks = {path: threading.Lock() for path in pages}
        name = f"gossipdp-status-{self.address[1]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and free the port. A second call does nothing."""
        if self._thread is None:
            self.server_close()
        elif self._thread is not threading.current_thread():
            self.shutdown()
            self._thread.join(JOIN_TIMEOUT_S)

    def close_in_child(self) -> None:
        """Close the connections; the listener closes itself in a child."""
        for each in self._connections:
            sockets.close_descriptor(each.detach())

    def built(self, path: str) -> bytes | None:
        """Return the page under a path, built now if the last one is old; None if that fails."""
        with self._build_locks[path]:
            built_s, body = self._built.get(path, (-math.inf, b""))
            now_s = self._clock()
            if now_s >= built_s + self.pages[path].rebuild_s:
                try:
                    body = self.pages[path].build()
                except Exception as error:
                    text = "the status port cannot show %s: %s: %s"
                    self._once.warn_once("page", path, text, path, type(error), error)
                    return None
                self._built[path] = (now_s, body)
            return body

    def _run(self) -> None:
        try:
            self.serve_forever(LOOK_EVERY_S)
        except Exception:
            logger.warning("the status port shows nothing any more", exc_info=True)
        finally:
            self.server_close()
            with sockets.descriptors_guard:
                self._end(len(self._connections))

    # By the base class.

    def server_close(self) -> None:
        with sockets.descriptors_guard:
            self.socket.close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and end the oldest if there are too many."""
        try:
            with sockets.descriptors_guard:
                connection, address = self.socket.accept()
                self._connections[connection] = None
                self._end(len(self._connections) - MAX_CONNECTIONS)
        except BlockingIOError:
            raise
        except OSError as error:  # no descriptor is left, or the caller has gone
            self._once.warn_once("accept", str(error.errno), "the status port: %s", error)
            time.sleep(PAUSE_S)
            raise
        return connection, address

    def _end(self, num_oldest: int) -> None:
        """Wake the threads of the oldest connections, which then close them."""
        for connection in list(self._connections)[: max(0, num_oldest)]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close_request(self, request: Any) -> None:
        with sockets.descriptors_guard:
            self._connections.pop(request, None)
            request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Warn once of an error, except one of the connection itself."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self._once.warn_once("answer", repr(type(error)), "the status port: %r", error)


class StatusPort:
    """One worker's status port: ``first_port`` + the worker's rank, or with 0 any free port."""

    def __init__(self, host: str, first_port: int) -> None:
        self._host, self._first_port = host, first_port
        self._server: StatusServer | None = None
        self._pages: Mapping[str, Page] = {}

    def bind(self, rank: int) -> None:
        """Take the port of that rank; a worker that is given another rank moves."""
        port = self._first_port + rank if self._first_port else 0
        if port > 65535:
            raise ValueError(
                f"status_port {self._first_port} is too high: worker {rank} would listen on "
                f"{port}, and 65535 is the last"
            )
        self.close()
        self._rank = rank
        try:
            self._server = StatusServer(self._host, port)
        except RendezvousError as error:
            self._server = None
            logger.warning("worker %d shows no status, and training goes on: %s", rank, error)
        self.show(self._pages)

    def announced(self, host: str) -> tuple[str, int]:
        """Return the address for others: ``host`` if it listens on all, ("", 0) without any."""
        if self._server is None:
            return "", 0
        bound, port = self._server.address
        return (host if ipaddress.ip_address(bound).is_unspecified else bound, port)

    def show(self, pages: Mapping[str, Page]) -> None:
        """Show these pages from now on, also at another rank's port."""
        self._pages = pages
        if self._server is not None and pages:
            self._server.serve(pages)
            where = show_address(*self._server.address)
            logger.info("worker %d shows its status at http://%s%s", self._rank, where, STATUS_PATH)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: StatusServer
    default_request_version = "HTTP/1.0"
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(explain)s\n"

    def handle(self) -> None:
        """Answer one request. Its head is read whole first, so size and time have one limit."""
        deadline_s, head, is_whole = time.monotonic() + CONNECTION_S, b"", False
        while not is_whole and len(head) <= MAX_REQUEST_BYTES:
            self.connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                received = self.connection.recv(MAX_REQUEST_BYTES + 1)
            except TimeoutError:
                return
            if not received:
                break
            head += received
            is_whole = b"\r\n\r\n" in head or b"\n\n" in head
        self.connection.settimeout(CONNECTION_S)  # of the whole answer
        self.rfile = io.BytesIO(head)
        self.requestline = self.request_version = self.command = ""
        if len(head) > MAX_REQUEST_BYTES:
            self.send_error(431, explain="the request is too long")
        elif not is_whole:
            self.send_error(400, explain="half a request")
        else:
            self.handle_one_request()

    def do_GET(self) -> None:
        path, pages = self.path.partition("?")[0], self.server.pages
        if self.server.is_loopback and not _is_local(self.headers.get("Host")):
            # If a web page's domain name was made to lead here, the header holds that name.
            self.send_error(403, explain="ask by an address, or as localhost")
        elif path not in pages:
            self.send_error(404, explain=f"there are {', '.join(pages)}")
        elif (body := self.server.built(path)) is None:
            self.send_error(500, explain="see the worker's log")
        else:
            self._send(pages[path].content_type, body)

    do_HEAD = do_GET

    def _send(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def version_string(self) -> str:
        return "gossipdp"

    def log_message(self, *message: object) -> None:
        """Write nothing: strangers would fill the log."""


def _is_local(host: str | None) -> bool:
    try:
        name = urlsplit(f"//{(host or '').strip()}").hostname
        return name in (None, "localhost") or bool(ipaddress.ip_address(str(name)))
    except ValueError:
        return False
