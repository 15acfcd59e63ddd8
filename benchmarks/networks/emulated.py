"""Hosts on slow links with a delay, which a process of its own emulates: see :mod:`emulator`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from networks.namespaces import Hosts

EMULATOR = Path(__file__).with_name("emulator.py")


class EmulatedHosts(Hosts):
    """Each host sends and receives at ``mbits_per_s``, ``delay_ms`` away from every other."""

    def __init__(self, num_hosts: int, mbits_per_s: float, delay_ms: float) -> None:
        super().__init__(num_hosts)
        self.mbits_per_s, self.delay_ms = mbits_per_s, delay_ms
        self._emulator: subprocess.Popen[str] | None = None

    def connect(self) -> None:
        """See :class:`Hosts`."""
        hosts = [f"{name}={ip}" for name, ip in zip(self.names, self.addresses, strict=True)]
        link = ["--mbits-per-s", str(self.mbits_per_s), "--delay-ms", str(self.delay_ms)]
        self._emulator = subprocess.Popen(
            [sys.executable, str(EMULATOR), *hosts, "--interface", self.interface, *link],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._emulator.stdout is not None
        if self._emulator.stdout.readline().strip() != "ready":
            raise RuntimeError("the link emulator did not start; its error is above")

    def disconnect(self) -> None:
        """See :class:`Hosts`."""
        if self._emulator is not None:
            self.account = f"the emulator {self._emulator.communicate(timeout=20)[0].strip()}"
