"""The one clock by which a worker judges silence and stamps what happens.

``time.monotonic`` stands still while the machine is suspended (on Linux), so a worker whose laptop
lid was closed for an hour would not know that it had been away. This clock runs on. It is the same
for all processes of one machine, so what they stamp can be compared; never between machines.

Times of this clock are compared with times of this clock alone. A wait that concerns one process
only, such as that for a child to end, may use any.
"""

import time
from pathlib import Path


def since_boot_s() -> float:
    """Return the seconds since this machine was started, those in suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return what tells this start of this machine from all others; empty where nobody says it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
