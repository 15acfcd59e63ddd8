import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call, patch

import cloudpickle
import psutil
import pytest
from run_processes import VARIABLES, runs
from waiting import LONGEST_S, wait_until

from gossipdp.errors import RendezvousError, WorkerFailedError
from gossipdp.launcher import cores, local, reports
from gossipdp.launcher.local import ForkedWorker, ScriptWorker
from gossipdp.launcher.processes import Ending, WorkerProcess, exit_reason
from gossipdp.launcher.store import HostedStore


@pytest.mark.parametrize(
    ("limit", "num_workers", "expected"), [(4.5, 2, 2), (4.5, 8, 1), (math.inf, 2, 32)]
)
def test_threads_heed_the_limit_of_a_container(monkeypatch, limit, num_workers, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(cores, "limit", lambda: (limit, Path()))
    assert cores.num_threads(num_workers) == expected


@pytest.mark.parametrize(
    ("kind", "has_launcher", "told"),
    [(RendezvousError, True, ["nobody came"]), (RendezvousError, False, []), (KeyError, True, [])],
)
def test_why_a_run_cannot_start_is_told_to_the_launcher_alone_unless_a_hook_shows_it(
    kind, has_launcher, told, monkeypatch, capsys
):
    """Without a launcher, and for other errors, Python shows the traceback."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    reports.say_instead_of_traceback()
    sys.excepthook(RendezvousError, RendezvousError("nobody came"), None)
    with closing(reports.ReportChannel()) as channel:
        for name, value in reports.report_variables(channel.sender).items():
            monkeypatch.setenv(name, value)
        for error in (RendezvousError("the models differ"), KeyError("its own")):
            sys.excepthook(type(error), error, None)
        assert channel.take() == [reports.Report(says="the models differ")]
    shown = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["nobody came", "'its own'"]
    monkeypatch.setattr(sys, "excepthook", own := Mock())
    reports.say_instead_of_traceback()
    assert sys.excepthook is own


def test_process_1_reaps_what_a_dead_worker_left_behind():
    """It inherits orphans, as a subreaper does (prctl(2)), and is not their first parent."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    with ExitStack() as at_the_end:
        at_the_end.callback(prctl, set_child_subreaper, 0)
        assert prctl(set_child_subreaper, 1) == 0
        words = [sys.executable, "-c", "import os, signal; os.fork(); signal.pause()"]
        worker = ScriptWorker(words, VARIABLES)
        at_the_end.callback(worker.discard)
        assert worker.reports.sender.fileno() == -1, "the worker alone has it"
        (left,) = wait_until(psutil.Process(worker.pid).children, "it has a child")
        worker.send(signal.SIGKILL)
        wait_until(lambda: worker.poll() is not None, "it has died")
        assert runs(left.pid)
        worker.kill_group()
        wait_until(lambda: not runs(left.pid), "its child has died too")
        assert psutil.pid_exists(left.pid), "it is a zombie"
        worker.close()
        assert not psutil.pid_exists(left.pid)


def test_a_process_that_hangs_in_the_kernel_is_given_up(monkeypatch):
    worker = ScriptWorker([sys.executable, "-c", "import signal; signal.pause()"], VARIABLES)
    with monkeypatch.context() as patch:
        patch.setattr("gossipdp.launcher.local.UNKILLABLE_S", 0.0)
        patch.setattr(worker, "kill", lambda: None)
        worker.discard()
    assert runs(worker.pid)
    worker.discard()
    assert worker._process.returncode == -signal.SIGKILL


def test_a_forked_worker_that_the_fork_server_has_reaped_gets_no_signal(monkeypatch):
    """One that ends just before the signal gets it in vain."""
    context, signals, answer = Mock(), Mock(), pickle.dumps((Ending(), "a result"))
    made, process = context.Process, context.Process.return_value
    process.pid, process.exitcode = 7, None
    process.start = lambda: os.write(made.call_args.kwargs["kwargs"]["writer"].fileno(), answer)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    for name in ("kill", "killpg"):
        getattr(signals, name).side_effect = ProcessLookupError
        monkeypatch.setattr(os, name, getattr(signals, name))
    with closing(ForkedWorker(b"", {"LOCAL_RANK": "0"}, 1)) as worker:
        assert worker.reports.sender.fileno() == -1, "the worker alone has it"
        worker.send(signal.SIGSTOP)
        worker.kill()
        assert worker.poll() is None
        process.exitcode = 0
        worker.send(signal.SIGCONT)
        worker.kill_group()
        assert (worker.poll(), worker.result) == (Ending(), "a result")
    killed = [call.killpg(7, signal.SIGKILL), call.kill(7, signal.SIGKILL)]
    assert signals.mock_calls == [call.kill(7, signal.SIGSTOP), *killed, killed[0]]
    process.close.assert_called_once_with()


BY_ZERO = "ZeroDivisionError: division by zero"
PATCHED = ("os.setpgid", "os.killpg", "torch.set_num_threads", "multiprocessing.connection.wait")
PATCHED += ("multiprocessing.parent_process", "multiprocessing.set_start_method")
PATCHED += tuple(f"gossipdp.launcher.local.{it}" for it in ("atexit", "gc", "threading", "time"))


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (lambda: 7, 0, ("", [], 7)),
        (sys.exit, 0, ("", [], None)),
        (lambda: sys.exit("no data"), 1, ("ended with exit code 1", ["no data"], None)),
        (lambda: 1 / 0, 1, ("raised ZeroDivisionError", [BY_ZERO], None)),
        (lambda: signal.default_int_handler(2, None), 130, None),
    ],
)
def test_the_life_of_a_forked_worker(function, code, said, monkeypatch):
    """It says how it ended. If its launcher is gone, it has the time to save."""
    did, (reader, writer) = Mock(), multiprocessing.Pipe(duplex=False)
    for target in PATCHED:
        monkeypatch.setattr(target, getattr(did, target.rpartition(".")[2]))
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    payload, variables = cloudpickle.dumps((function, ())), {"GOSSIPDP_GRACE_S": "7"}
    with reader, closing(reports.ReportChannel()) as channel, patch.dict(os.environ):
        with pytest.raises(SystemExit) as ended:
            local.work(payload, variables, 3, writer=writer, reports=channel.sender)
        assert set(os.environ) == {"GOSSIPDP_GRACE_S", reports.REPORT_VARIABLE}
        answer = os.read(reader.fileno(), 1 << 16)
        did.threading.Thread.call_args.kwargs["target"]()
    assert ended.value.code == code
    ending, result = pickle.loads(answer) if answer else (None, None)
    assert (ending and (ending.reason, ending.details.splitlines()[-1:], result)) == said
    assert "launcher/local" not in getattr(ending, "details", ""), "it is of the function alone"
    assert (sys.last_value is not None) == (code == 1)
    assert did.atexit.mock_calls == [call._clear(), call._run_exitfuncs()]
    did.setpgid.assert_called_once_with(0, 0)
    did.set_num_threads.assert_called_once_with(3)
    ends = call.killpg(0, signal.SIGTERM), call.time.sleep(7.0), call.killpg(0, signal.SIGKILL)
    assert did.mock_calls[-4:] == [call.wait([did.parent_process().sentinel]), *ends]


class Forked(WorkerProcess):
    """In place of a process of ``launch``: it ends as ``how`` says, or at a signal."""

    pid, how, unsaved = 2**30, None, None  # no process has this number

    def __init__(self, payload: bytes, variables: dict[str, str], num_threads: str) -> None:
        super().__init__()
        place = variables["LOCAL_RANK"], variables["GOSSIPDP_WORLD_SIZE"], variables["A"]
        self.result = pickle.loads(payload), place, num_threads

    def poll(self) -> Ending | None:
        return self.how

    def send(self, number: int) -> None:
        self.how = Ending(exit_reason(-number))
        report = reports.Report(unsaved=self.unsaved)
        reports.send_report(report, reports.report_variables(self.reports.sender))


@pytest.mark.usefixtures("plain_sigterm")
@pytest.mark.parametrize(
    ("how", "unsaved", "raised"),
    [
        (
            None,
            None,
            (WorkerFailedError, "^timeout_s=0 passed, but of 6 workers 0, 1, 2 still ran$"),
        ),
        (
            Ending("died"),
            None,
            (WorkerFailedError, "workers 0, 1, 2 lost its process 0, which died"),
        ),
        (signal.SIGINT, None, (KeyboardInterrupt, "^$")),
        (signal.SIGTERM, None, (SystemExit, "^143$")),
        (signal.SIGTERM, "no room", (SystemExit, "^1$")),
    ],
)
def test_a_launch_ends_as_its_workers_do(how, unsaved, raised, monkeypatch, caplog):
    """If all end well it returns their results by rank. Three replicas have two processes each."""
    is_signal, failed = isinstance(how, signal.Signals), list[int]()
    monkeypatch.setattr(HostedStore, "open_in_background", Mock())  # would import torch
    monkeypatch.setattr(Forked, "how", None if is_signal else how)
    monkeypatch.setattr(Forked, "unsaved", unsaved)
    replaced = {"start_fork_server": Mock(), "num_threads": str, "ForkedWorker": Forked}
    for name, made in replaced.items():
        monkeypatch.setattr(local, name, made)
    launch = partial(local.launch, max, 6, (3, 4), environment={"A": "b"}, nproc_per_replica=2)
    with pytest.raises(raised[0], match=raised[1]):
        launch(
            timeout_s=0.0 if how is None else LONGEST_S,
            on_poll=lambda: is_signal and signal.raise_signal(how),
            on_failure=lambda failure: failed.append(failure.rank),
        )
    assert caplog.messages == [f"worker {rank}: {unsaved}" for rank in range(3) if unsaved]
    assert failed == ([0, 1, 2] if how == Ending("died") else [])
    monkeypatch.setattr(Forked, "how", Ending())
    results = [((max, (3, 4)), (str(rank), "3", "b"), "6") for rank in range(6)]
    assert launch(timeout_s=LONGEST_S) == results


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="world_size is 0; it must be at least 1"):
        local.launch(os.getpid, world_size=0)
    with pytest.raises(ValueError, match="world_size is 3; it counts processes, and must be a mul"):
        local.launch(os.getpid, 3, nproc_per_replica=2)
    with pytest.raises(ValueError, match="cannot send <built-in function print> and its arg"):
        local.launch(print, 1, (threading.Lock(),))
