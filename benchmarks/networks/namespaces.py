"""Hosts for benchmarks: network namespaces, one a worker, which need root and the ip command.

A process enters one with :func:`enter`; what it starts afterwards stays in it. :class:`Hosts` makes
bare ones; :mod:`shaped` and :mod:`emulated` say what lies between them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from types import TracebackType

CLONE_NEWNET = 0x40000000


def missing(*commands: str) -> str | None:
    """Say why namespaces cannot be made here; None if they can.

    commands: the programs needed, "ip" apart.
    """
    if os.geteuid() != 0:
        return "no root, which network namespaces need"
    for command in ("ip", *commands):
        if shutil.which(command) is None:
            return f"no {command} command"
    name = f"probe{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    run("ip", "netns", "del", name)
    return None


def run(*words: str) -> None:
    """Run a command; raises CalledProcessError, with its error output, where it fails."""
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


def enter(name: str) -> None:
    """Move the calling thread, and all that it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter network namespace {name}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def bytes_sent(interface: str) -> int:
    """Return the bytes sent over an interface of the caller's namespace, headers included."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, counts = line.partition(":")
            if name.strip() == interface:
                return int(counts.split()[8])
    raise ValueError(f"there is no interface {interface!r} in this namespace")


class Hosts:
    """Namespaces on one network, with an address each; ``with`` makes and removes them.

    names: of the namespaces, by rank.
    addresses: IPv4, by rank.
    interface: by which every host reaches the others.
    account: what there is to say of the network after its end.
    """

    network = "10.78.0"
    interface = "link0"
    account = ""

    def __init__(self, num_hosts: int) -> None:
        self.mark = f"b{os.getpid() % 100_000}"
        self.names = [f"{self.mark}h{rank}" for rank in range(num_hosts)]
        self.addresses = [f"{self.network}.{rank + 1}" for rank in range(num_hosts)]

    def connect(self) -> None:
        """Lay what is between the hosts: for subclasses."""

    def disconnect(self) -> None:
        """Undo :meth:`connect`, also where it failed half way."""

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self.connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disconnect()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
