"""The TCPStore in which workers meet: hosted by a launcher, or a connection to it.

``torch`` is imported only when a store is opened. Nothing here is needed once the workers'
links are up.
"""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from gossipdp.errors import RendezvousError
from gossipdp.runtime.environment import Environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


logger = logging.getLogger("gossipdp.runtime")

WATCH_EVERY_S = 0.2
# From the beginning of some workers to that of the last one, or to where it is seen here.
COMES_WITHIN_S, COMES_POLL_S = 5.0, 0.05
# The longest that one call on another host's store may take while its host answers, and that the
# end of a run waits for one.
STORE_CALL_S = 1.0
# How long the end of a run waits for a thread that may be importing torch.
LEAVE_S = 0.2
# How long a host whose run failed before it began waits until it has told the others. It is the
# import of torch that may take so long, on a busy machine; no store there ends the wait at once.
NOTICE_S = 60.0
# How often a host shows that it lives, where others may wait for its end.
RENEW_EVERY_S = 5.0
THREAD_NAME = "gossipdp store"


def ready_key(environment_prefix: str, rank: int) -> str:
    """The key that says that worker ``rank`` has met the others and begins to train."""
    return f"{environment_prefix}ready/{rank}"


def arrival_key(environment_prefix: str, number: int, rank: int) -> str:
    """The key under which worker ``rank`` publishes its address to the ``number``-th meeting."""
    return f"{environment_prefix}{number}/worker/{rank}"


class HostedStore:
    """A store hosted in this process, whose port is reserved before ``torch`` is imported.

    The listening socket exists from construction on: a worker started meanwhile waits in its
    queue, and no other process can take the port. Workers therefore import ``torch`` while
    :meth:`open` does.

    Raises:
        RendezvousError: the address is not of this machine, or the port is in use.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._listener: socket.socket | None = socket.create_server(
                address[:2],
                family=family,
                backlog=1024,
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RendezvousError(
                    f"port {port} on {host} is in use; choose another, or 0 for any free one"
                ) from error
            raise RendezvousError(f"cannot listen on {host} port {port}: {error}") from error
        self.host, self.port = self._listener.getsockname()[:2]
        self._store: Store | None = None
        self._opener: threading.Thread | None = None
        self._error: BaseException | None = None
        # Held while the store is made or given up, never while torch is imported.
        self._lock = threading.Lock()
        self._is_closed = False

    def open(self) -> None:
        """Import ``torch`` and begin to answer; does nothing once closed."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with self._lock:
            if self._is_closed:
                return
            assert self._listener is not None
            self._store = TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=10),
                # The store owns the descriptor from here on, so ours is detached.
                master_listen_fd=self._listener.detach(),
            )
            self._listener = None

    def open_in_background(self) -> None:
        """:meth:`open` in a thread; :meth:`raise_error` tells how it went."""

        def run() -> None:
            try:
                self.open()
            except BaseException as error:
                self._error = error

        # A daemon, since an import cannot be interrupted and the end of a run does not wait for it.
        self._opener = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
        self._opener.start()

    def raise_error(self) -> None:
        """Raise the error with which opening in the background ended, if it did."""
        if self._error is not None:
            raise self._error

    def have_set(self, keys: Iterable[str]) -> bool:
        """Whether all ``keys`` have been set; False until the store is open."""
        # self._store is assigned once, by the opener, after it is complete.
        return self._store is not None and self._store.check(list(keys))

    def text(self, key: str) -> str | None:
        """The value of ``key``; None if it has not been set."""
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode(errors="replace")

    def put(self, key: str, text: str) -> None:
        """Set ``key``; lost if the store is not open yet, and with it whoever could read it."""
        if self._store is not None:
            self._store.set(key, text)

    def close(self) -> None:
        """Stop answering and free the port; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            if self._listener is not None:
                self._listener.close()
            self._store = None
        if self._opener is not None:
            self._opener.join(LEAVE_S)

    def __enter__(self) -> "HostedStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RemoteStore:
    """A store on another host, watched in a thread of its own until all awaited keys are set.

    No call on it waits for the network. Once everything awaited has come, or the store is gone, it
    is let go, unless there is something to renew.

    Args:
        host: of the store.
        port: of the store.
        notice_key: what hosts write when the run fails before it begins.
        renewed_key: a number that grows every RENEW_EVERY_S from then on until :meth:`close`.
    """

    def __init__(
        self, host: str, port: int, notice_key: str, *, renewed_key: str | None = None
    ) -> None:
        self.host, self.port = host, port
        self._notice_key, self._renewed_key = notice_key, renewed_key
        self._awaited: list[str] = []
        self._ends = threading.Event()
        self._wake = threading.Event()
        self._is_connected = threading.Event()
        self._thread: threading.Thread | None = None
        # Each written by one thread and then only read by the other, whole.
        self.has_all = False
        self.is_gone = False
        self.noticed: str | None = None
        self._own_notice: str | None = None
        self._error: BaseException | None = None

    def await_all(self, keys: Iterable[str]) -> None:
        """Have :attr:`has_all` say when all these are set; before :meth:`open_in_background`."""
        self._awaited = list(keys)

    def open_in_background(self) -> None:
        """Start to connect and to watch."""
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def have_begun(self, *, ours: bool) -> bool:
        """Whether all whose keys are awaited have begun; ``ours``: those of this host have.

        Where ours began a moment ago the others are given ``COMES_WITHIN_S``: the thread looks only
        now and then. Less where there is a notice. The store may also go, with its host, after the
        last one began and before that was seen here.
        """
        if not ours:
            return self.has_all
        deadline = time.monotonic() + COMES_WITHIN_S
        while not (self.has_all or self.is_gone or self.noticed is not None):
            if time.monotonic() >= deadline:
                break
            time.sleep(COMES_POLL_S)
        return self.has_all or self.is_gone

    def put_notice(self, text: str) -> None:
        """Write the notice soon, unless all has come by then; at the latest :meth:`close` does."""
        self._own_notice = text
        self._wake.set()

    def raise_error(self) -> None:
        """Raise what kept the thread from watching at all, if anything did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write a notice that is due, if the store is there, and end the thread.

        That may wait for the import of ``torch``, up to NOTICE_S; nothing else does.
        """
        if self._own_notice is not None and self._thread is not None:
            self._thread.join(NOTICE_S)
        self._ends.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STORE_CALL_S + LEAVE_S)

    def _watch(self) -> None:
        try:
            store = self._connect()
            self._is_connected.set()
            while store is not None:
                # First of all: what was said to have failed before the beginning may be younger.
                self.has_all = bool(store.check(self._awaited))
                if self.has_all:
                    self._renew(store)
                    return
                if self._own_notice is not None:
                    store.set(self._notice_key, self._own_notice)
                    return
                if self._ends.is_set():
                    return
                if store.check([self._notice_key]):
                    self.noticed = store.get(self._notice_key).decode()
                    return
                self._wake.wait(WATCH_EVERY_S)
        except RuntimeError as error:
            self.is_gone = True
            # Who still needs the store are the workers that have not met, and they say so.
            logger.info("the store at %s:%d is gone: %s", self.host, self.port, error)
        except BaseException as error:
            self._error = error

    def _renew(self, store: "Store") -> None:
        """Show the other hosts that this one lives."""
        while self._renewed_key is not None and not self._ends.is_set():
            try:
                store.add(self._renewed_key, 1)
            except RuntimeError:  # it may come back, and nothing else here needs it
                with suppress(OSError, RuntimeError):
                    store = reach(self.host, self.port)
            self._ends.wait(RENEW_EVERY_S)

    def _connect(self) -> "Store | None":
        """None if the end comes first."""
        # As long as it takes: the workers have a limit of their own, and say who is missing.
        while not self._ends.is_set():
            try:
                return reach(self.host, self.port)
            except OSError:
                if self._own_notice is not None:
                    return None
                self._wake.wait(WATCH_EVERY_S)
        return None


def reach(host: str, port: int) -> "Store":
    """A connection to another process's store; its calls may wait for as long as that is stopped.

    Raises:
        OSError: nobody listens there.
        RuntimeError: whoever does is no store.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # TCPStore's own attempt logs a C++ trace for every failure.
    socket.create_connection((host, port), STORE_CALL_S).close()
    return TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_CALL_S),
    )


def connect(environment: Environment, timeout_s: float) -> "Store":
    """The store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it where no launcher does.

    The connection is this worker's own: the user's ``init_process_group`` makes another to the
    same server, before or after. Where rank 0 hosts it, a process group that is destroyed just
    before takes the server with it, and workers that had reached it fail to meet.

    Raises:
        RendezvousError: nothing answered within ``timeout_s``, or the port is in use.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    assert environment.store_host is not None
    hosts_it = environment.rank == 0 and not environment.agent_store
    where = f"{environment.store_host}:{environment.store_port}"
    deadline = time.monotonic() + timeout_s
    if not hosts_it:
        _wait_for_listener(environment, deadline, where, timeout_s)
    try:
        return TCPStore(
            environment.store_host,
            environment.store_port,
            is_master=hosts_it,
            wait_for_workers=False,
            # Shares the server with the user's own init_process_group in this process.
            multi_tenant=not environment.agent_store,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        )
    except RuntimeError as error:
        what = "host" if hosts_it else "use"
        raise RendezvousError(
            f"cannot {what} the store at {where}: {str(error).splitlines()[0]} "
            "(check MASTER_ADDR and MASTER_PORT, and that no other program uses the port)"
        ) from error


def _wait_for_listener(
    environment: Environment, deadline: float, where: str, timeout_s: float
) -> None:
    # TCPStore's own attempt cannot be interrupted and logs a C++ trace for every failure.
    assert environment.store_host is not None
    error: OSError | None = None
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection(
                (environment.store_host, environment.store_port), min(left_s, 5.0)
            ).close()
            return
        except OSError as failed:
            error = failed
            time.sleep(min(0.1, left_s))
    host = "the launcher" if environment.agent_store else "worker 0"
    detail = os.strerror(error.errno) if error is not None and error.errno else "no answer"
    raise RendezvousError(
        f"worker {environment.rank} could not reach the store at {where} within {timeout_s:g} s "
        f"({detail}); {host} hosts it: check that it runs, and MASTER_ADDR and MASTER_PORT"
    )
