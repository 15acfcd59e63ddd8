"""What tests share that start ``gossipdp run`` and look at its processes."""

import os
from pathlib import Path

import psutil

# The environment, but for what a launcher around the tests themselves may have set.
VARIABLES = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("GOSSIPDP_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE"))
}


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def spare_is_ready(supervisor_pid: int) -> bool:
    """Whether the warm spare has imported all that it wants to, and waits."""
    for child in psutil.Process(supervisor_pid).children():
        try:
            if "warm_server" in " ".join(child.cmdline()):
                maps = Path(f"/proc/{child.pid}/maps").read_text()
                # Long enough that an import which waits for the disk is not taken for ready.
                return "libtorch_python" in maps and child.cpu_percent(0.5) == 0.0
        except psutil.Error:  # one that has just ended
            continue
    return False
