import ctypes
import math
import os
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from run_processes import VARIABLES, runs
from waiting import wait_until

from gossipdp.errors import RendezvousError
from gossipdp.launcher import cores, reports
from gossipdp.launcher.local import ForkedWorker, ScriptWorker


@pytest.mark.parametrize(
    ("limit", "num_workers", "expected"), [(4.5, 2, 2), (4.5, 8, 1), (math.inf, 2, 32)]
)
def test_threads_heed_the_limit_of_a_container(monkeypatch, limit, num_workers, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(cores, "limit", lambda: (limit, Path()))
    assert cores.num_threads(num_workers) == expected


def test_why_a_run_cannot_start_is_told_to_the_launcher_alone_unless_a_hook_shows_it(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    reports.say_instead_of_traceback()
    with closing(reports.ReportChannel()) as channel:
        for name, value in reports.report_variables(channel.sender).items():
            monkeypatch.setenv(name, value)
        sys.excepthook(RendezvousError, RendezvousError("the models differ"), None)
        assert channel.take() == [reports.Report(says="the models differ")]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "excepthook", own := Mock())
    reports.say_instead_of_traceback()
    assert sys.excepthook is own


@pytest.mark.parametrize(
    ("kind", "text"), [(RendezvousError, "nobody came"), (KeyError, "of the script's own")]
)
def test_without_a_launcher_and_for_other_errors_python_shows_the_traceback(
    kind, text, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    reports.say_instead_of_traceback()
    assert sys.excepthook is not sys.__excepthook__
    if kind is KeyError:
        monkeypatch.setattr(reports, "send_report", lambda report: True)
    sys.excepthook(kind, kind(text), None)
    assert text in capsys.readouterr().err


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
    assert not runs(worker.pid)


def test_a_forked_worker_that_the_fork_server_has_reaped_gets_no_signal(monkeypatch):
    """One that ends just before the signal gets it in vain."""
    monkeypatch.setattr(os, "kill", kill := Mock(side_effect=ProcessLookupError))
    worker = ForkedWorker.__new__(ForkedWorker)
    worker.pid, worker._process = 7, SimpleNamespace(exitcode=None)
    worker.send(signal.SIGSTOP)
    worker._process = SimpleNamespace(exitcode=0)
    worker.send(signal.SIGCONT)
    kill.assert_called_once_with(7, signal.SIGSTOP)
