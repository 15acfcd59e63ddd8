"""What tests share that start ``gossipdp run`` and look at its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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


class RunCommand:
    """One ``gossipdp run`` with these words; ``output`` is the file of all that it writes.

    ``timeout_s``: how long anything that is waited for may take.
    """

    def __init__(
        self,
        output: Path,
        words: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] = VARIABLES,
    ) -> None:
        self.output, self._timeout_s = output, timeout_s
        command = [sys.executable, "-m", "gossipdp.cli.main", "run", *words]
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until it is so; fails if the command ends before that."""
        deadline = time.monotonic() + self._timeout_s
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        """End it, if it runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)
