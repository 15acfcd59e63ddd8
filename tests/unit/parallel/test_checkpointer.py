"""The period of checkpoints: taken between two steps, and never at the price of training."""

import threading
from concurrent import futures
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import Mock

import checkpointing
import numpy as np
import pytest
import torch
from checkpointing import WhenTold, step, steps_saved
from clocks import Clock
from run_processes import path_before, run_python
from torch import nn

from gossipdp import Checkpoints
from gossipdp.dynamics.state import State
from gossipdp.parallel import packing
from gossipdp.parallel.checkpoint import file_path, read
from gossipdp.parallel.checkpointer import BackgroundWriter

WRITER = "gossipdp.parallel.checkpointer.BackgroundWriter"


def test_one_due_during_a_write_is_taken_whatever_close_raises(linear, tmp_path, monkeypatch):
    monkeypatch.setattr(WRITER, WhenTold)
    monkeypatch.setattr(packing, "INLINE_BYTES", 0)
    model, optimizer = linear(tmp_path, 2)
    optimizer.param_groups[0]["momentum"] = 0.9
    writer = model._worker.checkpointer._writer
    step(model, optimizer, times=6)
    writer.finish()
    assert steps_saved(tmp_path) == [2]
    _, training = read(file_path(tmp_path, 0, 2))
    held = training["optimizers"][0]["state"][0]["momentum_buffer"]
    torch.testing.assert_close(held, torch.full((2, 3), 1.9))  # of then, not of the sixth step
    step(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.save_checkpoint()  # a wait that is broken off loses no write
    with monkeypatch.context() as patch:
        patch.setattr(State, "boundary", Mock(side_effect=OSError("no such thread")))
        with pytest.raises(OSError, match="no such thread"):
            model.close()
    assert steps_saved(tmp_path) == [6, 2], "at the beginning of the seventh step"


# A large model, which no line closes. Its checkpoint is written when that is waited for.
NOT_CLOSED = """
import sys, threading
import torch
from checkpointing import sgd, step
from torch import nn
from gossipdp import Checkpoints, GossipDataParallel
from gossipdp.dynamics import state
from gossipdp.parallel import checkpointer

state.LEAST_HELPED_VALUES = 1
torch.set_num_threads(2)
closing = threading.Event()

class Waiting(checkpointer.BackgroundWriter):
    def begin(self, write):
        return super().begin(lambda advance: (closing.wait(60), write(advance))[1])

    def wait(self, written):
        closing.set()
        super().wait(written)

checkpointer.BackgroundWriter = Waiting
net = nn.Linear(3, 2)
optimizer = sgd(net)
model = GossipDataParallel(net, optimizer, checkpoints=Checkpoints(sys.argv[1], every_steps=2))
step(model, optimizer, times=3)
sys.exit(3)
"""


@pytest.mark.processes
def test_the_exit_waits_for_the_checkpoint_of_a_large_model(tmp_path):
    variables = path_before(Path(checkpointing.__file__).parent) | {"GOSSIPDP_KERNELS": "numba"}
    ended = run_python("-c", NOT_CLOSED, str(tmp_path), environment=variables)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert steps_saved(tmp_path) == [2]


def test_none_is_taken_between_the_forward_passes_of_one_step(linear, tmp_path, monkeypatch):
    monkeypatch.setattr(WRITER, WhenTold)
    model, optimizer = linear(tmp_path, 1)
    step(model, optimizer, times=2)
    model(torch.ones(1, 3)).sum().backward()
    for _ in range(3):
        model._worker.checkpointer._writer.finish()  # from the second pass on it could be taken
        model(torch.ones(1, 3)).sum().backward()
    assert model._worker.checkpointer.is_due
    optimizer.step()
    model(torch.ones(1, 3))
    assert model.save_checkpoint() == file_path(tmp_path, 0, 3)
    assert steps_saved(tmp_path) == [3, 1]


def test_with_batches_none_is_taken_within_the_body(wrap, tmp_path, monkeypatch, at_once):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    judge, maker = (torch.optim.SGD(part.parameters(), 0.1) for part in net)
    saving = Checkpoints(tmp_path, every_steps=1)
    model = wrap(net, [judge, maker], checkpoints=saving, budget_samples=4)
    events, checkpointer = [], model._worker.checkpointer
    capture = checkpointer._capture
    monkeypatch.setattr(checkpointer, "_capture", lambda: events.append("saved") or capture())
    for batch in model.batches([torch.ones(1, 3)]):
        for optimizer in (judge, judge, maker):
            step(model, optimizer, batch)
        events.append("body")
    assert events[:2] == ["body", "saved"]
    assert (events.count("body"), model.stats().gradient_steps) == (4, 8), "steps of the first"
    assert ("saved", "saved") not in pairwise(events)
    events.clear()
    step(model, judge)  # in a loop of one's own again
    model(torch.ones(1, 3))
    assert events == ["saved"]


def test_an_evaluation_of_the_average_is_neither_saved_nor_counted(linear, tmp_path, at_once):
    """With gradients, as an adversarial one has; the due one is taken after it."""
    model, optimizer = linear(tmp_path, 1)
    step(model, optimizer)
    with model.averaged():
        model(torch.ones(50, 3))
    assert steps_saved(tmp_path) == []
    step(model, optimizer)
    assert steps_saved(tmp_path) == [1]
    assert model.stats().checkpoints == 1, "one that is written is reported at the next step"
    assert model.stats().samples < 50
    step(model.module, optimizer)  # a loop that calls the module
    assert steps_saved(tmp_path) == [3, 1], "at its next step"


def test_a_state_that_becomes_unsavable_ends_no_training(linear, tmp_path, at_once, caplog):
    model, optimizer = linear(tmp_path, 1)
    best = 0.0
    model.also_checkpoint(stopper=Mock(state_dict=lambda: {"best": best}))
    step(model, optimizer)
    best = np.float32(1)
    step(model, optimizer, times=2)
    assert (model.stats().gradient_steps, model.stats().checkpoints_failed) == (3, 2)
    assert "stopper" in caplog.text
    assert model.consolidate().gradient_steps == 3


def test_a_new_name_starts_afresh_and_none_comes_after_the_first_step(linear, tmp_path, caplog):
    model, optimizer = linear(tmp_path)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.also_checkpoint(schedule=schedule)
    with pytest.raises(ValueError, match="'schedule' is saved with the checkpoints already"):
        model.also_checkpoint(schedule=schedule)
    model.save_checkpoint()
    model.close()
    model, optimizer = linear(tmp_path, resume="auto")
    optimizer.param_groups[0]["lr"] = 3e-4
    model.also_checkpoint(scaler=torch.amp.GradScaler("cpu"))
    assert optimizer.param_groups[0]["lr"] == 3e-4, "the script has set it since"
    assert "holds nothing of 'scaler'" in caplog.text
    step(model, optimizer)
    with pytest.raises(ValueError, match="before its first step"):
        model.also_checkpoint(other=schedule)


def test_a_write_goes_on_as_long_as_it_advances_and_is_given_up_where_it_stands_still(monkeypatch):
    clock, begun, may_end = Clock(), SimpleQueue(), threading.Event()
    writer = BackgroundWriter(0, clock)

    def write(advance):
        begun.put(advance)
        assert may_end.wait(30)
        return Path("file")

    written = writer.begin(write)
    advance = begun.get(timeout=30)
    for _ in range(3):
        clock.now_s += 29
        assert not writer.has_ended(written)
        advance()
    wait = futures.wait  # it ends only once somebody waits
    monkeypatch.setattr(futures, "wait", lambda *given: may_end.set() or wait(*given))
    writer.wait(written)
    assert written.result() == Path("file")
    may_end.clear()
    written = writer.begin(write)
    advance = begun.get(timeout=30)
    clock.now_s += 31
    assert writer.has_ended(written)
    assert repr(written.exception()) == "TimeoutError('nothing has reached the disk for 30 s')"
    again = writer.begin(write)  # the first still hangs
    assert isinstance(again.exception(0), TimeoutError)
    with pytest.raises(TimeoutError):
        advance()
    may_end.set()
    writer._thread.join()
    following = writer.begin(lambda _: Path("next"))
    assert following.result(30) == Path("next")
    clock.now_s += 31.0  # the training loop looks so late
    assert writer.has_ended(following)
    writer.close()


def test_a_writer_leaves_no_thread_behind_that_told_its_end_and_has_not_ended():
    writer, (told, may_end, may_write) = BackgroundWriter(0), (threading.Event() for _ in range(3))
    written = writer.begin(lambda _: may_write.wait(30) and Path("first"))
    thread = writer._thread
    # Called by the writer's thread.
    written.add_done_callback(lambda _: told.set() or may_end.wait(30))
    may_write.set()
    assert told.wait(30)
    threading.Timer(0.05, may_end.set).start()
    assert writer.begin(lambda _: Path("second")).result(30) == Path("second")
    assert not thread.is_alive()
    writer.close()
