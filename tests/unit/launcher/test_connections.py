"""The connections between processes, found, cut and blocked from outside."""

import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gossipdp.launcher import connections as connections_module
from gossipdp.launcher.connections import ConnectionEnd, find_connections

# Connects twice; after that sends or receives a byte for each line that it is told.
PEER = """
import socket, sys
family, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
peers = [socket.socket(family) for _ in range(2)]
for peer in peers:
    peer.connect((address, port))
print("connected", flush=True)
for line in sys.stdin:
    what, number = line.split()
    peer = peers[int(number)]
    print(len(peer.recv(1)) if what == "receive" else peer.send(b"y"), flush=True)
"""
pytestmark = pytest.mark.usefixtures("skips_without_descriptors")
FAMILIES = [(socket.AF_INET, "127.0.0.1")]
if socket.has_dualstack_ipv6():
    FAMILIES.append((socket.AF_INET6, "::1"))
SHORT_S = 0.3


class Peer:
    """A process that has two connections to this one; ``ours`` are our ends, in its order."""

    def __init__(self, stack: ExitStack, family: int, address: str) -> None:
        both = len(FAMILIES) > 1
        family_of_server = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family_of_server, dualstack_ipv6=both)
        stack.enter_context(server)
        words = [sys.executable, "-c", PEER, str(int(family)), address]
        self.process = stack.enter_context(
            subprocess.Popen(
                [*words, str(server.getsockname()[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)
        self.ours = [stack.enter_context(server.accept()[0]) for _ in range(2)]
        assert self.line() == "connected"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def is_silent(self) -> bool:
        return select.select([self.process.stdout], [], [], SHORT_S)[0] == []


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("family", "address"), FAMILIES)
def test_both_ends_see_a_cut_and_others_do_not(stack: ExitStack, family: int, address: str) -> None:
    # Our end is a socket of IPv6 that took a connection of IPv4: the kernel writes it in two ways.
    peer, other = (Peer(stack, family, address) for _ in range(2))
    found = find_connections({7: [peer.process.pid], 3: [os.getpid()], 5: [other.process.pid]})
    assert {pair: len(both) for pair, both in found.items()} == {(7, 3): 2, (3, 5): 2}
    for connection in found[7, 3]:
        assert [end.pid for end in connection.ends] == [peer.process.pid, os.getpid()]
        connection.cut()
    assert [each.recv(1) for each in peer.ours] == [b"", b""]
    peer.tell("receive 0")
    assert peer.line() == "0"
    assert find_connections({0: [peer.process.pid], 1: [os.getpid()]}) == {}
    other.ours[1].sendall(b"x")
    other.tell("receive 1")
    assert other.line() == "1"


@pytest.mark.parametrize(("family", "address"), FAMILIES)
def test_a_blocked_connection_loses_all_at_both_ends_until_it_is_unblocked(
    stack: ExitStack, family: int, address: str
) -> None:
    peer = Peer(stack, family, address)
    both = find_connections({0: [peer.process.pid], 1: [os.getpid()]})[0, 1]
    for connection in both:
        connection.block()
        connection.block()  # once more changes nothing
    ours = peer.ours[0]
    ours.sendall(b"x")
    peer.tell("send 0")
    assert peer.line() == "1"
    peer.tell("receive 0")
    assert peer.is_silent()
    ours.settimeout(SHORT_S)
    with pytest.raises(TimeoutError):
        ours.recv(1)
    for connection in both:
        connection.unblock()
        connection.unblock()
    ours.settimeout(60)  # the kernel sends again what was lost
    assert ours.recv(1) == b"y"
    assert peer.line() == "1"


def test_a_number_that_is_another_file_by_now_is_left_alone(stack: ExitStack) -> None:
    one, other = map(stack.enter_context, socket.socketpair())
    inode = os.fstat(one.fileno()).st_ino
    reached = []
    with tempfile.TemporaryFile() as file:
        for found in ((one.fileno(), inode + 1), (file.fileno(), inode), (1 << 20, inode)):
            ConnectionEnd(os.getpid(), *found).act(reached.append, harmless=0)
    assert reached == []
    ConnectionEnd(os.getpid(), one.fileno(), inode).act(lambda end: end.send(b"x"), harmless=0)
    assert other.recv(1) == b"x"


def test_a_process_that_has_ended_has_no_connections(stack: ExitStack) -> None:
    peer = Peer(stack, *FAMILIES[0])
    connection = find_connections({0: [peer.process.pid], 1: [os.getpid()]})[0, 1][0]
    peer.process.kill()
    peer.process.wait(60)
    assert find_connections({0: [peer.process.pid], 1: [os.getpid()]}) == {}
    connection.cut()
    connection.block()
    connection.unblock()


def test_an_end_that_alone_is_left_is_unblocked_too(stack: ExitStack) -> None:
    """The other's goodbye was lost, so this one is open still."""
    peer = Peer(stack, *FAMILIES[0])
    connections = find_connections({0: [peer.process.pid], 1: [os.getpid()]})[0, 1]
    for connection in connections:
        connection.block()
    ours = peer.ours[0]
    ours.settimeout(SHORT_S)
    peer.process.kill()
    peer.process.wait(60)
    with pytest.raises(TimeoutError):
        ours.recv(1)
    for connection in connections:
        connection.unblock()
    ours.settimeout(60)
    assert ours.recv(1) == b""


def test_a_process_that_may_not_be_looked_at_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> list[tuple[int, int]]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(connections_module, "_sockets", refuse)
    with pytest.raises(PermissionError):
        find_connections({0: [os.getpid()]})
    ending = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ending.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
    assert find_connections({0: [ending.pid]}) == {}
    ending.wait()
