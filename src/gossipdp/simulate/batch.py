"""Many simulations, over the cores of this machine."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

from gossipdp.simulate.one_thread import one_thread
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import Progress, simulate
from gossipdp.simulate.trace import Trace

Task = TypeVar("Task")
Answer = TypeVar("Answer")

PRELOADED = ["gossipdp.simulate.batch", "numba"]
"""What the fork server imports once; what is not installed it leaves out."""

TRIAL_S = 2.0
WORTH_PROCESSES_S = 10.0
"""Processes take seconds to start: torch is imported, and numba compiles in each."""

Message: TypeAlias = tuple[Literal["share", "answer", "error"], Any]


class Job(NamedTuple):
    """One run."""

    scenario: Scenario
    method: str


def simulate_all(
    jobs: Sequence[Job],
    *,
    processes: int | None = None,
    on_progress: Progress | None = None,
) -> list[Trace]:
    """Simulate every job; the traces in the order of the jobs.

    The traces do not depend on how many processes there are. A script that uses several must call
    this under ``if __name__ == "__main__":``, since they import the script.

    Args:
        jobs: the runs.
        processes: how many at once; None: as many as there are cores, where that is quicker.
        on_progress: told in this thread which share of all jobs is done, 0 to 1.

    Raises:
        ValueError: as :func:`~gossipdp.simulate.simulation.simulate`, or ``processes`` is not
            positive.

    Example:
        >>> from gossipdp.simulate import Job, Scenario, simulate_all
        >>> scenario = Scenario(graph="ring", num_workers=8, num_steps=20)
        >>> jobs = [Job(scenario, method) for method in ("a2cid2", "gossip")]
        >>> [trace.method for trace in simulate_all(jobs, processes=1)]
        ['a2cid2', 'gossip']
    """
    costs = [job.scenario.num_workers * job.scenario.num_steps for job in jobs]
    return run_all(_simulate, jobs, processes=processes, costs=costs, on_progress=on_progress)


def _simulate(job: Job, on_progress: Progress) -> Trace:
    return simulate(job.scenario, job.method, on_progress)


def run_all(
    function: Callable[[Task, Progress], Answer],
    tasks: Sequence[Task],
    *,
    processes: int | None = None,
    costs: Sequence[float] | None = None,
    on_progress: Progress | None = None,
) -> list[Answer]:
    """``[function(task, progress) for task in tasks]``, over processes.

    Torch and numpy compute with one thread in each of them, also where there is but this one, so
    that sums do not depend on the number of cores. Ctrl+C and a failure end all at once.

    Args:
        function: what to do with a task; it may tell ``progress`` the share of the task done.
        tasks: they, the function and its answers must be picklable, by cloudpickle at least.
        processes: how many at once; with 1, or one task, all happens in this process. None: as
            many as there are cores, unless all is soon done here: that is tried for a moment,
            and a task that is cut short then starts again elsewhere.
        costs: how long the tasks take, in any unit: the longest start first.
        on_progress: told in this thread which share of all costs is done, 0 to 1.

    Raises:
        ValueError: ``processes`` is not positive.
        RuntimeError: a process ended without an answer.
        Exception: what a task raised; its cause is a :class:`WorkerTraceback`, if that was in
            another process.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes is {processes}; it must be at least 1")
    shares = _Shares(costs or [1.0] * len(tasks), on_progress or (lambda share: None))
    order = sorted(range(len(tasks)), key=lambda place: -shares.costs[place])
    answers: dict[int, Answer] = {}
    num_processes = min(processes or num_cores(), len(tasks))
    if num_processes <= 1 or processes is None:
        if num_processes > 1:
            shares.try_until(monotonic() + TRIAL_S)
        with one_thread(), suppress(_TooLong):
            for place in order:
                answers[place] = function(tasks[place], shares.of(place))
                shares.of(place)(1.0)
        shares.try_until(math.inf)
    left = [place for place in order if place not in answers]
    if left:
        answers |= _run_in_processes(function, tasks, left, min(num_processes, len(left)), shares)
    return [answers[place] for place in range(len(tasks))]


def num_cores() -> int:
    """How many cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


class WorkerTraceback(Exception):
    """The traceback of an exception that another process raised, as text.

    Attributes:
        module: the name of the module that raised it.
    """

    def __init__(self, text: str, module: str) -> None:
        super().__init__(text, module)
        self.module = module

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _TooLong(BaseException):
    """It pays to go on in several processes. No Exception, which a task might catch."""


class _Shares:
    """Puts the shares of the tasks together, and judges the trial in one process."""

    def __init__(self, costs: Sequence[float], on_progress: Progress) -> None:
        self.costs = costs
        self._trial_ends_s = math.inf
        self._done = [0.0] * len(costs)
        self._shown = 0.0
        self._on_progress = on_progress

    def of(self, place: int) -> Progress:
        """What the task at ``place`` tells its share."""

        def advance(share: float) -> None:
            self._done[place] = share
            pairs = zip(self.costs, self._done, strict=True)
            total = min(1.0, sum(cost * done for cost, done in pairs) / sum(self.costs))
            # A task that starts again elsewhere takes nothing back.
            self._shown = max(self._shown, total)
            self._on_progress(self._shown)
            over_s = monotonic() - self._trial_ends_s
            if over_s > 0:
                left_s = (TRIAL_S + over_s) * (1 - total) / total if total else math.inf
                if left_s > WORTH_PROCESSES_S:
                    raise _TooLong
                self._trial_ends_s = math.inf

        return advance

    def try_until(self, end_s: float) -> None:
        """Let a task after ``end_s`` raise :class:`_TooLong`, if there is much left to do then."""
        self._trial_ends_s = end_s


class _Helper(Generic[Task]):
    """A process, from the caller's side."""

    place = -1
    """Which task it is at."""

    def __init__(self, context: Any, function: bytes) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        with theirs:
            self._process.start()

    def give(self, place: int, task: Task) -> None:
        self.place = place
        try:
            self.connection.send_bytes(_pickled(task))
        except BrokenPipeError:
            self.fail()

    def take(self) -> Message:
        try:
            message: Message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.fail()
        return message

    def fail(self) -> NoReturn:
        """Say that it ended."""
        self._process.join()
        raise RuntimeError(  # what broke the connection tells no more
            f"a process ended without an answer, with exit code {self._process.exitcode}: it was "
            "killed (out of memory?), or a script calls this without `if __name__ == "
            '"__main__":` around it'
        ) from None

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()


def _run_in_processes(
    function: Callable[[Task, Progress], Answer],
    tasks: Sequence[Task],
    order: Sequence[int],
    num_processes: int,
    shares: _Shares,
) -> dict[int, Answer]:
    # Not forked from here: a fork of a process with threads (torch has some) may hang.
    has_fork_server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if has_fork_server else "spawn")
    if has_fork_server:
        context.set_forkserver_preload(PRELOADED)
    waiting, answers = deque(order), dict[int, Answer]()
    with ExitStack() as stack:
        busy: dict[Any, _Helper[Task]] = {}
        for _ in range(num_processes):
            helper = _Helper[Task](context, _pickled(function))
            stack.callback(helper.end)
            busy[helper.connection] = helper
        for helper in busy.values():
            place = waiting.popleft()
            helper.give(place, tasks[place])
        while busy:
            for ready in multiprocessing.connection.wait(list(busy)):
                helper = busy[ready]
                kind, content = helper.take()
                if kind == "error":
                    error, cause = content
                    raise error from cause
                shares.of(helper.place)(content if kind == "share" else 1.0)
                if kind == "answer":
                    answers[helper.place] = content
                    if waiting:
                        place = waiting.popleft()
                        helper.give(place, tasks[place])
                    else:
                        del busy[ready]
    return answers


def _serve(connection: Connection, pickled_function: bytes) -> None:
    """A process's life, from its own side: until the caller kills it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the caller's
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, name="gossipdp parent watch", daemon=True).start()
    with one_thread():
        function = pickle.loads(pickled_function)
        while True:
            pickled_task = connection.recv_bytes()
            try:
                task = pickle.loads(pickled_task)
                answer = function(task, lambda share: connection.send(("share", share)))
                message = _pickled(("answer", answer))
            except Exception as error:
                message = _pickled_error(error)
            connection.send_bytes(message)


def _pickled(value: Any) -> bytes:
    """By value what is defined in a notebook or in __main__, which others cannot import."""
    import joblib

    return pickle.dumps(joblib.wrap_non_picklable_objects(value, keep_wrapper=False))


def _pickled_error(error: Exception) -> bytes:
    frames = list(traceback.walk_tb(error.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "")
    cause = WorkerTraceback("".join(traceback.format_exception(error)), module)
    try:
        pickled = _pickled(("error", (error, cause)))
        pickle.loads(pickled)  # what cannot be unpickled would lose its message over there
    except Exception:
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        pickled = _pickled(("error", (stand_in, cause)))
    return pickled
