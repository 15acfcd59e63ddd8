"""The TCPStore in which workers meet: hosted by a launcher, or a connection to it.

Everyone who reaches a store can read and write it. So it holds no secret if one was given, values
from it are bounded and cleaned, and a store that other machines reach is closed soon after all
workers have begun. ``torch`` is imported only when a store is opened.
"""

import ipaddress
import logging
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from gossipdp.errors import RendezvousError
from gossipdp.launcher.environment import Environment
from gossipdp.links.sockets import listen

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("gossipdp")

# A store that other machines reach ends this long after all workers have begun: a script may make a
# second model, or a process group of its own, after its first model.
CLOSE_AFTER_S = 60.0
CHECK_EVERY_S = 0.5
# The time-out of a connection to a store on another host.
CONNECT_S = 5.0
# The time-out of torch's client. Before it connects it asks for the name of the address, even of
# 127.0.0.1, to log it, and its time runs meanwhile: a lost packet to the name server costs 5 s,
# servers that are silent up to 28 s.
CLIENT_S = 30.0
# The end of a run does not wait longer for a thread that may be importing torch.
LEAVE_S = 0.2
MAX_RUN_ID = 200
# All workers of a host may wait until the store answers.
MAX_WAITING = 1024


def ready_key(prefix: str, rank: int) -> str:
    """Return the key which says that worker ``rank`` has met the others and begins to train."""
    return f"{prefix}ready/{rank}"


def have_begun(store: "Store", prefix: str, world_size: int) -> bool:
    """Return whether all workers of the run have met and train."""
    return store.check([ready_key(prefix, rank) for rank in range(world_size)])


class HostedStore:
    """A store hosted in this process, whose port is reserved before ``torch`` is imported.

    The listening socket exists from construction on: a worker started meanwhile waits in its
    queue, and no other process can take the port. Workers therefore import ``torch`` while
    the thread of :meth:`open_in_background` does.

    A store on loopback stays until :meth:`close`, so that the user's own process groups can share
    it; another one ends CLOSE_AFTER_S after all workers have begun.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._listener: socket.socket | None = listen(host, port)
        self._listener.listen(MAX_WAITING)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        # Guards the fields below and _listener, which the thread and its owner use. It is never
        # held while torch is imported, or its store asks a name server.
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._expected = ("", 0)
        self._all_begun = False

    def open_in_background(self, prefix: str, world_size: int) -> None:
        """Begin to answer; ``prefix`` and ``world_size`` say which keys the workers set."""
        self._expected = (prefix, world_size)
        # A daemon: an import cannot be interrupted, and the end of a run does not wait for it.
        self._thread = threading.Thread(target=self._run, name="gossipdp store", daemon=True)
        self._thread.start()

    def have_all_begun(self) -> bool:
        with self._lock:
            if self._store is not None and not self._all_begun:
                self._all_begun = have_begun(self._store, *self._expected)
            return self._all_begun

    def close(self) -> None:
        """Stop answering and free the port; a second call does nothing."""
        self._closing.set()
        self._end()
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        try:
            self._open()
            if not ipaddress.ip_address(self.address[0]).is_loopback:
                while not self._closing.is_set() and not self.have_all_begun():
                    self._closing.wait(CHECK_EVERY_S)
                self._closing.wait(CLOSE_AFTER_S)
                self._end()
        except Exception:
            logger.exception("the store at %s:%d does not work", *self.address)
            self._end()  # workers see it and say so

    def _open(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with self._lock:
            listener, self._listener = self._listener, None
        if listener is None:
            return
        store = TCPStore(
            *self.address,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CLIENT_S),
            master_listen_fd=listener.detach(),  # the store owns it from here on
        )
        with self._lock:
            if not self._closing.is_set():
                self._store = store

    def _end(self) -> None:
        with self._lock:
            if self._listener is not None:
                self._listener.close()
            self._listener = self._store = None


def connect(environment: Environment, timeout_s: float) -> "Store":
    """Connect to the store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it if no launcher does.

    The connection is this worker's own: the user's ``init_process_group`` makes another to the
    same server, before or after. If rank 0 hosts it, a process group that is destroyed just before
    takes the server with it, and workers that had reached it fail to meet.

    Raises:
        RendezvousError: nothing answered within ``timeout_s``, or the port is in use.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    assert environment.store_host is not None
    address, hosts_it = (environment.store_host, environment.store_port), environment.hosts_store
    deadline = time.monotonic() + timeout_s
    error: OSError | None = None
    # TCPStore's own attempt cannot be interrupted and logs a C++ trace for every failure.
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            host = "the launcher" if environment.agent_store else "worker 0"
            raise RendezvousError(
                f"worker {environment.rank} could not reach the store at {address[0]}:{address[1]} "
                f"within {timeout_s:g} s ({(error and error.strerror) or 'no answer'}); {host} "
                "hosts it: check that it runs, and MASTER_ADDR and MASTER_PORT"
            )
        try:
            if hosts_it:
                socket.getaddrinfo(*address)
            else:
                socket.create_connection(address, min(left_s, CONNECT_S)).close()
            break
        except OSError as failed:
            if isinstance(failed, socket.gaierror) and error is None:
                logger.warning(
                    "worker %d does not find MASTER_ADDR %r (%s), and tries again for %g s: "
                    "correct the name, unless it only comes late, as in Kubernetes",
                    *(environment.rank, address[0], failed.strerror, timeout_s),
                )
            error = failed
            time.sleep(0.1)
    try:
        store = TCPStore(
            *address,
            is_master=hosts_it,
            wait_for_workers=False,
            # Shares the server with the user's own init_process_group in this process.
            multi_tenant=not environment.agent_store,
            timeout=timedelta(seconds=max(CLIENT_S, deadline - time.monotonic())),
        )
        store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
        return store
    except RuntimeError as failed:
        raise RendezvousError(
            f"cannot {'host' if hosts_it else 'use'} the store at {address[0]}:{address[1]}: "
            f"{str(failed).splitlines()[0]} (check MASTER_ADDR and MASTER_PORT, and that no other "
            "program uses the port)"
        ) from failed
