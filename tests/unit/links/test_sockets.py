"""Forked children keep none of our descriptors."""

import os
import socket
import threading
from typing import Any

import pytest
from calling_back import CallingLock
from links import has_ended, in_child
from waiting import LONGEST_S, wait_until

from gossipdp.links import shared_memory, sockets
from gossipdp.links.sockets import Listener, listen
from gossipdp.links.tcp import TcpTransport
from gossipdp.links.tls import Tls
from gossipdp.observe.server import StatusServer

# A child that is created here runs the test's code after a fork that threads may have seen.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def test_the_child_has_none_of_the_parents_descriptors(world, open_descriptors):
    before = open_descriptors()
    first, second, *_ = world.pair(world.tcp)
    guest = socket.create_connection((second.host, second.port))
    world.settle()
    unused, gone = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    gone.close()
    gone.close_in_child()  # no error, or the child would keep the descriptors of those after it
    first.transport.dial(7, *unused.getsockname())  # and stays under way: it is not accepted
    # Two of each: listener, epoll, eventfd, end of the link; and the guest's two ends, the unused
    # listener, the dial.
    ours = open_descriptors() - before
    assert len(ours) == 12
    left = in_child(lambda: sorted(open_descriptors() & ours))
    assert left == str([(str(guest.fileno()), os.readlink(f"/proc/self/fd/{guest.fileno()}"))])
    guest.close()
    unused.close()


def test_the_parents_links_live_on_and_the_child_may_forget_its_copies(world):
    first, second, there, _ = world.pair(world.tcp)

    def child() -> str:
        first.transport.wake()
        first.transport.close()
        # A number that the child now uses itself must survive the end of the copies.
        reader, writer = os.pipe()
        first.transport.__del__()
        # Else no other thread of the child could ever take it.
        assert not sockets.descriptors_guard._is_owned()  # type: ignore[attr-defined]
        os.write(writer, b"ok")
        return os.read(reader, 2).decode()

    assert in_child(child) == "ok"
    there.send_control(b"still here")
    world.until(lambda: second.handler.of("control"))
    assert first.handler.names() == ["link_up"]


def test_a_fork_waits_for_a_descriptor_on_its_way(world):
    """The guard is held while another thread opens a descriptor that no owner lists yet."""
    opened, go_on, order = threading.Event(), threading.Event(), list[str]()

    def open_slowly() -> None:
        with sockets.descriptors_guard:
            opened.set()
            go_on.wait(LONGEST_S)
            order.append("listed")

    thread = threading.Thread(target=open_slowly)
    thread.start()
    opened.wait(LONGEST_S)
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    child = os.fork()
    if child == 0:
        os._exit(0)
    order.append("forked")
    os.waitpid(child, 0)
    thread.join()
    timer.join()
    assert order == ["listed", "forked"]
    assert not sockets.descriptors_guard._is_owned()  # type: ignore[attr-defined]


def test_a_descriptor_and_its_place_in_a_list_come_and_go_in_one_step(world, serve, monkeypatch):
    """Between the two a fork would leave a child with a descriptor that no owner names."""
    places = [
        *((sockets, "register"), (sockets, "close_descriptor"), (os, "open"), (Tls, "wrap")),
        *((shared_memory, "memory_file"), (shared_memory._libc, "madvise"), (Listener, "accept")),
        *((TcpTransport, "_begin"), (TcpTransport, "_close_connection"), (Listener, "close")),
        (StatusServer, "_end"),
    ]
    is_guarded: dict[str, set[bool]] = {name: set() for _, name in places}
    status_server = serve()

    def spy(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def spied(*what: Any, **options: Any) -> Any:
            is_owned = sockets.descriptors_guard._is_owned()  # type: ignore[attr-defined]
            is_guarded[name].add(is_owned)
            return real(*what, **options)

        monkeypatch.setattr(owner, name, spied)

    for place in places:
        spy(*place)
    first, second = world.tls(0), world.tls(1)
    first.transport.allocate(4096)
    there, _ = world.join(first, second)
    world.until(lambda: there.is_shared)
    with socket.create_connection((first.host, first.port)) as guest:
        guest.sendall(b"GET / HTTP/1.1")
        world.until(lambda: has_ended(guest))
    with socket.create_connection(status_server.address):
        wait_until(lambda: status_server._connections, "it has accepted")
    status_server.close_request(listen("127.0.0.1", 0))  # any socket stands for a connection
    status_server.close()
    there.close("enough")
    # wake() of another thread waits too, and finds the transport closed.
    first.transport._wake_guard = waking = CallingLock(before=lambda: None)
    world.close(first)
    assert waking.has_called
    assert is_guarded == {name: {True} for _, name in places}
