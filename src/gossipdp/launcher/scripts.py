"""``ScriptWorker``: a script as a worker, in an interpreter of its own."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, BinaryIO, final

from gossipdp.launcher.reports import report_variables
from gossipdp.launcher.supervisor import Ending, WorkerProcess, exit_reason

PR_SET_PDEATHSIG = 1
# One read, and the longest line that is passed on whole.
MAX_LINE_BYTES = 1 << 16
# The most that a pipe holds on Linux, unless root made it larger.
PIPE_BYTES = 1 << 20
TAIL_LINES = 60


@final
class ScriptWorker(WorkerProcess):
    """A worker started as a program; each line of its output is passed on after "[rank] ".

    When this process dies, however it does, the kernel sends the worker SIGTERM (Linux). It also
    closes our ends of the pipes, up to milliseconds before: a worker that prints in between, or
    until its last checkpoint, would get BrokenPipeError and lose that checkpoint. So the worker
    holds reading ends of its own, and what nobody reads any more stays in the pipe.

    ``variables`` are its whole environment, ``label`` is what stands before each line, and
    ``output`` and ``errors`` take the lines; by default our own streams.
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
        sender = self.reports.sender
        # What is ours stays open if all goes well, what is the worker's never does.
        with ExitStack() as ours, ExitStack() as theirs:
            ours.callback(self.reports.close)
            theirs.callback(sender.close)
            relays, starts = [], []
            for target in (output or sys.stdout.buffer, errors or sys.stderr.buffer):
                end, start = os.pipe()
                theirs.callback(os.close, start)
                pipe = ours.enter_context(os.fdopen(end, "rb", 0))
                relays.append(Relay(pipe, target, label))
                starts.append(start)
            held = [relay.pipe.fileno() for relay in relays] if sys.platform == "linux" else []
            self._process = subprocess.Popen(
                command,
                env={**variables, **report_variables(sender)},
                stdin=subprocess.DEVNULL,
                stdout=starts[0],
                stderr=starts[1],
                process_group=0,  # Ctrl+C reaches the supervisor alone, which passes it on once
                pass_fds=[sender.fileno(), *held],
                preexec_fn=_end_with(os.getpid()),  # noqa: PLW1509 (see there)
            )
            ours.pop_all()
        self.pid = self._process.pid
        self._relays = relays

    def waits_for(self) -> list[object]:
        return [relay.pipe for relay in self._relays if relay.is_open] + [self.reports.receiver]

    def show_rank(self, rank: int) -> None:
        for relay in self._relays:
            relay.label = str(rank)

    def poll(self) -> Ending | None:
        code = self._process.poll()
        for relay in self._relays:
            if code is None:
                relay.take_in()
            else:
                relay.drain()
        if code is None:
            return None
        return Ending(exit_reason(code), error_tail(self._relays[1].tail) if code else "")

    def close(self) -> None:
        """Let go of it; something that the worker started may still hold its output."""
        super().close()
        for relay in self._relays:
            relay.pipe.close()


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
    r"""The last traceback in ``lines``, or the last 20 lines.

    Example:
        >>> error_tail(["step 1", "Traceback (most recent call last):", "ValueError: no"])
        'Traceback (most recent call last):\nValueError: no'
    """
    # torch.distributed writes "[rank2]: " before each line: identical errors would differ.
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in lines]
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    return "\n".join(lines[starts[-1] if starts else -20 :])


def _end_with(parent_pid: int) -> Callable[[], None] | None:
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
