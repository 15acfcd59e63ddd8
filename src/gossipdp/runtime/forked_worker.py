"""A worker forked from the fork server: the caller's side, and the worker's own."""

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from gossipdp import logs
from gossipdp.runtime.crew import Ending, WorkerProcess, exit_reason
from gossipdp.runtime.reports import Report, ReportChannel, report_variables

RESULT, ERROR = b"R", b"E"


class ForkedWorker(WorkerProcess):
    """A worker forked from the server; its result or traceback comes back through a pipe."""

    def __init__(
        self,
        rank: int,
        payload: bytes,
        variables: Mapping[str, str],
        cores: set[int] | None,
        num_threads: int,
    ) -> None:
        self.rank = rank
        self._received = bytearray()
        self._open = True
        self._reader, writer = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)
        self._reports = ReportChannel()
        # Not a daemon: those may not have children, and a DataLoader has.
        self._process = multiprocessing.get_context("forkserver").Process(
            target=work,
            args=(payload, dict(variables), cores, num_threads),
            kwargs={"writer": writer, "reports": self._reports.sender},
            name=f"gossipdp worker {rank}",
        )
        with writer, self._reports.sender:
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def waits_for(self) -> list[Connection | int]:
        """What becomes readable when something happened to this worker."""
        return [self._process.sentinel, *([self._reader] if self._open else [])]

    def ending(self) -> Ending | None:
        """See the base class; also takes in what has arrived of the result."""
        code = self._process.exitcode
        self._take_in()
        if code is None:
            return None
        if self._received[:1] == ERROR:
            with suppress(Exception):  # it was killed before all of it was written
                reason, details = pickle.loads(self._received[1:])
                return Ending(True, reason, details)
        if code != 0:
            return Ending(True, exit_reason(code))
        try:
            self._result = pickle.loads(self._received[1:])
        except Exception as error:
            reason = f"ended without a readable result ({type(error).__name__}: {error})"
            return Ending(True, reason)
        return Ending(False)

    def reports(self) -> list[Report]:
        """What it has reported since the last call."""
        return self._reports.take()

    def result(self) -> Any:
        """What the function returned, after an ending without failure."""
        return self._result

    def kill_if_running(self) -> None:
        """:meth:`kill`, unless it has ended or is closed."""
        if not self._reader.closed and self._process.exitcode is None:
            self.kill()

    def close(self) -> None:
        """Release the pipe and the process, whose end is awaited; a second call does nothing."""
        if self._reader.closed:
            return
        self._reader.close()
        self._reports.close()
        self._process.join()
        self._process.close()

    def _take_in(self) -> None:
        # A loader process forked by the worker may hold the pipe open: its end is not awaited.
        try:
            while self._open:
                data = os.read(self._reader.fileno(), 1 << 20)
                self._received += data
                self._open = bool(data)
        except BlockingIOError:
            pass


def work(
    payload: bytes,
    variables: dict[str, str],
    cores: set[int] | None,
    num_threads: int,
    *,
    writer: Connection,
    reports: socket.socket,
) -> None:
    """A worker's life: in the new process."""
    os.setpgid(0, 0)  # Ctrl+C reaches the caller alone, who passes it on once
    _end_with_parent()
    os.environ.clear()
    os.environ.update(variables)
    os.environ.update(report_variables(reports))
    logs.configure()
    if cores is not None:
        os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(num_threads)
    atexit._clear()  # those of the server; ours run below, since the process leaves by _exit
    code = 1
    try:
        function, args = pickle.loads(payload)
        answer = RESULT + pickled(function(*args))
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        answer = b""
    except BaseException as error:
        answer = ERROR + pickled(_report(error))
    finally:
        atexit._run_exitfuncs()
    with writer, open(writer.fileno(), "wb", closefd=False) as pipe:
        pipe.write(answer)
    sys.exit(code)


def _report(error: BaseException) -> tuple[str, str]:
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without the line in work()
    if isinstance(error, SystemExit):
        return exit_reason(error.code if isinstance(error.code, int) else 1), str(error)
    return f"raised {type(error).__name__}", "".join(traceback.format_exception(error))


def _end_with_parent() -> None:
    """End this process and what it started, gently and then not, when its launcher is gone.

    The kernel's own parent-death signal does not serve: the parent is the fork server, which
    lives as long as any worker.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGTERM)
        time.sleep(2)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="gossipdp parent watch", daemon=True).start()


def pickled(value: Any) -> bytes:
    """By value what is defined in a notebook or in __main__, which a worker cannot import."""
    import joblib

    return pickle.dumps(joblib.wrap_non_picklable_objects(value, keep_wrapper=False))
