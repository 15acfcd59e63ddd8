"""The one clock by which a worker judges silence and stamps events.

``time.monotonic`` stands still while the machine is suspended (on Linux), so a worker whose laptop
lid was closed for an hour would not know that it had been away. This clock runs on. It is the same
for all processes of one machine, so their stamps can be compared; never those of two machines.

Compare times of this clock only with times of this clock. A wait that concerns one process only,
such as the wait for a child to end, may use any clock.
"""

import time
from pathlib import Path


def since_boot_s() -> float:
    """Return the seconds since this machine was started, including those in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the id of this start of this machine, or an empty text if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
