"""Loads scripts, starts ``gossipdp run`` and looks at its processes."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import psutil
from waiting import LONGEST_S, T, wait_until

# The environment, but for what a launcher around the tests themselves may have set. Warnings are
# errors in these processes as in the tests.
VARIABLES = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("GOSSIPDP_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE"))
} | {"PYTHONWARNINGS": "error"}
# Of the last worker of two hosts on which torchrun started two each.
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
_ports = iter(range(20000 + os.getpid() % 10000, 32768))


def free_port() -> int:
    """Return a free port of those that no process is given that asks for any; another each time."""
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


def listens(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address, 1.0):
        return True
    return False


def path_before(folder: Path) -> dict[str, str]:
    """Return the variables of processes that look for modules in this folder first."""
    path = os.pathsep.join(filter(None, (str(folder), VARIABLES.get("PYTHONPATH"))))
    return VARIABLES | {"PYTHONPATH": path}


def load_script(path: Path) -> ModuleType:
    """Import a script that is on no import path."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_python(
    *words: str,
    environment: Mapping[str, str] = VARIABLES,
    timeout: float = 200,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with these words to its end; return what it wrote."""
    options = {"capture_output": True, "text": True, "env": environment, **options}
    return subprocess.run([sys.executable, *words], timeout=timeout, check=check, **options)


def runs(pid: int) -> bool:
    """Return whether a process is there and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Collection[int]) -> None:
    wait_until(lambda: not any(runs(pid) for pid in pids), f"none of {sorted(pids)} runs any more")


class RunCommand:
    """One ``gossipdp run`` with these words, started ``within`` a command; it writes ``output``."""

    def __init__(
        self,
        output: Path,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] = VARIABLES,
        within: Sequence[str] = (),
    ) -> None:
        self.output = output
        command = [*within, sys.executable, "-m", "gossipdp", "run", *words]
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_for(self, condition: Callable[[], T | None]) -> T:
        """Wait until it is so, and return it; fails if the command ends before that."""

        def holds() -> T | None:
            if held := condition():
                return held
            assert self.process.poll() is None, self.output.read_text()
            return None

        return wait_until(holds, self.output.read_text)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(LONGEST_S)
