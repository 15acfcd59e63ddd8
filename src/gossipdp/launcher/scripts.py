"""``ScriptWorker``: a script as a worker, in an interpreter of its own."""

import ctypes
import os
import re
import signal
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, BinaryIO, final

from gossipdp.launcher.reports import report_variables
from gossipdp.launcher.supervisor import Ending, WorkerProcess, exit_reason

PR_SET_PDEATHSIG = 1
RELAYED = "GOSSIPDP_RELAYED"
# One read, and the longest line that is passed on whole.
MAX_LINE_BYTES = 1 << 16
# The most that a pipe holds on Linux, unless root made it larger.
PIPE_BYTES = 1 << 20
TAIL_LINES = 60


@final
class ScriptWorker(WorkerProcess):
    """A worker started as a program; each line of its output is passed on after "[rank] ".

    When this process dies, however it does, the kernel sends the worker SIGTERM (Linux).

    Args:
        command: the program and its words.
        variables: its whole environment.
        label: what stands before each line.
        output: takes its standard output; by default ours.
        errors: takes its standard error; by default ours.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        label: str,
        output: BinaryIO | None = None,
        errors: BinaryIO | None = None,
    ) -> None:
        super().__init__()
        pipes = [*os.pipe(), *os.pipe()]
        output_end, output_start, errors_end, errors_start = pipes
        with self.reports.sender as sender:
            try:
                self._process = subprocess.Popen(
                    command,
                    env={
                        **variables,
                        **report_variables(sender),
                        **relay_variables(output_start, errors_start),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output_start,
                    stderr=errors_start,
                    process_group=0,  # Ctrl+C reaches the supervisor alone, which passes it on once
                    pass_fds=[sender.fileno()],
                    preexec_fn=end_with(os.getpid()),  # noqa: PLW1509 (see there)
                )
            except BaseException:
                self.reports.close()
                os.close(output_end)
                os.close(errors_end)
                raise
            finally:
                os.close(output_start)
                os.close(errors_start)
        output_pipe, errors_pipe = os.fdopen(output_end, "rb", 0), os.fdopen(errors_end, "rb", 0)
        self._output = Relay(output_pipe, output or sys.stdout.buffer, label)
        self._errors = Relay(errors_pipe, errors or sys.stderr.buffer, label)

    @property
    def pid(self) -> int:
        """See the base class."""
        return self._process.pid

    def waits_for(self) -> list[object]:
        """See the base class."""
        relays = (self._output, self._errors)
        return [relay.pipe for relay in relays if relay.is_open] + [self.reports.receiver]

    def take_in(self) -> None:
        """See the base class."""
        self._output.take_in()
        self._errors.take_in()

    def show_rank(self, rank: int) -> None:
        """See the base class."""
        self._output.label = self._errors.label = str(rank)

    def ending(self) -> Ending | None:
        """See the base class; also takes in the last of its output."""
        code = self._process.poll()
        if code is None:
            return None
        self._output.drain()
        self._errors.drain()
        return Ending(exit_reason(code), error_tail(self._errors.tail) if code else "")

    def close(self) -> None:
        """See the base class; something that the worker started may still hold its output."""
        super().close()
        self._output.pipe.close()
        self._errors.pipe.close()


@final
class Relay:
    """Passes on one stream of one worker, line by line, and remembers its end.

    Of a line rewritten by carriage returns, as progress bars do, the last state is passed on. If
    our own stream takes no more (a full disk, a reader that left), lines are lost, and the run
    goes on.
    """

    def __init__(self, pipe: IO[bytes], target: BinaryIO, label: str) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe, self.label = pipe, label
        self.is_open = True
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._target = target
        self._partial = b""

    def take_in(self) -> int:
        """Pass on what one read brings; how many bytes that is. Never blocks.

        One read only: a worker that prints without pause refills its pipe as fast as it is
        emptied, and the others would wait for ever.
        """
        if not self.is_open:
            return 0
        try:
            data = os.read(self.pipe.fileno(), MAX_LINE_BYTES)
        except BlockingIOError:
            return 0
        self.is_open = bool(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES or (self._partial and not self.is_open):
            lines, self._partial = [*lines, self._partial], b""
        self._write(lines)
        return len(data)

    def drain(self) -> None:
        """Pass on all that a worker wrote which has ended; what it started may be writing still."""
        left_bytes = PIPE_BYTES
        while left_bytes > 0 and (num_bytes := self.take_in()):
            left_bytes -= num_bytes
        if self._partial:
            self._write([self._partial])
            self._partial = b""

    def _write(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        self.tail.extend(line.decode(errors="replace") for line in shown)
        with suppress(OSError):
            prefix = f"[{self.label}] ".encode()
            self._target.write(b"".join(prefix + line + b"\n" for line in shown))
            self._target.flush()


def error_tail(lines: Sequence[str]) -> str:
    r"""The last traceback in ``lines`` with what caused it, or the last 20 lines.

    Example:
        >>> error_tail(["step 1", "Traceback (most recent call last):", "ValueError: no"])
        'Traceback (most recent call last):\nValueError: no'
    """
    # torch.distributed writes "[rank2]: " before each line: identical errors would differ.
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in lines]
    start = None
    for index, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last):"):
            chained = any("the above exception" in text for text in lines[index - 3 : index])
            start = start if start is not None and chained else index
    return "\n".join(lines[-20:] if start is None else lines[start:])


def relay_variables(output: int, errors: int) -> dict[str, str]:
    """Tell a worker which pipes its supervisor, this process, reads; see :class:`HeldOutput`."""
    inodes = [str(os.fstat(number).st_ino) for number in (output, errors)]
    return {RELAYED: ":".join((str(os.getpid()), *inodes))}


@final
class HeldOutput:
    """A worker's own reading ends of the pipes that its supervisor reads.

    When ``gossipdp run`` is killed, the kernel closes its ends of the pipes and sends the workers
    SIGTERM, the one up to milliseconds before the other. A worker that prints in between, or
    between the signal and its last checkpoint, would get BrokenPipeError and lose that checkpoint.
    So a worker that has something left to do holds reading ends as well: what nobody reads any
    more stays in the pipe, and no write fails.

    It holds only pipes to its own supervisor, whose death brings SIGTERM, so a writer never waits
    for long at a pipe that is full. In a program that the worker started, and on any other pipe,
    nothing is held, and a reader that leaves is noticed as ever.
    """

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self._ends: list[int] = []
        supervisor, *inodes = variables.get(RELAYED, "").split(":")
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
