"""A small process that outlives whoever started the workers, by seconds, to end them.

When ``gossipdp run`` is killed, the kernel sends its workers SIGTERM, and they end in good order.
A worker that is stopped, or stuck in C code with a handler of its own for SIGTERM, would not, nor
what the workers started: nobody is left to send SIGKILL. The keeper is. It reads process groups
from a pipe, and when the pipe ends while some are left, it gives them PATIENCE_S and kills them.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import final

PATIENCE_S = 2.0

# Run by an interpreter without site packages: it starts in some milliseconds, in 8 MB.
_PROGRAM = """
import os, signal, sys, time
groups = set()
for line in sys.stdin:
    if line.startswith("+"):
        groups.add(int(line[1:]))
    else:
        groups.discard(int(line[1:]))
def alive():
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    state, _, group = file.read().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if state not in "ZX":
                found.add(int(group))
    return groups & found
deadline = time.monotonic() + float(sys.argv[1])
while os.path.isdir("/proc/self") and alive() and time.monotonic() < deadline:
    time.sleep(0.02)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


@final
class Keeper:
    """Started with the first worker; :meth:`close` ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(PATIENCE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C and a closed terminal do not reach it
            bufsize=0,
        )
        self.pid = self._process.pid

    def add(self, group: int) -> None:
        """Kill this process group if we die."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Its leader has ended; the number may be another's soon."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End it; what it still watches over is killed after PATIENCE_S."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S + 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody killed it: the kernel's own signal remains
            self._process.stdin.write(line.encode())
