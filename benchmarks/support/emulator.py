"""A network of slow links in user space: packets of TUN devices, at a rate and with a delay.

One TUN device a host; the process that runs :func:`main` is the switch between them. What runs over
it is the kernel's own TCP/IP: the hosts' packets are read from their devices and written to others,
each when a link of that rate and length would have delivered it.

    host ── rate ── one-way delay ── switch (a queue for each host) ── rate ── host

By itself: ``python emulator.py INTERFACE MBITS_PER_S DELAY_MS NAMESPACE=ADDRESS ...``; it says
"ready", and ends with its standard input.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000

# What a link carries in a millisecond, between these. Jumbo frames on the faster ones are a sixth
# of the packets that 1,500 bytes would make, which Python can carry.
MTU_S, LEAST_MTU_BYTES, LARGEST_MTU_BYTES = 1e-3, 1_500, 9_000
# Packets are taken from a host this long before they would be sent, so that being woken late by
# as much costs no bandwidth.
READ_AHEAD_S = 0.004
# A host's kernel holds back what it cannot send; the switch drops what would wait for longer.
QUEUE_S = 0.041
PACKETS_IN_DEVICE = 16


class Line:
    """One direction of one cable: bytes leave one after the other at a rate.

    queue_bytes: that may wait for it; what comes beyond is dropped. None: no limit.
    """

    def __init__(self, bytes_per_s: float, queue_bytes: int | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self.queue_bytes = queue_bytes
        self.free_at_s = 0.0

    def send(self, now_s: float, num_bytes: int) -> float | None:
        """Return when a packet that comes now has left; None if it is dropped."""
        start_s = max(now_s, self.free_at_s)
        waiting_bytes = (start_s - now_s) * self.bytes_per_s
        if self.queue_bytes is not None and waiting_bytes + num_bytes > self.queue_bytes:
            return None
        self.free_at_s = start_s + num_bytes / self.bytes_per_s
        return self.free_at_s


class Switch:
    """The packets on their way between hosts, and when each arrives; no device and no clock.

    hosts: number by IPv4 address (4 bytes).
    deliver: called with a host's number and the packet when it arrives there.
    """

    def __init__(
        self,
        hosts: Mapping[bytes, int],
        bytes_per_s: float,
        delay_s: float,
        deliver: Callable[[int, bytes], None],
    ) -> None:
        self._hosts = hosts
        self._delay_s = delay_s
        self._deliver = deliver
        self.up = [Line(bytes_per_s) for _ in hosts]
        self._down = [Line(bytes_per_s, round(QUEUE_S * bytes_per_s)) for _ in hosts]
        # (when, order, host it is for, packet, whether it has yet to pass the switch)
        self._under_way: list[tuple[float, int, int, bytes, bool]] = []
        self._order = itertools.count()
        self.num_dropped = 0

    def take(self, source: int, packet: bytes, now_s: float) -> None:
        """Take a packet from a host. Drop it if it is not IPv4, or for no host here."""
        if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:20] not in self._hosts:
            return
        left_s = self.up[source].send(now_s, len(packet))
        assert left_s is not None, "the line from a host has no limit: its kernel holds back"
        target = self._hosts[packet[16:20]]
        self._push(left_s + self._delay_s, target, packet, True)

    def advance(self, now_s: float) -> None:
        """Deliver all that has arrived by now."""
        while self._under_way and self._under_way[0][0] <= now_s:
            at_s, _, target, packet, is_before_switch = heapq.heappop(self._under_way)
            if not is_before_switch:
                self._deliver(target, packet)
                continue
            arrives_s = self._down[target].send(at_s, len(packet))
            if arrives_s is None:
                self.num_dropped += 1
            else:
                self._push(arrives_s, target, packet, False)

    def next_s(self) -> float:
        """Return the time of the next event; infinity if nothing is under way."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def _push(self, at_s: float, target: int, packet: bytes, is_before_switch: bool) -> None:
        entry = (at_s, next(self._order), target, packet, is_before_switch)
        heapq.heappush(self._under_way, entry)


def forward(descriptors: list[int], switch: Switch, stop: int) -> None:
    """Carry packets between the devices until ``stop`` can be read."""
    while True:
        now_s = time.monotonic()
        switch.advance(now_s)
        # A host whose line is taken for longer is not read: its kernel notices, as at a real card.
        ready_s = [line.free_at_s - READ_AHEAD_S for line in switch.up]
        read = [fd for fd, at_s in zip(descriptors, ready_s, strict=True) if at_s <= now_s]
        later_s = [at_s for at_s in ready_s if at_s > now_s]
        wait_s = min([switch.next_s(), *later_s]) - now_s
        timeout_s = None if wait_s == float("inf") else max(0.0, wait_s)
        readable, _, _ = select.select([*read, stop], [], [], timeout_s)
        if stop in readable:
            return
        now_s = time.monotonic()
        for descriptor in readable:
            switch.take(
                descriptors.index(descriptor), os.read(descriptor, LARGEST_MTU_BYTES), now_s
            )


def open_device(
    namespace: str, address: str, interface: str, made_as: str, bytes_per_s: float
) -> int:
    """Open a TUN device in ``namespace``: its descriptor reads the packets that this host sends."""
    mtu = round(min(LARGEST_MTU_BYTES, max(LEAST_MTU_BYTES, MTU_S * bytes_per_s)))
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(
        descriptor, TUNSETIFF, struct.pack("16sH22x", made_as.encode(), IFF_TUN | IFF_NO_PI)
    )
    device = ["ip", "link", "set", made_as, "netns", namespace, "name", interface]
    in_it = ["ip", "-n", namespace]
    link = ["link", "set", interface, "mtu", str(mtu), "txqueuelen", str(PACKETS_IN_DEVICE)]
    # The kernel's own queue before the device, in which a sender sees that it is held back.
    queue = ["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root"]
    for command in (
        device,
        [*in_it, "address", "add", f"{address}/24", "dev", interface],
        [*in_it, *link, "up"],
        [*queue, "pfifo", "limit", "1000"],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    return descriptor


def main() -> None:
    """Be the switch until standard input ends."""
    interface, mbits_per_s, delay_ms, *words = sys.argv[1:]
    hosts = [word.split("=") for word in words]
    bytes_per_s, made_as = float(mbits_per_s) * 1e6 / 8, f"b{os.getpid() % 100_000}t"
    descriptors = [
        open_device(name, address, interface, f"{made_as}{number}", bytes_per_s)
        for number, (name, address) in enumerate(hosts)
    ]
    numbers = {
        bytes(map(int, address.split("."))): number for number, (_, address) in enumerate(hosts)
    }

    def deliver(host: int, packet: bytes) -> None:
        os.write(descriptors[host], packet)

    switch = Switch(numbers, bytes_per_s, float(delay_ms) / 1e3, deliver)
    os.nice(-10)  # woken late it would be another network
    print("ready", flush=True)
    forward(descriptors, switch, sys.stdin.fileno())
    print(f"dropped {switch.num_dropped} packets, took {time.process_time():.1f} s of CPU")


if __name__ == "__main__":
    main()
