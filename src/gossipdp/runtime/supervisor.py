"""``Supervisor``: run a script on local workers, each in an interpreter of its own.

torchrun kills all workers when one dies; here they are watched one by one. Everything happens in
the calling thread, which sleeps in one selector over the workers' output and the signals; only
``torch`` is imported beside it, for the store.
"""

import ctypes
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, BinaryIO

from gossipdp.runtime.crew import Crew, Ending, Failure, WorkerProcess, describe, exit_reason
from gossipdp.runtime.environment import check_platform, worker_variables
from gossipdp.runtime.launcher import available_cores
from gossipdp.runtime.store import HostedStore, ready_key

POLL_S = 0.1
TAIL_LINES = 200
MAX_LINE_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1


class Supervisor:
    """Starts ``num_workers`` times ``command``, passes output and signals on, watches each worker.

    Args:
        command: a program and its arguments, such as ``[sys.executable, "-u", "train.py"]``.
        num_workers: how many, all on this machine.
        host: the address on which the store listens; workers listen on the interface that leads
            there.
        port: the store's port; 0 for any free one.
        secret: the workers' common secret; None for a random one.
        variables: environment of the workers; by default this process's.
        output: takes the workers' standard output, each line after "[rank] ".
        errors: takes their standard error.
        on_failure: called once a failure, with whether the others go on.

    Raises:
        ValueError: fewer than one worker.
        RendezvousError: the port is in use.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        variables: Mapping[str, str] | None = None,
        output: BinaryIO | None = None,
        errors: BinaryIO | None = None,
        on_failure: Callable[[Failure, bool], None] = lambda failure, others_go_on: None,
    ) -> None:
        check_platform()
        if num_workers < 1:
            raise ValueError(f"-n is {num_workers}; start at least one worker")
        self._command = list(command)
        self._num_workers = num_workers
        self._secret = secret or secrets.token_hex(16)
        self._run_id = secrets.token_hex(8)
        self._variables = dict(os.environ if variables is None else variables)
        self._output = output or sys.stdout.buffer
        self._errors = errors or sys.stderr.buffer
        self._on_failure = on_failure
        self._selector = selectors.DefaultSelector()
        self._store = HostedStore(host, port)

    def run(self) -> int:
        """Run to the end of all workers; the exit code.

        Returns:
            0 if all succeeded, 1 if any failed, 128 + the signal that ended the run (130 on
            Ctrl+C).
        """
        keys = [ready_key(f"gossipdp/{self._run_id}/0/", rank) for rank in range(self._num_workers)]
        crew = Crew([], lambda: self._store.have_set(keys), on_failure=self._on_failure)
        self._crew = crew
        started: list[ScriptWorker] = []
        with self._selector, self._store, _caught_signals(self._selector) as caught:
            try:
                for rank in range(self._num_workers):
                    started.append(self._start(rank))
                    crew.running[rank] = started[-1]
                # After the workers, so that they import torch meanwhile and none is forked while
                # another thread runs.
                self._store.open_in_background()
                while crew.watch():
                    self._relay(POLL_S)
                    self._store.raise_error()
                    while len(caught) > caught.handled:
                        crew.end(caught[caught.handled])
                        caught.handled += 1
            finally:
                crew.kill()
                while crew.watch():
                    self._relay(0.01)
                self._relay(0)
                for worker in started:
                    worker.close()
        if caught:
            return 128 + caught[0]
        return 1 if crew.failures else 0

    def report(self) -> str:
        """Who failed, and the end of what it wrote to standard error; empty if nobody did."""
        return describe(self._crew.failures)

    def _start(self, rank: int) -> "ScriptWorker":
        threads = max(1, len(available_cores()) // self._num_workers)
        variables = worker_variables(
            rank,
            self._num_workers,
            host=self._store.host,
            port=self._store.port,
            run_id=self._run_id,
            secret=self._secret,
        )
        environment = {"OMP_NUM_THREADS": str(threads), **self._variables, **variables}
        worker = ScriptWorker(rank, self._command, environment, self._output, self._errors)
        for stream in (worker.standard_output, worker.standard_error):
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream)
        return worker

    def _relay(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Relay) and not key.data.take_in():
                self._selector.unregister(key.fileobj)
            elif key.data is None:
                key.fileobj.recv(4096)  # type: ignore[union-attr]


class ScriptWorker(WorkerProcess):
    """A worker started as a program."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: BinaryIO,
        errors: BinaryIO,
    ) -> None:
        self.rank = rank
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl+C reaches the supervisor alone, which passes it on once
            preexec_fn=_end_with(os.getpid()),  # noqa: PLW1509 (no other thread runs here)
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        prefix = f"[{rank}] ".encode()
        self.standard_output = Relay(self._process.stdout, output, prefix)
        self.standard_error = Relay(self._process.stderr, errors, prefix)

    def ending(self) -> Ending | None:
        """See the base class; also takes in the last of its output."""
        code = self._process.poll()
        if code is None:
            return None
        for stream in (self.standard_output, self.standard_error):
            stream.take_in()
            stream.flush()
        if code == 0:
            return Ending(False)
        return Ending(True, exit_reason(code), error_tail(list(self.standard_error.tail)))

    def close(self) -> None:
        """Close our ends of its output, which something that it started may still hold."""
        self.standard_output.pipe.close()
        self.standard_error.pipe.close()


class Relay:
    """Passes on one stream of one worker, line by line with a prefix, and remembers its end.

    Of a line rewritten by carriage returns, as progress bars do, the last state is passed on.
    """

    def __init__(self, pipe: IO[bytes], target: BinaryIO, prefix: bytes) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._target = target
        self._prefix = prefix
        self._partial = b""

    def take_in(self) -> bool:
        """Pass on what has arrived; False at the end of the stream. Never blocks on the worker."""
        try:
            while data := os.read(self.pipe.fileno(), MAX_LINE_BYTES):
                *lines, self._partial = (self._partial + data).split(b"\n")
                self._write(lines)
                if len(self._partial) > MAX_LINE_BYTES:
                    self.flush()
        except BlockingIOError:
            return True
        return False

    def flush(self) -> None:
        """Pass on a last line without its end."""
        if self._partial:
            self._write([self._partial])
            self._partial = b""

    def _write(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        self.tail.extend(line.decode(errors="replace") for line in shown)
        self._target.write(b"".join(self._prefix + line + b"\n" for line in shown))
        self._target.flush()


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


class _Caught(list[int]):
    """Signals received so far; ``handled`` of them have been passed on."""

    handled = 0


@contextmanager
def _caught_signals(selector: selectors.BaseSelector) -> Iterator[_Caught]:
    """Collect SIGINT and SIGTERM instead of acting on them; each wakes the selector."""
    caught = _Caught()
    woken, waker = socket.socketpair()
    with woken, waker:
        waker.setblocking(False)
        selector.register(woken, selectors.EVENT_READ)
        previous_waker = signal.set_wakeup_fd(waker.fileno())
        previous = {
            number: signal.signal(number, lambda received, frame: caught.append(received))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield caught
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_waker)


def _end_with(supervisor_pid: int) -> Callable[[], None] | None:
    """What a worker does before its program starts: ask the kernel for SIGTERM at our death."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor_pid:  # it died before we asked
            os._exit(1)

    return ask
