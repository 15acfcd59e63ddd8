"""What tests share that start ``gossipdp run`` and look at its processes."""

import os

import psutil

# The environment, but for what a launcher around the tests themselves may have set. Warnings are
# errors in these processes as in the tests.
VARIABLES = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("GOSSIPDP_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE"))
} | {"PYTHONWARNINGS": "error"}


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
