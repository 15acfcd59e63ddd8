"""Hosts for benchmarks: network namespaces, one a worker, which need root and the ip command.

A process enters one with :func:`enter`; what it starts afterwards stays in it. The kernel
shapes the links of :class:`ShapedHosts`; a process of its own emulates :class:`EmulatedHosts`.
The bytes that a process sent are counted by its interface, or by its sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

CLONE_NEWNET = 0x40000000
# struct tcp_info of Linux, uapi/linux/tcp.h: tcpi_bytes_sent, since Linux 4.19.
BYTES_SENT = struct.Struct("Q")
BYTES_SENT_AT = 200
EMULATOR = Path(__file__).with_name("emulator.py")
# What passes at once after a pause: a millisecond's bytes, but the kernel's largest frames at least
# (it cuts what it handed down in larger pieces).
BURST_S, LEAST_BURST_BYTES, LONGEST_WAIT = 1e-3, 9_000, "20ms"


def missing() -> str | None:
    """Say why namespaces with links of their own cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "no root, which network namespaces need"
    for command in ("ip", "tc"):
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


def bytes_by_connection() -> dict[str, int]:
    """Return the payload that each TCP connection of this process has sent since it was opened.

    By the kernel's own name of its socket, whoever opened it: a library in C++ or Rust is counted
    like Python. Headers are not counted, repeated segments are.

    Raises:
        OSError: this kernel does not count it.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            socket_name = os.readlink(f"/proc/self/fd/{name}")
            if socket_name.startswith("socket:"):
                found[socket_name] = _bytes_sent(int(name))
    return found


def _bytes_sent(descriptor: int) -> int:
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile by its owner, another thread
        return 0
    with socket.socket(fileno=copy) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return 0
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT_AT + BYTES_SENT.size)
    if len(info) < BYTES_SENT_AT + BYTES_SENT.size:
        raise OSError("this kernel does not count the bytes that a connection sent (Linux 4.19)")
    return int(BYTES_SENT.unpack_from(info, BYTES_SENT_AT)[0])


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

    def variables(self, port: int = 29_400, first: int = 0) -> dict[str, str]:
        """Return what torch.distributed has to know on each host; ``first``: the host of rank 0."""
        return {
            "MASTER_ADDR": self.addresses[first],
            "MASTER_PORT": str(port),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": self.interface,
        }

    def connect(self) -> None:
        """Lay what is between the hosts: for subclasses."""

    def disconnect(self) -> None:
        """Undo :meth:`connect`, also where it failed half way."""

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self.connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class ShapedHosts(Hosts):
    """Each host sends and receives at ``mbits_per_s`` at most, at the same time; no added delay.

    others: the rates of hosts that have another one, by number.
    """

    def __init__(
        self, num_hosts: int, mbits_per_s: float, others: Mapping[int, float] | None = None
    ) -> None:
        super().__init__(num_hosts)
        self.mbits_per_s, self._others = mbits_per_s, others or {}
        self.switch = f"{self.mark}s"

    def connect(self) -> None:
        """See :class:`Hosts`: a bridge in a namespace of its own, and a cable to every host."""
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for rank, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port, mbits_per_s = f"port{rank}", self._others.get(rank, self.mbits_per_s)
            burst = max(LEAST_BURST_BYTES, round(BURST_S * mbits_per_s * 1e6 / 8))
            veth = ("type", "veth", "peer", "name", self.interface, "netns", name)
            run("ip", "-n", self.switch, "link", "add", port, *veth)
            run("ip", "-n", self.switch, "link", "set", port, "master", "bridge0", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", self.interface)
            run("ip", "-n", name, "link", "set", self.interface, "up")
            for place, device in ((name, self.interface), (self.switch, port)):
                shape = ("tbf", "rate", f"{round(mbits_per_s * 1e6)}bit", "burst", f"{burst}b")
                wait = ("latency", LONGEST_WAIT)
                run("tc", "-n", place, "qdisc", "add", "dev", device, "root", *shape, *wait)

    def disconnect(self) -> None:
        subprocess.run(["ip", "netns", "del", self.switch], check=False, capture_output=True)


class EmulatedHosts(Hosts):
    """Each host sends and receives at ``mbits_per_s``, ``delay_ms`` away from every other.

    A process of its own emulates the links: see :mod:`emulator`.
    """

    def __init__(self, num_hosts: int, mbits_per_s: float, delay_ms: float) -> None:
        super().__init__(num_hosts)
        self.mbits_per_s, self.delay_ms = mbits_per_s, delay_ms
        self._emulator: subprocess.Popen[str] | None = None

    def connect(self) -> None:
        hosts = [f"{name}={ip}" for name, ip in zip(self.names, self.addresses, strict=True)]
        link = [self.interface, str(self.mbits_per_s), str(self.delay_ms)]
        self._emulator = subprocess.Popen(
            [sys.executable, str(EMULATOR), *link, *hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._emulator.stdout is not None
        if self._emulator.stdout.readline().strip() != "ready":
            raise RuntimeError("the link emulator did not start; its error is above")

    def disconnect(self) -> None:
        if self._emulator is not None:
            self.account = f"the emulator {self._emulator.communicate(timeout=20)[0].strip()}"
