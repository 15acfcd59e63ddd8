"""A script as a worker: an interpreter of its own, or a fork of the warm spare."""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, BinaryIO, final

from gossipdp.runtime.crew import Ending, WorkerProcess, exit_reason
from gossipdp.runtime.parent_death import end_with
from gossipdp.runtime.relayed_output import relay_variables
from gossipdp.runtime.repeated_tracebacks import TracebackFolder
from gossipdp.runtime.reports import ReportChannel, report_variables
from gossipdp.runtime.warm_spare import WarmSpare

TAIL_LINES = 200
MAX_LINE_BYTES = 1 << 16
# The most that a pipe holds on Linux, unless root made it larger.
PIPE_BYTES = 1 << 20


@final
class ScriptWorker(WorkerProcess):
    """A worker started as a program; its output is relayed, its reports can be read.

    Args:
        rank: by which the crew knows it.
        command: the program and its words.
        environment: all of it.
        output: takes its standard output, each line after "[label] ".
        errors: takes its standard error.
        label: what stands before each line.
        spare: where to take it from, if that is ready.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Outlet,
        errors: Outlet,
        *,
        label: str,
        spare: WarmSpare | None = None,
    ) -> None:
        self.rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self.reports = ReportChannel()
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
        except OSError:
            for number in pipes:
                os.close(number)
            self.reports.close()
            raise
        output_end, output_start, errors_end, errors_start = pipes
        report = self.reports.sender.fileno()
        variables = {**environment, **relay_variables(output_start, errors_start)}
        try:
            pid = None
            if spare is not None:
                pid = spare.start_worker(variables, output_start, errors_start, report)
            self.is_warm = pid is not None
            if pid is None:
                self._process = subprocess.Popen(
                    command,
                    env={**variables, **report_variables(self.reports.sender)},
                    stdin=subprocess.DEVNULL,
                    stdout=output_start,
                    stderr=errors_start,
                    process_group=0,  # Ctrl+C reaches the supervisor alone, which passes it on once
                    pass_fds=[report],
                    preexec_fn=end_with(os.getpid()),  # noqa: PLW1509 (see there)
                )
                pid = self._process.pid
            self.pid = pid
        except BaseException:
            os.close(output_end)
            os.close(errors_end)
            self.reports.close()
            raise
        finally:
            os.close(output_start)
            os.close(errors_start)
            self.reports.sender.close()
        prefix = f"[{label}] ".encode()
        self.standard_output = Relay(os.fdopen(output_end, "rb"), output, prefix)
        self.standard_error = Relay(os.fdopen(errors_end, "rb"), errors, prefix)

    def relabel(self, label: str) -> None:
        """Put another label before each line from now on."""
        for stream in (self.standard_output, self.standard_error):
            stream.prefix = f"[{label}] ".encode()

    def ending(self) -> Ending | None:
        """See the base class; also takes in the last of its output."""
        code = self._poll()
        if code is None:
            return None
        for stream in (self.standard_output, self.standard_error):
            stream.drain()
            stream.flush()
        if code == 0:
            return Ending(False)
        return Ending(True, exit_reason(code), error_tail(list(self.standard_error.tail)))

    def close(self) -> None:
        """Close our ends of its output, which something that it started may still hold."""
        self.standard_output.pipe.close()
        self.standard_error.pipe.close()
        self.reports.close()

    def _poll(self) -> int | None:
        if self._process is not None:
            return self._process.poll()
        if self._code is None:  # forked by the spare, and then made our child
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


@final
class Outlet:
    """A stream that takes the workers' lines. One that fails loses lines, and never ends a run.

    A full disk may be the log's alone, and for a while; a reader, such as ``head``, may be gone.
    The first failure is told to ``stream_to_tell``.

    Args:
        stream: written and flushed; it may take lines again later.
        name: what people call it.
        stream_to_tell: the other one; if it fails too, nobody is told.

    Attributes:
        tracebacks: see :class:`~gossipdp.runtime.repeated_tracebacks.TracebackFolder`.
    """

    def __init__(self, stream: BinaryIO, name: str, stream_to_tell: BinaryIO) -> None:
        self._stream, self._name, self._stream_to_tell = stream, name, stream_to_tell
        self.has_failed = False
        self.tracebacks: dict[bytes, bytes] = {}

    def write(self, data: bytes) -> None:
        """Pass ``data`` on, or drop it."""
        try:
            self._stream.write(data)
            self._stream.flush()
        except OSError as error:
            if not self.has_failed:
                self.has_failed = True
                self._tell(error)

    def _tell(self, error: OSError) -> None:
        reason = error.strerror or error
        text = f"gossipdp: {self._name} fails ({reason}): lines are lost, the run goes on\n"
        with suppress(OSError):
            self._stream_to_tell.write(text.encode())
            self._stream_to_tell.flush()


class Relay:
    """Passes on one stream of one worker, line by line with a prefix, and remembers its end.

    Of a line rewritten by carriage returns, as progress bars do, the last state is passed on. Of a
    traceback that another worker has shown, one line is.
    """

    def __init__(self, pipe: IO[bytes], target: Outlet, prefix: bytes) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._target = target
        self.prefix = prefix
        self._partial = b""
        self._folder = TracebackFolder(target.tracebacks)

    def take_in(self) -> bool:
        """Pass on some of what has arrived; False at the end of the stream.

        Never blocks on the worker, and reads once: one that prints without pause refills its pipe
        as fast as it is emptied, and the others would wait for ever.
        """
        return self._take_in() != 0

    def drain(self) -> None:
        """Pass on all that a worker wrote which has ended; what it started may be writing still."""
        left_bytes = PIPE_BYTES
        while left_bytes > 0 and (num_bytes := self._take_in()):
            left_bytes -= num_bytes

    def _take_in(self) -> int | None:
        """How many bytes have been passed on: 0 at the end of the stream, None for none yet."""
        try:
            data = os.read(self.pipe.fileno(), MAX_LINE_BYTES)
        except BlockingIOError:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._write(lines)
        if len(self._partial) > MAX_LINE_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Pass on a last line without its end, and what is held of a traceback."""
        if self._partial:
            self._write([self._partial])
            self._partial = b""
        self._pass_on(self._folder.release())

    def _write(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        self.tail.extend(line.decode(errors="replace") for line in shown)
        self._pass_on(self._folder.fold(shown, self.prefix.strip(b"[] ")))

    def _pass_on(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._target.write(b"".join(self.prefix + line + b"\n" for line in lines))


def error_tail(lines: Sequence[str], max_lines: int = 60) -> str:
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
    if start is None:
        return "\n".join(lines[-20:])
    return "\n".join(lines[start:][-max_lines:])
