"""SIGTERM: one more checkpoint of every model, between two steps, and the end of the process."""

import gc
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import nn

from gossipdp import Checkpoints, GossipDataParallel
from gossipdp.parallel.checkpoint import read, saved_by
from gossipdp.parallel.checkpointer import Write
from gossipdp.parallel.termination import TERMINATION, Termination


def steps_saved(directory: Path) -> list[int]:
    return [saved.facts.step for saved in saved_by(directory, 0)]


def step(model: GossipDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.fixture
def terminable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model with checkpoints, in a process whose SIGTERM is as it comes."""
    monkeypatch.setattr(Termination, "LONGEST_WAIT_S", 60.0)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = GossipDataParallel(net, optimizer, checkpoints=Checkpoints(tmp_path))
    yield model, optimizer
    model.close()
    signal.signal(signal.SIGTERM, before)
    gc.unfreeze()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_between_two_steps_and_ends_the_worker(terminable, tmp_path, number):
    model, optimizer = terminable
    step(model, optimizer)
    optimizer.zero_grad()
    loss = model(torch.ones(1, 3)).sum()
    for each in (number, signal.SIGTERM):  # one of each who ends the run
        os.kill(os.getpid(), each)  # in the middle of the second step
    loss.backward()
    optimizer.step()
    with pytest.raises(SystemExit) as ended:
        step(model, optimizer)
    assert ended.value.code == 128 + number
    assert steps_saved(tmp_path) == [2]
    assert gc.get_freeze_count() > 0, "the interpreter's end would take most of a second"


def test_sigterm_in_the_middle_of_an_accumulation_saves_at_its_end(terminable, tmp_path):
    model, optimizer = terminable
    step(model, optimizer)
    optimizer.zero_grad()
    for batch in range(3):
        model(torch.ones(1, 3)).sum().backward()
        if batch == 0:
            os.kill(os.getpid(), signal.SIGTERM)
    optimizer.step()
    with pytest.raises(SystemExit):
        model(torch.ones(1, 3))
    assert steps_saved(tmp_path) == [2]


def test_sigterm_while_the_next_batch_is_loaded_saves_after_that_batch(terminable, tmp_path):
    model, optimizer = terminable
    model._batches.budget_samples = 100

    class Loader:
        def __iter__(self):
            for index in range(5):
                if index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield torch.ones(1, 3)

    def train() -> None:
        for batch in model.batches(Loader()):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    with pytest.raises(SystemExit):
        train()
    assert steps_saved(tmp_path) == [2]


def test_sigterm_after_the_last_batch_saves_before_the_consolidation(terminable, tmp_path):
    model, optimizer = terminable
    model._batches.budget_samples = 2
    for batch in model.batches([torch.ones(1, 3)]):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        model.consolidate()
    assert steps_saved(tmp_path) == [2]


def test_a_last_checkpoint_takes_what_it_takes(
    terminable, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    model, optimizer = terminable
    step(model, optimizer)
    begin = model._checkpointer._writer.begin

    def slowly(write: Write) -> Future[Path]:
        TERMINATION._send_again()  # LONGEST_WAIT_S is over
        return begin(write)

    monkeypatch.setattr(model._checkpointer._writer, "begin", slowly)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        step(model, optimizer)
    assert steps_saved(tmp_path) == [1]


def test_a_last_checkpoint_that_cannot_be_made_ends_the_worker_too(
    terminable, caplog: pytest.LogCaptureFixture
):
    model, optimizer = terminable

    class Unsaved:
        value: object = 0

        def state_dict(self) -> dict[str, object]:
            return {"value": self.value}

    unsaved = Unsaved()
    model.also_checkpoint(unsaved=unsaved)
    unsaved.value = object()
    step(model, optimizer)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        step(model, optimizer)
    assert "is stopped; nothing saved: " in caplog.text


def test_a_loop_that_does_not_get_there_is_ended_all_the_same(
    terminable, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Termination, "LONGEST_WAIT_S", 0.05)
    model, optimizer = terminable
    step(model, optimizer)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        threading.Event().wait(20)
    assert not saved_by(tmp_path, 0)


def test_a_signal_that_comes_after_another_process_s_breaks_into_no_save(terminable):
    """As with shards, which end together though only one of them was asked yet."""
    with pytest.raises(SystemExit):
        TERMINATION.save_and_end()
    os.kill(os.getpid(), signal.SIGTERM)
    assert TERMINATION._again is None


def test_a_forked_child_ends_by_sigterm_at_once(terminable):
    """A loader's process is ended so, and waited for."""
    ready, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        time.sleep(20)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_handler_of_the_user_s_stays(tmp_path: Path):
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = GossipDataParallel(net, optimizer, checkpoints=Checkpoints(tmp_path))
        os.kill(os.getpid(), signal.SIGTERM)
        step(model, optimizer)
        step(model, optimizer)
        model.close()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("end", ["close", "consolidate"])
def test_a_closed_model_trains_on_alone_and_neither_ends_the_process_nor_saves(
    terminable, tmp_path, end
):
    model, optimizer = terminable
    step(model, optimizer)
    getattr(model, end)()
    for _ in range(3):
        step(model, optimizer)
    assert steps_saved(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_is_due_when_a_model_is_closed_is_not_saved_later(terminable, tmp_path):
    model, optimizer = terminable
    step(model, optimizer)
    model._checkpointer.is_due = True
    model.close()
    step(model, optimizer)
    assert steps_saved(tmp_path) == []


def test_a_second_ctrl_c_interrupts_at_once(terminable, tmp_path):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert steps_saved(tmp_path) == []


def test_ctrl_c_is_a_notebook_s_own(terminable, monkeypatch: pytest.MonkeyPatch):
    model, _ = terminable
    model.close()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    termination = Termination()
    termination.add(model._checkpointer)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == termination._handle
    termination.remove(model._checkpointer)


def test_a_signal_that_no_model_answers_ends_the_process_when_the_last_is_closed(terminable):
    model, _ = terminable
    ready, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        child = os.fork()
    if child == 0:
        termination = Termination()
        termination.add(model._checkpointer)
        os.kill(os.getpid(), signal.SIGTERM)
        os.write(tell, b"x" if termination.is_asked else b"-")
        termination.remove(model._checkpointer)
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


class Pair:
    """A generator and its critic, each wrapped by itself, as in a GAN's script."""

    def __init__(self, directory: Path) -> None:
        self.models, self.optimizers = [], []
        for name in ("maker", "critic"):
            net = nn.Linear(3, 3)
            optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
            saving = Checkpoints(directory / name)
            model = GossipDataParallel(net, optimizer, checkpoints=saving, budget_samples=50)
            self.models.append(model)
            self.optimizers.append(optimizer)

    def body(self, batch: torch.Tensor, *, signal_in: str = "") -> None:
        """One pass of the loop's body: a step of the maker, then one of the critic."""
        maker, critic = self.models
        for name, optimizer in zip(("maker", "critic"), self.optimizers, strict=True):
            optimizer.zero_grad()
            loss = critic(maker(batch) if name == "maker" else batch).square().sum()
            if name == signal_in:
                os.kill(os.getpid(), signal.SIGTERM)
            loss.backward()
            optimizer.step()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Termination, "LONGEST_WAIT_S", 60.0)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    made = Pair(tmp_path)
    yield made
    for model in made.models:
        model.close()
    signal.signal(signal.SIGTERM, before)
    gc.unfreeze()


@pytest.mark.parametrize("loop", ["own", "batches of the maker", "batches of the critic"])
@pytest.mark.parametrize("signal_in", ["maker", "critic"])
def test_one_sigterm_saves_all_models(pair: Pair, tmp_path: Path, loop: str, signal_in: str):
    """All are saved at the end of the body: both have made as many steps, and none is half way."""

    def train() -> None:
        batches = [torch.ones(1, 3)] * 5
        if loop != "own":
            batches = pair.models["critic" in loop].batches(batches)
        for number, batch in enumerate(batches):
            pair.body(batch, signal_in=signal_in if number == 1 else "")

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 128 + signal.SIGTERM
    saved = [steps_saved(tmp_path / name) for name in ("maker", "critic")]
    assert saved == [[2], [2]]
    for name, model in zip(("maker", "critic"), pair.models, strict=True):
        (file,) = saved_by(tmp_path / name, 0)
        from_file, _ = read(file.path)
        for key, value in model.module.state_dict().items():
            assert torch.equal(from_file[f"model/{key}"], value), (name, key)


def test_a_model_that_cannot_be_saved_keeps_no_other_from_being_saved(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pair.body(torch.ones(1, 3))
    with torch.no_grad():
        pair.models[0].module.weight[0, 0] = float("nan")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        pair.body(torch.ones(1, 3))
    saved = [steps_saved(tmp_path / name) for name in ("maker", "critic")]
    assert saved == [[], [1]]
    assert "is stopped; nothing saved: the parameters or buffers" in caplog.text


def test_a_model_that_was_closed_is_not_saved_and_the_other_is(pair: Pair, tmp_path: Path):
    pair.body(torch.ones(1, 3))
    pair.models[0].close()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        pair.models[1](torch.ones(1, 3))
    assert [steps_saved(tmp_path / name) for name in ("maker", "critic")] == [[], [1]]
