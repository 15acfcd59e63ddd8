"""``WarmSpare``: a process with ``torch`` imported, from which a script worker starts at once.

The supervisor's side of :mod:`~gossipdp.runtime.warm_server`. A fork of it runs the first line of
its script after about 0.1 s, where a fresh interpreter imports for 2 s or more.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import final

from gossipdp.runtime.parent_death import end_with
from gossipdp.runtime.reports import VARIABLE
from gossipdp.runtime.script_main import import_directory
from gossipdp.runtime.warm_server import GO, LENGTH, READY

logger = logging.getLogger("gossipdp.runtime")

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
# From a request to the worker's answer; a spare that needs longer is stuck.
ANSWER_S = 2.0
RETRY_S = 10.0

# torch._dynamo: what the first optimizer of each worker would import.
MODULES = ("torch", "torch._dynamo", "torch.distributed", "torch.utils.data")

# Without the directory that -c puts first: a module there is not meant for us.
_PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from gossipdp.runtime.warm_server import serve; serve(int(sys.argv[1]), *sys.argv[2:4])"
)


def script_words(command: Sequence[str]) -> list[str] | None:
    """What ``command`` has after ``python -u``; None if it is anything else.

    Example:
        >>> script_words([sys.executable, "-u", "-m", "package.train"])
        ['-m', 'package.train']
        >>> script_words(["bash", "train.sh"])
    """
    if sys.platform != "linux" or [*command[:2]] != [sys.executable, "-u"] or len(command) < 3:
        return None
    words = list(command[2:])
    if words[0] in ("-m", "-c"):
        return words if len(words) > 1 else None
    return None if words[0].startswith("-") else words


def reap(group: int) -> bool:
    """Let go of the children in this process group that have ended; whether any are left.

    To be asked from the end of the group's leader on, until False: only then may the number be
    another's.
    """
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


@final
class WarmSpare:
    """Starts the spare at once; replaces it when it has died; ends it at :meth:`close`.

    Meanwhile this process inherits the orphans among its descendants: that is how workers forked by
    the spare become its children. Those of ended workers, too, who wait for :func:`reap`.

    Args:
        command: ``python -u`` and the script, as for a fresh worker.
        variables: the workers' environment but for what differs from rank to rank.
        modules: what scripts import besides torch.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], modules: Sequence[str] = ()
    ) -> None:
        words = script_words(command)
        assert words is not None
        self._command, self._words = list(command), words
        self._variables = dict(variables)
        self._modules = ",".join((*MODULES, *modules))
        self._prctl = ctypes.CDLL(None).prctl
        previous = ctypes.c_int()
        self._prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(previous), 0, 0, 0)
        self._was_subreaper = previous.value
        self._prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._is_ready = False
        self._not_before_s = 0.0
        self._requests, self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the process that waits."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Whether a worker can start from it now. Never blocks."""
        if not self._is_ready:
            with suppress(OSError):
                self._is_ready = self._requests.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._is_ready and self._process.poll() is None

    def keep_alive(self) -> bool:
        """Replace the spare if it has died; whether it was. One that never was ready is not.

        Where none can be started, workers start cold, and it is tried again after RETRY_S.
        """
        if self.is_ready() or not self._is_ready or time.monotonic() < self._not_before_s:
            return False
        self._end()
        try:
            self._requests, self._process = self._start()
        except OSError as error:
            logger.warning("no warm spare can be started (%s): restarts take longer", error)
            self._not_before_s = time.monotonic() + RETRY_S
            return False
        self._is_ready = False
        return True

    def start_worker(
        self, variables: Mapping[str, str], output: int, errors: int, report: int
    ) -> int | None:
        """The process id of a new worker; None if the spare is not ready or does not answer.

        Args:
            variables: its whole environment.
            output: descriptor that becomes its standard output.
            errors: descriptor that becomes its standard error.
            report: descriptor of its report channel.
        """
        if not self.is_ready():
            return None
        order = {
            "supervisor": os.getpid(),
            "command": self._command,
            "words": self._words,
            "variables": dict(variables),
            "report_variable": VARIABLE,
        }
        text = json.dumps(order).encode()
        control, theirs = socket.socketpair()
        with control:
            control.settimeout(ANSWER_S)
            try:
                with theirs:
                    descriptors = [output, errors, report, theirs.fileno()]
                    socket.send_fds(self._requests, [b"worker"], descriptors)
                control.sendall(LENGTH.pack(len(text)) + text)
                answer = control.recv(LENGTH.size, socket.MSG_WAITALL)
                if len(answer) == LENGTH.size:
                    control.sendall(GO)
                    return int(LENGTH.unpack(answer)[0])
            except OSError:
                pass
        # It is stuck or has died; what it may still fork finds `control` closed and ends.
        self._process.kill()
        return None

    def close(self) -> None:
        """End the spare; the workers that came from it live on."""
        self._end()
        self._prctl(PR_SET_CHILD_SUBREAPER, self._was_subreaper, 0, 0, 0)

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        requests.setblocking(False)
        number = str(theirs.fileno())
        directory = import_directory(self._words)
        program = [sys.executable, "-u", "-c", _PROGRAM, number, directory, self._modules]
        # Room for the script's words, which a worker shows in place of these.
        room = sum(len(os.fsencode(word)) + 1 for word in self._command)
        with theirs:
            try:
                process = subprocess.Popen(
                    [*program, " " * room],
                    env=self._variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                    pass_fds=[theirs.fileno()],
                    preexec_fn=end_with(os.getpid()),  # noqa: PLW1509 (see there)
                )
            except BaseException:
                requests.close()
                raise
        return requests, process

    def _end(self) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()
