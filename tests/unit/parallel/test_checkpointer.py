"""When checkpoints are taken: not while an exchange runs, and never at the price of training."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from gossipdp import GossipDataParallel
from gossipdp.parallel import checkpointer, last_checkpoint
from gossipdp.parallel.checkpoint import saved_by
from gossipdp.parallel.checkpoint_writer import Draft
from gossipdp.parallel.checkpointer import Checkpointer
from gossipdp.parallel.data_position import DataPosition


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model whose exchange does not end until ``busy[2].clear()``, and how often it was asked."""
    monkeypatch.setattr(checkpointer, "WAIT_FOR_EXCHANGE_S", 0.05)
    monkeypatch.setattr(checkpointer, "LONGEST_WAIT_S", 0.05)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = GossipDataParallel(net, optimizer, checkpoint_dir=tmp_path, checkpoint_every=2)
    running = ["an exchange"]
    pause = model._engine._loop.pause
    asked: list[float] = []

    def still_running() -> bool:
        asked.append(time.monotonic())
        return pause() and not running

    monkeypatch.setattr(model._engine._loop, "pause", still_running)
    yield model, optimizer, running, asked
    model.close()


def step(model: GossipDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_long_exchange_is_waited_for_once_and_then_taken_up_when_it_has_ended(busy, tmp_path):
    model, optimizer, running, asked = busy
    for _ in range(3):
        step(model, optimizer)
    assert model._checkpointer.pause_s >= 0.05  # at the third forward pass
    assert len(asked) > 1
    num_asked = len(asked)
    step(model, optimizer)
    assert len(asked) <= num_asked + 2  # one look at a time, without waiting
    assert model._checkpointer.is_due
    assert not saved_by(tmp_path, 0)
    running.clear()
    step(model, optimizer)
    model.close()
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [4]
    assert model.stats().checkpoint_pause_seconds >= 0.05


def test_the_last_one_due_waits_for_an_exchange_as_a_save_does(busy, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "WAIT_FOR_EXCHANGE_S", 0.0)
    monkeypatch.setattr(checkpointer, "LONGEST_WAIT_S", 60.0)
    model, optimizer, running, asked = busy
    pause = model._engine._loop.pause

    def end_at_the_third_look() -> bool:
        if len(asked) >= 2:
            running.clear()
        return pause()

    for _ in range(2):
        step(model, optimizer)
    monkeypatch.setattr(model._engine._loop, "pause", end_at_the_third_look)
    model.consolidate()
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [2]


def test_the_last_one_due_is_not_dropped_in_silence(busy, tmp_path, caplog):
    model, optimizer, _running, _ = busy
    for _ in range(2):
        step(model, optimizer)
    model._checkpointer.take_due(finally_=True)
    assert model._engine._protocol.pairing._answers
    model.consolidate()
    assert not saved_by(tmp_path, 0)
    assert model.stats().checkpoints_failed == 1
    assert "could NOT be taken: an exchange did not end within 0.05 s" in caplog.text


def test_exchanges_begin_again_after_a_checkpoint(busy, tmp_path):
    model, optimizer, running, _ = busy
    running.clear()
    answers = model._engine._protocol.pairing
    step(model, optimizer)
    model.save_checkpoint()
    assert answers._answers


def test_saving_on_demand_says_so_when_an_exchange_does_not_end(busy, tmp_path):
    model, optimizer, _running, _ = busy
    step(model, optimizer)
    with pytest.raises(TimeoutError, match="an exchange did not end"):
        model.save_checkpoint()
    assert model._engine._protocol.pairing._answers
    assert not saved_by(tmp_path, 0)


def test_no_checkpoint_within_averaged(busy):
    model, _optimizer, running, _ = busy
    running.clear()
    with model.averaged(), pytest.raises(RuntimeError, match=r"within model\.averaged"):
        model.save_checkpoint()
    assert model._engine._protocol.pairing._answers


def test_none_is_taken_between_the_forward_passes_of_one_step(busy, tmp_path):
    model, optimizer, running, _ = busy
    for _ in range(2):
        step(model, optimizer)

    def closure() -> torch.Tensor:
        running.clear()  # from the second pass on it could be taken
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    model(torch.ones(1, 3)).sum().backward()
    for _ in range(3):
        closure()
    assert model._checkpointer.is_due
    optimizer.step()
    model(torch.ones(1, 3))
    model.close()
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [3]


def test_with_batches_none_is_taken_within_the_body(tmp_path, monkeypatch: pytest.MonkeyPatch):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    judge, maker = (torch.optim.SGD(part.parameters(), 0.1) for part in net)
    model = GossipDataParallel(
        net, [judge, maker], checkpoint_dir=tmp_path, checkpoint_every=1, budget_samples=11
    )
    events: list[str] = []
    capture = model._engine.capture
    monkeypatch.setattr(
        model._engine, "capture", lambda wait_s: events.append("saved") or capture(wait_s)
    )
    for batch in model.batches([torch.ones(1, 3)]):
        for optimizer in (judge, judge, maker):
            model(batch).sum().backward()
            optimizer.step()
        events.append("body")
    assert events[:2] == ["body", "saved"]
    assert events.count("body") == 4
    assert ("saved", "saved") not in pairwise(events)
    model._checkpointer._wait_for_writer()
    events.clear()
    model(torch.ones(1, 3)).sum().backward()
    judge.step()  # in a loop of one's own again
    model(torch.ones(1, 3))
    assert events == ["saved"]
    model.close()


def test_a_loop_that_does_not_call_the_wrapper_is_saved_at_its_next_step(busy, tmp_path):
    model, optimizer, running, _ = busy
    running.clear()
    for _ in range(3):
        optimizer.zero_grad()
        model.module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    model.close()
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [3]


def test_names_are_taken_once_and_what_is_new_begins_anew(tmp_path, caplog):
    def make(resume: str | None) -> tuple[GossipDataParallel, torch.optim.Optimizer]:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        return GossipDataParallel(net, optimizer, checkpoint_dir=tmp_path, resume=resume), optimizer

    model, optimizer = make(None)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.also_checkpoint(schedule=schedule)
    with pytest.raises(ValueError, match="'schedule' is saved with the checkpoints already"):
        model.also_checkpoint(schedule=schedule)
    model.save_checkpoint()
    model.close()
    model, optimizer = make("auto")
    model.also_checkpoint(scaler=torch.amp.GradScaler("cpu"))
    assert "holds nothing of 'scaler'" in caplog.text
    step(model, optimizer)
    with pytest.raises(ValueError, match="before its first step"):
        model.also_checkpoint(other=schedule)
    model.close()


@pytest.fixture
def terminable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model with checkpoints, in a process whose SIGTERM is as it comes."""
    monkeypatch.setattr(last_checkpoint, "LONGEST_WAIT_S", 60.0)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = GossipDataParallel(net, optimizer, checkpoint_dir=tmp_path)
    yield model, optimizer
    model.close()
    signal.signal(signal.SIGTERM, before)


def test_sigterm_saves_between_two_steps_and_ends_the_worker(terminable, tmp_path):
    model, optimizer = terminable
    step(model, optimizer)
    optimizer.zero_grad()
    loss = model(torch.ones(1, 3)).sum()
    for _ in range(2):  # one of each who ends the run
        os.kill(os.getpid(), signal.SIGTERM)  # in the middle of the second step
    loss.backward()
    optimizer.step()
    with pytest.raises(SystemExit) as ended:
        step(model, optimizer)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [2]


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
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [2]


def test_sigterm_while_the_next_batch_is_loaded_saves_after_that_batch(terminable, tmp_path):
    model, optimizer = terminable
    model._budget_samples = 100

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
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [2]


def test_sigterm_after_the_last_batch_saves_before_the_consolidation(terminable, tmp_path):
    model, optimizer = terminable
    model._budget_samples = 2
    for batch in model.batches([torch.ones(1, 3)]):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        model.consolidate()
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [2]


def test_a_last_checkpoint_takes_what_it_takes(
    terminable, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    model, optimizer = terminable
    step(model, optimizer)
    write = model._checkpointer._writer.write

    def slow_write(draft: Draft) -> Future[Path]:
        last._send_again(signal.SIGTERM)  # LONGEST_WAIT_S is over
        return write(draft)

    last = model._checkpointer._last
    monkeypatch.setattr(model._checkpointer._writer, "write", slow_write)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        step(model, optimizer)
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [1]


def test_a_last_checkpoint_that_cannot_be_made_ends_the_worker_too(
    terminable, caplog: pytest.LogCaptureFixture
):
    model, optimizer = terminable

    class Unsaved:
        def state_dict(self) -> dict[str, object]:
            return {"value": object()}

    model.also_checkpoint(unsaved=Unsaved())
    step(model, optimizer)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        step(model, optimizer)
    assert "SIGTERM; nothing saved: " in caplog.text


def test_a_loop_that_does_not_get_there_is_ended_all_the_same(
    terminable, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(last_checkpoint, "LONGEST_WAIT_S", 0.05)
    model, optimizer = terminable
    step(model, optimizer)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        threading.Event().wait(20)
    assert not saved_by(tmp_path, 0)


def test_a_handler_of_the_user_s_stays(tmp_path: Path):
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = GossipDataParallel(net, optimizer, checkpoint_dir=tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)
        step(model, optimizer)
        step(model, optimizer)
        model.close()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def make(tmp_path: Path, request):
    """``make(...)``: a checkpointer of worker 0 that saves in ``directory``."""

    def make(
        directory: Path = tmp_path, *, is_joining: bool, num_workers: int = 1, **options
    ) -> Checkpointer:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = GossipDataParallel(net, optimizer)
        request.addfinalizer(model.close)
        model._engine.num_workers = num_workers
        made = Checkpointer(
            model._engine,
            [optimizer],
            DataPosition(),
            method="a2cid2",
            directory=directory,
            every=None,
            keep=3,
            resumption=None,
            is_joining=is_joining,
            **options,
        )
        request.addfinalizer(made.close)
        return made

    return make


def generation(path: Path) -> int:
    (saved,) = [saved for saved in saved_by(path.parent.parent, 0) if saved.path == path]
    return saved.facts.generation


def test_who_joins_goes_on_with_the_files_of_its_earlier_life(make, tmp_path: Path):
    make(is_joining=False).save(None)
    with pytest.raises(ValueError, match="checkpoints of another run"):
        make(is_joining=False).save(None)
    make(is_joining=True).save(None)
    assert {saved.facts.generation for saved in saved_by(tmp_path, 0)} == {1}


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_who_joins_a_run_that_was_resumed_with_another_number_is_of_its_generation(
    make, tmp_path: Path, resume: str
):
    """Though nobody has saved since: the newest files are of those who were resumed."""
    make(is_joining=False, num_workers=4).save(None)
    directory, resume = (tmp_path, resume) if resume == "auto" else (tmp_path / "new", tmp_path)
    options = {"directory": directory, "is_joining": True, "resume": resume}
    assert generation(make(num_workers=2, **options).save(None)) == 2
    assert generation(make(num_workers=2, **options).save(None)) == 2, "as those here say by now"


def test_who_joins_a_run_that_was_resumed_with_the_same_number_is_of_its_generation(
    make, tmp_path: Path
):
    make(is_joining=False, num_workers=4).save(None)
    make(is_joining=True, num_workers=2, resume="auto").save(None)
    joiner = make(tmp_path / "new", is_joining=True, num_workers=2, resume=tmp_path)
    assert generation(joiner.save(None)) == 2
