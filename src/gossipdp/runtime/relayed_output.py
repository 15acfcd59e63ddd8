"""A worker's output that outlives, for the last moments, the supervisor who relays it.

When ``gossipdp run`` is killed, the kernel closes its ends of the workers' pipes and sends the
workers SIGTERM, the one up to milliseconds before the other. A worker that prints in between, or
between the signal and its last checkpoint, would get BrokenPipeError and lose that checkpoint.
Therefore a worker that has something left to do then holds reading ends of the pipes as well: what
nobody reads any more stays in them, and no write fails.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress

VARIABLE = "GOSSIPDP_RELAYED"


def relay_variables(output: int, errors: int) -> dict[str, str]:
    """Tell a worker which pipes its supervisor, this process, reads."""
    inodes = [str(os.fstat(number).st_ino) for number in (output, errors)]
    return {VARIABLE: ":".join((str(os.getpid()), *inodes))}


class HeldOutput:
    """Reading ends of standard output and error, where those are pipes to our own supervisor.

    Only there: the supervisor's death brings SIGTERM, so a writer never waits for long at a pipe
    that is full. In a program that the worker started, and on any other pipe, nothing is held, and
    a reader that leaves is noticed as ever.
    """

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self._ends: list[int] = []
        supervisor, *inodes = variables.get(VARIABLE, "").split(":")
        if supervisor != str(os.getppid()):
            return
        for number in (1, 2):
            with suppress(OSError):  # closed, or no /proc
                status = os.fstat(number)
                if stat.S_ISFIFO(status.st_mode) and str(status.st_ino) in inodes:
                    path = f"/proc/self/fd/{number}"
                    self._ends.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))

    def close(self) -> None:
        """Let go; a second call does nothing."""
        while self._ends:
            os.close(self._ends.pop())
