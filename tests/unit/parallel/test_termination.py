"""SIGTERM: one more checkpoint of every model, between two steps, and the end of the process."""

import math
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from checkpointing import step, steps_saved
from torch import nn
from torch.utils.data import DataLoader

from gossipdp import Checkpoints
from gossipdp.parallel import entry
from gossipdp.parallel.checkpoint import file_path, read
from gossipdp.parallel.termination import TERMINATION, Termination, _is_interactive
from gossipdp.protocol.actions import Notice

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.usefixtures("plain_sigterm"),
]


@pytest.fixture
def terminable(linear, tmp_path):
    """Return a model that has made a step, and its optimizer."""
    model, optimizer = linear(tmp_path)
    step(model, optimizer)
    return model, optimizer


def terminate(number: int = signal.SIGTERM) -> None:
    assert signal.getsignal(number) is not signal.default_int_handler, "it would end all tests"
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_between_two_steps_and_ends_the_worker(terminable, tmp_path, number):
    model, optimizer = terminable
    optimizer.zero_grad()
    for batch in range(3):  # accumulated
        loss = model(torch.ones(1, 3)).sum()
        if batch < 2:  # one of each who ends the run
            terminate(signal.SIGTERM if batch else number)
        loss.backward()
    optimizer.step()
    with pytest.raises(SystemExit) as ended:
        step(model, optimizer)
    assert ended.value.code == 128 + number
    assert isinstance(ended.value, KeyboardInterrupt) == (number == signal.SIGINT)
    assert TERMINATION.was_asked
    assert steps_saved(tmp_path) == [2]
    if number == signal.SIGINT:  # a script that catches it goes on
        step(model, optimizer)
        assert model.consolidate().gradient_steps == 3


@pytest.mark.parametrize(("budget", "signal_at"), [(100, 1), (3, None)])
def test_sigterm_between_two_bodies_loses_no_step(terminable, tmp_path, budget, signal_at):
    model, optimizer = terminable
    model._worker.batches.budget_samples = budget

    def loader():
        for index in range(5):
            if index == signal_at:
                terminate()
            yield torch.ones(1, 3)

    def train():
        for _ in model.batches(loader()):
            step(model, optimizer)
        terminate()
        model.consolidate()

    with pytest.raises(SystemExit):
        train()
    assert steps_saved(tmp_path) == [3]


def test_a_last_checkpoint_takes_what_it_takes(terminable, tmp_path, monkeypatch):
    model, optimizer = terminable
    writer, time_is_over = model._worker.checkpointer._writer, TERMINATION._send_again
    begin = writer.begin
    monkeypatch.setattr(writer, "begin", lambda write: time_is_over() or begin(write))
    terminate()
    with pytest.raises(SystemExit):
        step(model, optimizer)
    assert steps_saved(tmp_path) == [1]


def test_a_loop_that_does_not_get_there_is_ended_all_the_same(pair, monkeypatch):
    monkeypatch.setenv("GOSSIPDP_GRACE_S", "0.05")
    pair.body(torch.ones(1, 3))

    def hang() -> None:
        terminate()
        threading.Event().wait(20)

    with pytest.raises(SystemExit) as ended:
        hang()
    assert ended.value.code == 1
    reason = "the step in hand did not end in 0.05 s"
    failures = [f"the last checkpoint could NOT be saved in {at}: {reason}" for at in pair.places]
    assert failures == TERMINATION.failures
    assert [steps_saved(place) for place in pair.places] == [[], []]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loader_s_process_that_is_signalled_too_breaks_no_step(terminable, tmp_path, number):
    """Within the step torch would raise that it was killed."""
    model, optimizer = terminable
    batches = iter(DataLoader(torch.ones(4, 3), num_workers=1, multiprocessing_context="fork"))
    next(batches)
    on_child_end = signal.getsignal(signal.SIGCHLD)
    assert callable(on_child_end), "torch's own"
    terminate(number)
    (loader,) = batches._workers
    try:
        os.kill(loader.pid, signal.SIGKILL)
        os.waitid(os.P_PID, loader.pid, os.WEXITED | os.WNOWAIT)  # torch's handler would raise here
        torch._C._error_if_any_worker_fails()  # it raises once: torch's handler was called
    except RuntimeError:
        TERMINATION._reset()  # else the model's end would bring the signal, and end all tests
        raise
    del batches
    with pytest.raises(SystemExit):
        step(model, optimizer)
    assert steps_saved(tmp_path) == [1]
    model.close()
    assert signal.getsignal(signal.SIGCHLD) == on_child_end


def test_a_signal_at_the_end_of_the_run_ends_the_process_at_once(terminable, tmp_path):
    model, _ = terminable
    model._worker.checkpointer.take_last()
    try:
        with pytest.raises(SystemExit):
            terminate()
    finally:
        TERMINATION._reset()
    model.close()
    assert steps_saved(tmp_path) == [1], "taken before the wait for the average"


def test_a_replica_of_several_goes_on_after_ctrl_c_as_one_process_does(terminable, monkeypatch):
    """What its processes agreed on at the last step is that they end."""
    model, optimizer = terminable
    terminate(signal.SIGINT)
    worker = model._worker
    worker._agreed = worker._own_view()
    assert worker._agreed.is_ending
    monkeypatch.setattr(worker, "known", lambda: worker._agreed)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer)
    assert model.consolidate().gradient_steps == 1


def test_who_ended_after_a_worker_was_asked_to_end_has_not_died(terminable, monkeypatch):
    model, optimizer = terminable
    terminate()
    asked_s, judged = TERMINATION.asked_s, []
    monkeypatch.setattr(entry, "ended_lives", lambda *given: judged.append(given[2]) or ())
    with pytest.raises(SystemExit):
        step(model, optimizer)
    assert judged == [asked_s]


def test_a_checkpoint_has_new_notices_and_an_average_no_dead(terminable, monkeypatch):
    """However old the snapshot is: a death without a notice counts as one of long ago."""
    model, _ = terminable
    loop, notice, judged = model._worker._loop, Notice(1, "lost", 5.0, 1), []
    model._worker._call(lambda: setattr(loop, "_publish_due_s", math.inf))
    model._worker._call(lambda: loop.perform([notice]))
    monkeypatch.setattr(entry, "ended_lives", lambda *given: judged.append(given) or ())
    model.save_checkpoint()
    model.consolidate()
    assert judged[0][1] == (notice,)
    assert judged[-1][2] == math.inf > judged[0][2]


def test_a_signal_that_comes_after_another_process_s_breaks_into_no_save(terminable):
    """As with shards, which end together though only one of them was asked yet."""
    with pytest.raises(SystemExit):
        TERMINATION.save_and_end()
    for number in (signal.SIGTERM, signal.SIGINT):
        terminate(number)
    assert TERMINATION._again is None


def end_of_child(body, end=lambda child: None) -> int:
    """Fork a child that runs ``body(pipe)``; once it has written there, ``end(pid)`` it."""
    ready, tell = os.pipe()
    if (child := os.fork()) == 0:
        body(tell)
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    end(child)
    _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_a_forked_child_ends_by_sigterm_at_once(terminable):
    """A loader's process is ended so, and waited for."""

    def body(pipe):
        os.write(pipe, b"x")
        time.sleep(20)

    assert end_of_child(body, lambda child: os.kill(child, signal.SIGTERM)) == signal.SIGTERM


def test_a_signal_that_no_model_answers_ends_the_process_when_the_last_is_closed(terminable):
    model, _ = terminable

    def body(pipe):
        termination = Termination()
        termination.add(model._worker.checkpointer)
        terminate()
        os.write(pipe, b"x" if termination.was_asked else b"-")
        termination.remove(model._worker.checkpointer)

    assert end_of_child(body) == signal.SIGTERM


@pytest.mark.parametrize("end", ["close", "consolidate"])
def test_a_closed_model_trains_on_and_neither_ends_the_process_nor_saves(terminable, tmp_path, end):
    model, optimizer = terminable
    model._worker.checkpointer.is_due = end == "close"
    getattr(model, end)()
    step(model, optimizer, times=3)
    assert steps_saved(tmp_path) == ([] if end == "close" else [1])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_ctrl_c_interrupts_at_once(terminable, tmp_path):
    terminate(signal.SIGINT)
    timer = TERMINATION._again
    with pytest.raises(KeyboardInterrupt):
        terminate(signal.SIGINT)
    assert (timer.name, timer.daemon) == ("gossipdp-termination", True)  # it holds up no exit
    assert steps_saved(tmp_path) == []


def test_ctrl_c_is_a_notebook_s_own(terminable, monkeypatch):
    model, _ = terminable
    model.close()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not _is_interactive(), "a script imports it"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr("gossipdp.parallel.termination.send_report", (reports := []).append)
    termination = Termination()
    termination.add(model._worker.checkpointer)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == termination._handle
    termination.remove(model._worker.checkpointer)
    assert [report.saves for report in reports] == [True, False], "the launcher waits meanwhile"


def test_signals_that_a_script_handles_or_that_a_thread_may_not_set_stay(terminable, monkeypatch):
    model, _ = terminable
    model.close()
    termination, saved = Termination(), model._worker.checkpointer
    signal.signal(signal.SIGTERM, own := lambda *_: None)
    termination.add(saved)
    assert signal.getsignal(signal.SIGTERM) is own
    assert signal.getsignal(signal.SIGINT) == termination._handle
    termination.remove(saved)
    assert signal.getsignal(signal.SIGTERM) is own
    monkeypatch.setattr("gossipdp.parallel.termination._is_main_thread", lambda: False)
    termination.add(saved)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    termination.remove(saved)


def test_a_loop_over_one_model_s_batches_ends_in_no_other():
    termination = Termination()
    looped, _, closed = models = [Mock(is_within_batches=False) for _ in range(3)]
    termination._models = models[:2]
    assert [termination.may_end_in(model) for model in models] == [True, True, False]
    looped.is_within_batches = closed.is_within_batches = True
    assert [termination.may_end_in(model) for model in models] == [True, False, False]


def test_two_models_in_one_directory_are_refused(terminable, linear, tmp_path):
    model, _ = terminable
    with pytest.raises(ValueError, match="give each a directory of its own"):
        linear(tmp_path)
    model.close()
    linear(tmp_path)


@pytest.fixture
def pair(wrap, tmp_path):
    """Wrap a generator and its critic, each by itself, as the script of a GAN does."""
    places, nets = [tmp_path / "maker", tmp_path / "critic"], [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.01, momentum=0.9) for net in nets]
    models = [
        wrap(net, optimizer, checkpoints=Checkpoints(place), budget_samples=50)
        for net, optimizer, place in zip(nets, optimizers, places, strict=True)
    ]

    def body(batch, signal_in=None):
        """Pass once through the loop's body: a step of the maker, then one of the critic."""
        for index, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            loss = models[1](batch if index else models[0](batch)).square().sum()
            if index == signal_in:
                terminate()
            loss.backward()
            optimizer.step()

    return SimpleNamespace(places=places, models=models, body=body)


@pytest.mark.parametrize("loop", [None, 0, 1])
@pytest.mark.parametrize("signal_in", [0, 1])
def test_one_sigterm_saves_all_models(pair, loop, signal_in):
    """All are saved at the end of the body: both have made as many steps, and none is half way."""
    batches = [torch.ones(1, 3)] * 5
    looped = batches if loop is None else pair.models[loop].batches(batches)

    def train():
        for number, batch in enumerate(looped):
            pair.body(batch, signal_in if number == 1 else None)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 128 + signal.SIGTERM
    for place, model in zip(pair.places, pair.models, strict=True):
        assert (steps_saved(place), model.stats().checkpoints) == ([2], 1), "it is waited for"
        from_file, _ = read(file_path(place, 0, 2))
        for key, value in model.module.state_dict().items():
            assert torch.equal(from_file[f"model/{key}"], value), (place, key)


@pytest.mark.parametrize("first", ["closed", "ended", "poisoned", "without a place"])
def test_a_model_in_any_state_keeps_no_other_from_its_save(pair, caplog, first):
    reasons = {"poisoned": "the parameters or", "without a place": "[Errno 17] File exists"}
    pair.body(torch.ones(1, 3))
    if first == "closed":
        pair.models[0].close()
    elif first == "ended":
        pair.models[0]._worker.checkpointer.take_last()
    elif first == "poisoned":
        with torch.no_grad():
            pair.models[0].module.weight[0, 0] = float("nan")
    else:
        (pair.places[0] / "worker-0").touch()
    terminate()
    with pytest.raises(SystemExit) as ended:
        pair.models[1](torch.ones(1, 3))
    assert ended.value.code == (1 if first in reasons else 128 + signal.SIGTERM)
    assert [steps_saved(place) for place in pair.places] == [[1] * (first == "ended"), [1]]
    text = f"NOT be saved in {pair.places[0]}: {reasons.get(first, '')}"
    assert (text in caplog.text) == (first in reasons)
