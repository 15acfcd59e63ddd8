"""Many runs over processes: the same as one after the other in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from gossipdp.simulate import batch
from gossipdp.simulate.batch import Job, WorkerTraceback, run_all, simulate_all
from gossipdp.simulate.scenario import Scenario

Progress = Callable[[float], None]


def jobs() -> list[Job]:
    """Runs of different lengths; none for which numba would have to compile."""
    return [
        Job(Scenario(graph=graph, num_workers=8, num_steps=steps, seed=seed), method)
        for seed, steps in ((0, 30), (1, 10), (2, 20))
        for graph, method in (("ring", "dpsgd"), ("star", "dpsgd-chebyshev"))
    ]


def test_traces_do_not_depend_on_the_number_of_processes() -> None:
    alone = [trace.digest() for trace in simulate_all(jobs(), processes=1)]
    together = [trace.digest() for trace in simulate_all(jobs(), processes=2)]
    assert together == alone
    assert len(set(alone)) == len(alone)  # so that the order of the jobs shows


@pytest.mark.parametrize("processes", [1, 2])
def test_progress_rises_to_one_and_counts_by_cost(processes: int) -> None:
    def task(name: str, progress: Progress) -> str:
        progress(0.5)
        return name

    shares: list[float] = []
    answers = run_all(
        task, ["a", "b", "c"], processes=processes, costs=[1, 2, 5], on_progress=shares.append
    )
    assert answers == ["a", "b", "c"]
    assert shares == sorted(shares)
    assert len(shares) == 6
    assert shares[-1] == 1.0
    if processes == 1:  # the longest first
        assert shares == pytest.approx([2.5 / 8, 5 / 8, 6 / 8, 7 / 8, 7.5 / 8, 1])


@pytest.mark.parametrize("processes", [1, 2])
def test_torch_computes_with_one_thread_meanwhile(processes: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        answers = run_all(
            lambda task, progress: torch.get_num_threads(), [0, 1], processes=processes
        )
        assert answers == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_no_jobs_and_no_processes() -> None:
    assert simulate_all([]) == []
    with pytest.raises(ValueError, match="processes is 0"):
        simulate_all(jobs(), processes=0)


# Failures.


@pytest.mark.parametrize("processes", [1, 2])
def test_an_exception_keeps_its_type_and_message(processes: int) -> None:
    bad = [*jobs(), Job(Scenario(num_workers=4), "telepathy")]
    with pytest.raises(ValueError, match="there is no method 'telepathy'") as caught:
        simulate_all(bad, processes=processes)
    if processes == 2:
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerTraceback)
        assert cause.module == "gossipdp.simulate.simulation"
        assert "in simulate\n" in str(cause)


def test_an_exception_that_cannot_be_pickled_keeps_its_message() -> None:
    def fail(task: int, progress: Progress) -> None:
        class PickyError(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"{one} and {two}")

        raise PickyError(1, 2)

    with pytest.raises(RuntimeError, match="PickyError: 1 and 2"):
        run_all(fail, [0, 1], processes=2)


def test_a_killed_process_is_an_error() -> None:
    def die(task: int, progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="ended without an answer, with exit code -9"):
        run_all(die, [0, 1], processes=2)


def test_what_progress_raises_ends_everything() -> None:
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    def never_ends(task: int, progress: Progress) -> None:
        progress(0.1)
        while True:
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        run_all(never_ends, [0, 1], processes=2, on_progress=stop)


# How many processes, where nobody says.


def watch_processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """How many processes are started, and for which tasks."""
    monkeypatch.setattr(batch, "num_cores", lambda: 2)
    real = batch._run_in_processes
    counts: list[tuple[int, list[int]]] = []

    def counted(function, tasks, order, num_processes, shares):  # type: ignore[no-untyped-def]
        counts.append((num_processes, list(order)))
        return real(function, tasks, order, num_processes, shares)

    monkeypatch.setattr(batch, "_run_in_processes", counted)
    return counts


def test_what_is_soon_done_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = watch_processes(monkeypatch)
    assert run_all(lambda task, progress: task + 1, [1, 2, 3]) == [2, 3, 4]
    assert counts == []


def test_what_takes_long_goes_on_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = watch_processes(monkeypatch)
    # The second task is cut short by the end of the trial.
    moments_s = iter([0.0, 1.0, 1.5, 3.0])
    monkeypatch.setattr(batch, "monotonic", lambda: next(moments_s, 3.0))
    monkeypatch.setattr(batch, "WORTH_PROCESSES_S", 6.0)

    def task(name: str, progress: Progress) -> str:
        progress(0.25)
        return name

    shares: list[float] = []
    names = ["a", "b", "c", "d"]
    assert run_all(task, names, on_progress=shares.append) == names
    assert counts == [(2, [1, 2, 3])]
    assert shares[:3] == [0.0625, 0.25, 0.3125]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


# Ctrl+C in a program of its own.

PROGRAM = """
    import time
    from gossipdp.simulate.batch import run_all

    def task(number, progress):
        progress(0.5)
        time.sleep(600)

    if __name__ == "__main__":
        run_all(task, [0, 1], processes=2, on_progress=lambda share: print(share, flush=True))
"""


@pytest.mark.processes
def test_an_interrupt_ends_all_of_them(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(2)] == ["0.25\n", "0.5\n"]
        children = psutil.Process(program.pid).children(recursive=True)
        assert len(children) >= 3  # the fork server and two of its own
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=20)
    assert errors.endswith("KeyboardInterrupt\n")
    assert errors.count("Traceback") == 1  # nothing from the others
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
