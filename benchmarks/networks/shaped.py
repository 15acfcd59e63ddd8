"""Hosts on a switch, each by a veth cable that the kernel's token bucket (tbf) holds to a rate."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from networks.namespaces import Hosts, run

# What passes at once after a pause: a millisecond's bytes, but the kernel's largest frames at least
# (it cuts what it handed down in larger pieces).
BURST_S, LEAST_BURST_BYTES, LONGEST_WAIT = 1e-3, 9_000, "20ms"


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
        """See :class:`Hosts`."""
        subprocess.run(["ip", "netns", "del", self.switch], check=False, capture_output=True)
