"""``launch``: run a function on local workers, for notebooks, demo, tests and benchmarks.

The workers are forked from a server that has imported ``torch`` once: a second launch in the same
process starts 16 workers in about half a second, where fresh interpreters need half a minute.
For scripts see :mod:`~gossipdp.runtime.supervisor`.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from gossipdp.errors import WorkerFailedError
from gossipdp.runtime.crew import Crew, Failure, describe
from gossipdp.runtime.environment import check_platform, identity_variables, join_variables
from gossipdp.runtime.forked_worker import ForkedWorker, pickled
from gossipdp.runtime.keeper import Keeper
from gossipdp.runtime.restarts import Restarts
from gossipdp.runtime.team import HostingTeam

POLL_S = 0.1
# By name, as nothing here may import what lies above. The wrapper brings all the library, which
# each worker would compile for itself where no compiled files are kept.
PRELOADED = ["gossipdp.runtime.preload", "gossipdp.parallel.module"]


def launch(
    function: Callable[..., Any],
    workers: int = 4,
    args: Sequence[Any] = (),
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    pin: bool = False,
    on_poll: Callable[[], None] | None = None,
    max_restarts: int = 0,
    on_failure: Callable[[Failure], None] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on ``workers`` new local processes; their results by rank.

    Each worker has torchrun's environment variables, so both ``GossipDataParallel`` and
    ``torch.distributed.init_process_group`` work in it. The function may be defined in a notebook;
    in a script, call ``launch`` under ``if __name__ == "__main__":``.

    Args:
        function: called in every worker; it, ``args`` and what it returns must be picklable by
            cloudpickle.
        workers: how many processes.
        environment: variables set in the workers besides the caller's own.
        timeout_s: seconds after which all workers are ended; None for no limit.
        pin: give each worker its own share of the cores.
        on_poll: called about every 0.1 s from the calling thread; what it raises ends the run.
        max_restarts: how often workers that died after all had begun to train are started again,
            all workers together. They call the function anew and join those that go on.
        on_failure: called for each failure, with how soon its worker is started again.

    Raises:
        WorkerFailedError: a worker raised, ended early or was killed, and was not started again;
            or ``timeout_s`` passed. A failure before all workers train ends the others at once;
            after that they go on, and the error is raised when all have ended.
        ValueError: no workers, fewer than no restarts, or something cannot be pickled.

    Example:
        >>> launch(os.getcwd, workers=2)  # doctest: +SKIP
        ['/home/me', '/home/me']
    """
    check_platform()
    if workers < 1:
        raise ValueError(f"workers is {workers}; launch at least one")
    payload = _pickled_call(function, args)
    restarts = Restarts(max_restarts)
    start_fork_server()  # it imports torch while the store, here, does so too
    team = HostingTeam(workers, "127.0.0.1", 0, None)
    started: dict[int, ForkedWorker] = {}
    begun: set[int] = set()
    addresses: dict[int, tuple[str, int]] = {}
    identity: dict[str, str] = {}
    crew: Crew

    def start(rank: int, own: Mapping[str, str]) -> ForkedWorker:
        started[rank] = ForkedWorker(
            rank,
            payload,
            {**os.environ, **own, **(environment or {})},
            _cores(rank, workers) if pin else None,
            _num_threads(workers),
        )
        keeper.add(started[rank].pid)
        return started[rank]

    def start_again(rank: int, anew: bool) -> ForkedWorker:
        if anew and not crew.running:
            begun.clear()
            addresses.clear()
            team.begin_anew()
        keeper.remove(started[rank].pid)
        started[rank].close()
        count = restarts.count(rank)
        others = [address for other, address in addresses.items() if other != rank]
        if anew:
            return start(rank, {**team.variables(rank), "GOSSIPDP_RESTARTS": str(count)})
        return start(rank, {**team.variables(rank), **identity, **join_variables(others, count)})

    def take_reports() -> None:
        for rank, worker in started.items():
            for report in worker.reports():
                if report.begins:
                    begun.add(rank)
                addresses.update(report.addresses or {})
                identity.update(identity_variables(report.run_id, report.secret))

    def has_begun() -> bool:
        take_reports()
        return team.has_begun(begun)

    crew = Crew(
        has_begun,
        restarts=restarts,
        start_again=start_again,
        on_failure=lambda failure, others_go_on: on_failure(failure) if on_failure else None,
    )
    keeper = Keeper()
    try:
        with _sigterm_raises():
            team.open_here()
            try:
                for rank in range(workers):
                    crew.add(start(rank, team.variables(rank)))
                _watch(crew, started, timeout_s, on_poll, take_reports)
            finally:
                _finish(crew)
    finally:
        for worker in started.values():  # whom the crew did not come to know, or to see end
            worker.kill_if_running()
        for worker in started.values():
            keeper.remove(worker.pid)
            worker.close()
        keeper.close()
        team.close()
    if crew.failures:
        raise WorkerFailedError(describe(crew.failures))
    return [worker.result() for _, worker in sorted(started.items())]


def start_fork_server(also: Sequence[str] = ()) -> None:
    """Start the fork server ahead of the first :func:`launch`; returns at once.

    Args:
        also: modules that it imports besides torch, so that the workers need not; nothing that
            starts a thread on import. Where the server runs already, this does nothing.
    """
    from multiprocessing import forkserver

    # One server a process, shared with any other user of the "forkserver" start method.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *also])
    forkserver.ensure_running()


def _watch(
    crew: Crew,
    started: Mapping[int, ForkedWorker],
    timeout_s: float | None,
    on_poll: Callable[[], None] | None,
    take_reports: Callable[[], None],
) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while crew.watch():
        due_in_s = crew.next_restart_in_s()
        _wait(crew, POLL_S if due_in_s is None else min(POLL_S, due_in_s))
        take_reports()
        if on_poll is not None:
            on_poll()
        if deadline is not None and time.monotonic() >= deadline:
            late = ", ".join(map(str, sorted(crew.running)))
            text = f"timeout_s={timeout_s:g} passed, but of {len(started)} workers {late} still ran"
            if crew.failures:
                text = f"{text}\n\n{describe(crew.failures)}"
            raise WorkerFailedError(text)


def _finish(crew: Crew) -> None:
    """End who still runs; a second Ctrl+C or SIGTERM kills at once."""
    terminated: SystemExit | None = None
    while True:
        try:
            if crew.running and not crew.ending:
                crew.end(signal.SIGINT)
            if not crew.watch():
                break
            _wait(crew, 0.05)
        except KeyboardInterrupt:
            crew.kill()
        except SystemExit as error:
            terminated = error
            crew.kill()
    if terminated is not None:
        raise terminated


def _wait(crew: Crew, timeout_s: float) -> None:
    things: list[Connection | int] = []
    for worker in crew.running.values():
        assert isinstance(worker, ForkedWorker)
        things += worker.waits_for()
    multiprocessing.connection.wait(things, timeout_s)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM unwind the stack, so that no worker is left; a handler of the user's stays."""

    def terminate(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def available_cores() -> list[int]:
    """The cores this process may run on."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return list(range(os.cpu_count() or 1))


def _cores(rank: int, num_workers: int) -> set[int]:
    """Worker ``rank``'s share: a block of its own; one core, shared, where there are too few."""
    cores = available_cores()
    share = len(cores) // num_workers
    if share == 0:
        return {cores[rank % len(cores)]}
    return set(cores[rank * share : (rank + 1) * share])


def _num_threads(num_workers: int) -> int:
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdigit() else max(1, len(available_cores()) // num_workers)


def _pickled_call(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return pickled((function, tuple(args)))
    except Exception as error:
        raise ValueError(
            f"launch cannot send {function!r} and its arguments to the workers: "
            f"{type(error).__name__}: {error}"
        ) from error
