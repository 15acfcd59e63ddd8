"""Shows a worker's pages over HTTP, from one thread that training never waits for.

One thread serves all connections without blocking, so that whoever asks costs training no more
than the time to build a page. Guarantees, whatever strangers do:

- At most ``MAX_CONNECTIONS`` at once; of more, the oldest goes. Each lives ``CONNECTION_S`` at most
  and may send ``MAX_REQUEST_BYTES``.
- A page is built at most once in ``REBUILD_S``; who asks sooner is given the last one.
- On a loopback address it answers who asks by an address or as localhost, so that no web page can
  read it through a name that leads here.
- What goes wrong in a page is an answer 500 and one warning, and what goes wrong in the thread ends
  the thread, with a warning: never the training.
"""

from __future__ import annotations

import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gossipdp.errors import RendezvousError
from gossipdp.links import sockets
from gossipdp.links.sockets import listen
from gossipdp.logs import OnceLog

logger = logging.getLogger("gossipdp.observe")

MAX_CONNECTIONS = 32
CONNECTION_S = 5.0
MAX_REQUEST_BYTES = 8 << 10
REBUILD_S = 0.1
# Without a descriptor to accept with, the listener would be ready all the time.
PAUSE_S = 0.2
JOIN_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Page:
    """What a path shows: ``build`` is called in the server's thread."""

    content_type: str
    build: Callable[[], bytes]


@dataclass
class _Connection:
    socket: socket.socket
    deadline_s: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class StatusServer(sockets.DescriptorOwner):
    """Binds its port at once, and answers from :meth:`serve` on.

    Args:
        host: address to listen on.
        port: 0 for any free one.
        clock: seconds, monotonic.

    Raises:
        RendezvousError: the port is in use, or the host is no address of this machine.
    """

    def __init__(
        self, host: str, port: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            self._listener = listen(host, port)
        except RendezvousError as error:
            raise RendezvousError(f"the status port: {error}") from None
        bound = self._listener.getsockname()
        self.address: tuple[str, int] = (bound[0], bound[1])
        self._is_loopback = ipaddress.ip_address(bound[0]).is_loopback
        self._clock = clock
        self._pages: Mapping[str, Page] = {}
        self._built: dict[str, tuple[float, bytes]] = {}
        self._connections: dict[int, _Connection] = {}
        self._is_closed = False
        self._once = OnceLog(logger)
        self._accept_from_s = 0.0
        self._thread: threading.Thread | None = None
        with sockets.descriptors_guard:
            self._waker, self._woken = socket.socketpair()
            sockets.register(self)

    def serve(self, pages: Mapping[str, Page]) -> None:
        """Show these pages, each under its path."""
        self._pages = pages
        name = f"gossipdp-status-{self.address[1]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and free the port. A second call does nothing."""
        # The thread closes the waker under the same guard: not between the flag and the byte.
        with sockets.descriptors_guard:
            if self._is_closed:
                return
            self._is_closed = True
            self._waker.send(b"\0")
        if self._thread is None:
            self._close_all()
        elif self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def close_in_child(self) -> None:
        """See :class:`~gossipdp.links.sockets.DescriptorOwner`; the listener sees to itself."""
        self._is_closed = True
        held = [self._waker, self._woken, *(each.socket for each in self._connections.values())]
        for each in held:
            sockets.close_descriptor(each.detach())

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        except Exception:
            logger.warning("the status port shows nothing any more", exc_info=True)
        finally:
            self._is_closed = True
            self._close_all()

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        with sockets.descriptors_guard:
            for each in (self._listener, self._waker, self._woken):
                each.close()

    def _turn(self) -> None:
        now_s = self._clock()
        due_s = [each.deadline_s for each in self._connections.values()]
        is_accepting = now_s >= self._accept_from_s
        with selectors.PollSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            if is_accepting:
                selector.register(self._listener, selectors.EVENT_READ)
            else:
                due_s.append(self._accept_from_s)
            for number, connection in self._connections.items():
                wanted = selectors.EVENT_WRITE if connection.answer else selectors.EVENT_READ
                selector.register(number, wanted)
            ready = selector.select(max(0.0, min(due_s) - now_s) if due_s else None)
        for key, _ in ready:
            if key.fd in self._connections:
                self._serve(self._connections[key.fd])
            elif key.fileobj is self._listener:
                self._accept()
        now_s = self._clock()
        for connection in list(self._connections.values()):
            if now_s >= connection.deadline_s:
                self._drop(connection)

    def _accept(self) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(min(self._connections.values(), key=lambda each: each.deadline_s))
        try:
            with sockets.descriptors_guard:
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                connection = _Connection(accepted, self._clock() + CONNECTION_S)
                self._connections[accepted.fileno()] = connection
        except BlockingIOError:
            pass
        except OSError as error:  # no descriptor is left, or who knocked has gone
            self._once.warn_once("accept", str(error.errno), "the status port: %s", error)
            self._accept_from_s = self._clock() + PAUSE_S

    def _serve(self, connection: _Connection) -> None:
        """Read, or write, what can be without waiting."""
        try:
            if connection.answer is None:
                received = connection.socket.recv(MAX_REQUEST_BYTES + 1)
                connection.request += received
                connection.answer = self._answer(connection.request, is_over=not received)
            if connection.answer:
                sent = connection.socket.send(connection.answer)
                connection.answer = connection.answer[sent:]
                if not connection.answer:
                    self._drop(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        with sockets.descriptors_guard:
            self._connections.pop(connection.socket.fileno(), None)
            connection.socket.close()

    def _answer(self, request: bytearray, *, is_over: bool) -> memoryview | None:
        """The whole answer; None while the request is incomplete."""
        if len(request) > MAX_REQUEST_BYTES:
            return _response("431 Request Header Fields Too Large", "the request is too long\n")
        if b"\r\n\r\n" not in request and b"\n\n" not in request:
            return _response("400 Bad Request", "half a request\n") if is_over else None
        words = bytes(request.partition(b"\n")[0]).split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "this is HTTP/1.1: GET /status\n")
        if self._is_loopback and not _is_local(request):
            # A page of the web whose name was made to lead here would have its own name there.
            return _response("403 Forbidden", "ask by an address, or as localhost\n")
        method, path = words[0], words[1].partition(b"?")[0].decode("latin-1")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET\n", more="Allow: GET, HEAD\r\n")
        if path == "/":
            return _response("200 OK", "".join(f"{each}\n" for each in self._pages))
        page = self._pages.get(path)
        if page is None:
            return _response("404 Not Found", f"there are {', '.join(self._pages)}\n")
        built_s, body = self._built.get(path, (None, b""))
        now_s = self._clock()
        if built_s is None or now_s >= built_s + REBUILD_S:
            try:
                body = page.build()
            except Exception as error:
                told = "the status port cannot show %s: %s: %s"
                self._once.warn_once("page", path, told, path, type(error), error)
                return _response("500 Internal Server Error", "see the worker's log\n")
            self._built[path] = (now_s, body)
        return _response("200 OK", body, page.content_type, has_body=method == b"GET")


def _is_local(request: bytearray) -> bool:
    """Whether the Host header is an address or localhost; or there is none."""
    for line in bytes(request).splitlines()[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"host":
            try:
                host = urlsplit(f"//{value.strip().decode('latin-1')}").hostname
                return host in (None, "localhost") or bool(ipaddress.ip_address(str(host)))
            except ValueError:
                return False
    return True


def _response(
    status: str,
    body: str | bytes,
    content_type: str = "text/plain; charset=utf-8",
    *,
    has_body: bool = True,
    more: str = "",
) -> memoryview:
    data = body.encode() if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        f"{more}Connection: close\r\n\r\n"
    )
    return memoryview(head.encode("latin-1") + (data if has_body else b""))
