"""A child process that ends with its parent, by the kernel's parent-death signal (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def end_with(parent_pid: int) -> Callable[[], None] | None:
    """What a new child does before its program starts: ask for SIGTERM at the parent's death.

    For ``preexec_fn``. It imports nothing and takes no lock of Python's, so it is safe also where
    another thread runs in the parent; the kernel forgets the request at the child's own forks.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before we asked
            os._exit(1)

    return ask
