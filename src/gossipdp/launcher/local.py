"""Workers on this machine: forked ones that call a function (``launch``), and scripts.

The workers of ``launch`` are forked from a server that has imported ``torch`` once: a second launch
in the same process starts 16 workers in about half a second, and fresh interpreters would need half
a minute. A script of ``gossipdp run`` is a program in an interpreter of its own.
"""

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any, final

from gossipdp import logs
from gossipdp.errors import WorkerFailedError
from gossipdp.launcher.cores import num_threads
from gossipdp.launcher.environment import check_platform
from gossipdp.launcher.faults import FaultInjector
from gossipdp.launcher.launch_plan import LaunchPlan, inherited_variables
from gossipdp.launcher.processes import Ending, WorkerProcess, exit_reason
from gossipdp.launcher.reports import report_variables
from gossipdp.launcher.spare_interpreter import PROGRAM
from gossipdp.launcher.supervisor import UNKILLABLE_S, Failure, Supervisor, describe
from gossipdp.rules import at_least_0, at_least_1, grace_s

# The modules that the fork server imports once. They are given by name, as nothing here may import
# the layers above. None computes on import: a thread pool that computing starts does not survive
# the fork. The first optimizer of each worker would import torch._dynamo, in a second of CPU time.
PRELOADED = [
    "gossipdp.launcher.own_group",
    "cloudpickle",
    "msgspec",
    "networkx",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.utils.data",
    "gossipdp.parallel.module",
]
PR_SET_PDEATHSIG = 1

logger = logging.getLogger("gossipdp")


def launch(
    function: Callable[..., Any],
    world_size: int = 4,
    args: Sequence[Any] = (),
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    on_poll: Callable[[], None] | None = None,
    max_restarts: int = 0,
    on_failure: Callable[[Failure], None] | None = None,
    nproc_per_replica: int = 1,
    faults: FaultInjector | None = None,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` new local processes; return results by rank.

    Each worker has torchrun's environment variables, so both ``GossipDataParallel`` and
    ``torch.distributed.init_process_group`` work in it. The function may be defined in a notebook;
    in a script, call ``launch`` under ``if __name__ == "__main__":``.

    Args:
        function: called in every worker; it, ``args`` and what it returns must be picklable by
            cloudpickle. After ``sys.exit()`` in it the result is None.
        world_size: how many processes.
        environment: variables set in the workers besides the caller's own.
        timeout_s: seconds after which all get SIGTERM, and up to 30 s to end; None: no limit.
        on_poll: called about every 0.1 s from the calling thread; what it raises ends the run.
        max_restarts: how often, in all, workers that died after all had begun to train are started
            again. They call the function again and join those that go on; if none does, all resume.
        on_failure: called for each failure.
        nproc_per_replica: how many of the processes hold one replica of the model, each a shard of
            it. To ``torch.distributed`` these are a world of their own, to the others one worker.
        faults: kills, stops and slows workers. The result of one that was killed, and not started
            again, is None.

    Raises:
        WorkerFailedError: a worker raised, ended early or was killed, and was not started again;
            or ``timeout_s`` passed. A failure before all workers train ends the others at once;
            after that they go on, and the error is raised when all have ended.
        ValueError: no workers, fewer than no restarts, or something cannot be pickled.

    Example:
        >>> launch(os.getcwd, world_size=2)  # doctest: +SKIP
        ['/home/me', '/home/me']
    """
    check_platform()
    at_least_1("world_size", world_size)
    at_least_0("max_restarts", max_restarts)
    if nproc_per_replica < 1 or world_size % nproc_per_replica:
        raise ValueError(
            f"world_size is {world_size}; it counts processes, and must be a multiple of "
            f"nproc_per_replica, here {nproc_per_replica}"
        )
    import cloudpickle

    try:  # code of a notebook or of __main__, which a worker cannot import, goes by value
        payload = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:
        raise ValueError(
            f"launch cannot send {function!r} and its arguments to the workers: "
            f"{type(error).__name__}: {error}"
        ) from error
    start_fork_server()

    def start_process(own: Mapping[str, str]) -> ForkedWorker:
        variables = {**inherited_variables(os.environ), **own, **(environment or {})}
        return ForkedWorker(payload, variables, num_threads(world_size))

    plan = LaunchPlan.on_hosts(world_size // nproc_per_replica, num_shards=nproc_per_replica)
    supervisor = Supervisor(
        plan,
        start_process,
        max_restarts=max_restarts,
        faults=faults,
        on_failure=on_failure or (lambda failure: None),
    )
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def look() -> None:
        if on_poll is not None:
            on_poll()
        if deadline is not None and time.monotonic() >= deadline and not supervisor.ending:
            late = ", ".join(str(worker.rank) for worker in supervisor.running)
            text = f"timeout_s={timeout_s:g} passed, but of {world_size} workers {late} still ran"
            if supervisor.failures:
                text = f"{text}\n\n{describe(supervisor.failures)}"
            raise WorkerFailedError(text)

    ended_by = supervisor.run(look)
    for rank, reason in sorted(supervisor.unsaved.items()):
        logger.error("worker %d: %s", rank, reason)
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    if ended_by is not None:
        raise SystemExit(1 if supervisor.unsaved else 128 + ended_by)
    if supervisor.failures:
        texts = describe(supervisor.failures), supervisor.loss
        raise WorkerFailedError("\n\n".join(filter(None, texts)))
    last_lives = [process for worker in supervisor.workers for process in worker.processes]
    return [process.result for process in last_lives if isinstance(process, ForkedWorker)]


def start_fork_server(also: Sequence[str] = ()) -> None:
    """Start the fork server ahead of the first :func:`launch`; returns at once.

    ``also`` are modules that it imports besides torch, so that the workers need not; none may start
    a thread on import. If the server runs already, this does nothing. The server leads a
    process group: a terminal's Ctrl+C does not reach what it forks, also for others who use it.
    """
    from multiprocessing import forkserver

    # One server a process, shared with any other user of the "forkserver" start method.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *also])
    forkserver.ensure_running()


@final
class ForkedWorker(WorkerProcess):
    """A worker forked from the server; its result or traceback comes back through a pipe.

    ``result`` is what the function returned, after an ending without failure.
    """

    def __init__(self, payload: bytes, variables: Mapping[str, str], num_threads: int) -> None:
        super().__init__()
        self.result: Any = None
        self._received = bytearray()
        self._is_open = True
        self._reader, writer = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)
        # It is no daemon: daemons may not have children, and a DataLoader has some.
        self._process = multiprocessing.get_context("forkserver").Process(
            target=work,
            args=(payload, dict(variables), num_threads),
            kwargs={"writer": writer, "reports": self.reports.sender},
            name=f"gossipdp worker {variables['LOCAL_RANK']}",
        )
        with writer, self.reports.sender:
            self._process.start()
        self.pid = self._process.pid or 0

    def waits_for(self) -> list[object]:
        pipe = [self._reader] if self._is_open else []
        return [self._process.sentinel, self.reports.receiver, *pipe]

    def send(self, number: int) -> None:
        # The fork server reaps it at once, and not when we poll. So look right before each signal:
        # in the microseconds between, no other process gets its id.
        if self._process.exitcode is None:
            super().send(number)

    def poll(self) -> Ending | None:
        code = self._process.exitcode
        # A loader process forked by the worker may hold the pipe open: its end is not awaited.
        with suppress(BlockingIOError):
            while self._is_open:
                data = os.read(self._reader.fileno(), 1 << 20)
                self._received += data
                self._is_open = bool(data)
        if code is None:
            return None
        ending: Ending
        try:
            ending, self.result = pickle.loads(self._received)
        except Exception as error:  # it was killed before all of it was written
            unreadable = f"ended without a readable result ({type(error).__name__}: {error})"
            return Ending(exit_reason(code) or unreadable)
        return ending if ending.reason else Ending(exit_reason(code))

    def close(self) -> None:
        if not self._reader.closed:
            super().close()
            self._reader.close()
            if self._process.exitcode is not None:  # else it hangs in the kernel
                self._process.close()


def work(
    payload: bytes,
    variables: dict[str, str],
    num_threads: int,
    *,
    writer: Connection,
    reports: socket.socket,
) -> None:
    """Live a worker's life, in the new process."""
    os.setpgid(0, 0)  # Ctrl+C reaches the caller alone, who passes it on once
    _end_with_parent()
    os.environ.clear()
    os.environ.update(variables)
    os.environ.update(report_variables(reports))
    logs.configure()
    # Back to the platform's default: by "forkserver", loaders would start a server of their own,
    # which imports torch.
    multiprocessing.set_start_method(None, force=True)
    import cloudpickle
    import torch

    torch.set_num_threads(num_threads)
    # A collection over all that the server has imported takes 0.3 s, and copies its memory.
    gc.freeze()
    atexit._clear()  # drop the server's; ours run below, since the process leaves by _exit
    code = 1
    try:
        function, args = pickle.loads(payload)
        answer = cloudpickle.dumps((Ending(), function(*args)))
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        answer = b""
    except BaseException as error:
        ending = _ending_of(error)
        if ending.reason:
            sys.last_value = error  # as Python sets it, for what runs at exit
        else:
            code = 0  # sys.exit(), as of a worker that came to join when the run was ending
        answer = cloudpickle.dumps((ending, None))
    finally:
        atexit._run_exitfuncs()
    with writer, open(writer.fileno(), "wb", closefd=False) as pipe:
        pipe.write(answer)
    sys.exit(code)


def _ending_of(error: BaseException) -> Ending:
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without the line in work()
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Ending(f"ended with exit code {code}" if code else "", str(error))
    return Ending(f"raised {type(error).__name__}", "".join(traceback.format_exception(error)))


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
        time.sleep(grace_s())
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="gossipdp parent watch", daemon=True).start()


class ScriptWorker(WorkerProcess):
    """A worker started as a program, which writes to the standard streams of this process.

    When this process dies, however it does, the kernel sends the worker SIGTERM (Linux).
    ``variables`` are the worker's whole environment. Its input is empty, unless ``stdin`` is
    ``subprocess.PIPE``.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        super().__init__()
        with ExitStack() as on_failure, self.reports.sender as sender:
            on_failure.callback(self.reports.close)
            self._process = subprocess.Popen(
                command,
                env={**variables, **report_variables(sender)},
                stdin=stdin,
                bufsize=0,
                process_group=0,  # Ctrl+C reaches the supervisor alone, which passes it on once
                pass_fds=[sender.fileno()],
                preexec_fn=_end_with(os.getpid()),  # noqa: PLW1509 (see there)
            )
            on_failure.pop_all()
        self.pid = self._process.pid

    def poll(self) -> Ending | None:
        code = self._process.poll()
        return None if code is None else Ending(exit_reason(code))

    def tell(self, message: bytes) -> bool:
        """Write all of its input; return whether it was taken. Never block."""
        pipe = self._process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        try:
            if pipe.write(message) != len(message):
                return False  # and it stays open: half of its input is none
        except OSError:  # it has ended
            return False
        pipe.close()
        return True

    def discard(self) -> None:
        if self.poll() is None:
            self.kill()
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                self._process.wait(UNKILLABLE_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.close()


class Spares:
    """Interpreters that have imported torch, for a script's workers that are started again.

    A new interpreter needs seconds for the imports of a training script, and the cores that the
    other workers use. A spare one (:mod:`.spare_interpreter`) has them behind it. It gets a
    worker's variables by its standard input, and then runs the script as ``python SCRIPT`` would.
    The supervisor's loop alone calls these methods.

    Args:
        script: the command of a worker, after ``python``: a file, or -m and a module.
        variables: the environment of a spare; a worker has all of it and a little more.
        number: how many are kept; none of a script that is no file of Python.
        program: what a spare runs: its imports, and then the script.
    """

    def __init__(
        self,
        script: Sequence[str],
        variables: Mapping[str, str],
        number: int,
        say: Callable[[str], None] = lambda text: None,
        *,
        program: str = PROGRAM,
    ) -> None:
        is_python = script[0] == "-m" or script[0].endswith(".py")
        self._variables, self._say = dict(variables), say
        self._script, self._program = list(script), program
        self._number = number if is_python else 0
        self._waiting: list[ScriptWorker] = []

    def start(self, variables: Mapping[str, str]) -> ScriptWorker:
        """Return a worker with this environment: a spare one, or a new one if there is none."""
        own = json.dumps(dict(variables.items() - self._variables.items())).encode()
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.tell(own):  # it lives
                return spare
            spare.discard()
        return ScriptWorker([sys.executable, *self._script], variables)

    def follow(self, supervisor: Supervisor) -> None:
        """Keep spares while a restart may come: started when all train, ended when none can."""
        if not supervisor.may_restart:
            self.close()
        elif supervisor.all_train:
            self.prepare()

    def prepare(self) -> None:
        """Start the spares that are missing; keep none once one has died or cannot be started."""
        if any(spare.poll() is not None for spare in self._waiting):
            self._give_up("it died")
        while len(self._waiting) < self._number:
            command = [sys.executable, "-c", self._program, *self._script]
            try:
                spare = ScriptWorker(command, self._variables, stdin=subprocess.PIPE)
            except Exception as error:  # no process or descriptor left: the workers are healthy
                self._give_up(f"{type(error).__name__}: {error}")
            else:
                self._waiting.append(spare)

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop().discard()

    def _give_up(self, reason: str) -> None:
        self.close()
        self._number = 0
        self._say(f"no spare interpreter is kept any more: {reason}")


def _end_with(parent_pid: int) -> Callable[[], None]:
    """Return a ``preexec_fn`` that asks the kernel for SIGTERM at the parent's death.

    It imports nothing and takes no lock of Python's, so another thread may run in the parent.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before we asked
            os._exit(1)

    return ask
