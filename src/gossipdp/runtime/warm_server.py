"""The process that has imported ``torch`` and becomes a script worker, by fork, on request.

Its own side; :mod:`~gossipdp.runtime.warm_spare` is the supervisor's. Nothing is computed here,
since a thread pool that computing starts does not survive a fork. The process forked is not this
one's child: it is handed to the supervisor, which is marked as the one to inherit orphans. So when
this process dies no worker does, and the supervisor sees how each of them ended.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

from gossipdp.runtime.parent_death import end_with

READY = b"ready"
GO = b"g"
LENGTH = struct.Struct("<I")
NUM_DESCRIPTORS = 4
ADOPTION_S = 2.0


def serve(descriptor: int, directory: str, modules: str) -> None:
    """Import ``modules`` (names with commas), then fork a worker for each request, to the end.

    In the forked worker it does not return, but raises the script's SystemExit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=descriptor)
    # What lies beside the script comes first, as it does in a fresh worker.
    sys.path.insert(0, directory)
    # The other check of whether CUDA is there starts it, and that would not survive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name in modules.split(","):
        importlib.import_module(name)
    del sys.path[0]
    if threading.active_count() > 1:
        sys.exit(f"threads {threading.enumerate()} would not survive a fork")
    gc.collect()
    gc.freeze()
    requests.send(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 16, NUM_DESCRIPTORS)
        if not data:
            return
        first = os.fork()
        if first == 0:
            if os.fork():
                os._exit(0)
            requests.close()
            _become(descriptors)
        os.waitpid(first, 0)
        for number in descriptors:
            os.close(number)


def _become(descriptors: list[int]) -> None:
    """Be the worker: read who, get everything in place, run its script."""
    output, errors, report, control_descriptor = descriptors
    with socket.socket(fileno=control_descriptor) as control:
        order = json.loads(_read(control, LENGTH.unpack(_read(control, LENGTH.size))[0]))
        os.setpgid(0, 0)
        _await_parent(order["supervisor"])
        control.sendall(LENGTH.pack(os.getpid()))
        _read(control, len(GO))  # by now the supervisor knows of us; else we end here
    for number, target in ((output, 1), (errors, 2)):
        os.dup2(number, target)
        os.close(number)
    os.environ.clear()
    os.environ.update(order["variables"])
    os.environ[order["report_variable"]] = f"{report}:{os.fstat(report).st_ino}"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv[:] = order["command"]
    if "numpy" in sys.modules:  # else two forks would draw the same; `random` sees to itself
        sys.modules["numpy"].random.seed()
    _show_command(order["command"])
    from gossipdp.runtime.script_main import run_words

    run_words(order["words"])


def _read(control: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = control.recv(num_bytes - len(data))
        if not part:
            os._exit(1)  # nobody wants this worker any more
        data += part
    return data


def _await_parent(supervisor_pid: int) -> None:
    """Have the kernel send SIGTERM at the supervisor's death, once it is our parent."""
    deadline = time.monotonic() + ADOPTION_S
    while os.getppid() != supervisor_pid:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    ask = end_with(supervisor_pid)
    assert ask is not None
    ask()


def _show_command(command: list[str]) -> None:
    """Let ``ps`` show the script: write its words over this process's own, as far as they go."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5)
        text = b"".join(os.fsencode(word) + b"\0" for word in command)
        if 0 < len(text) <= end - start:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, text, len(text))
