"""Any run writes its log: the wrapper's ``log_dir``."""

import math
import sys
import threading
from contextlib import closing
from unittest.mock import Mock

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn
from waiting import FOR_EVER_S, wait_until

from gossipdp import Checkpoints, Counting, GossipDataParallel, Monitor, Network
from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.observe.log import RunLogWriter, worker_file
from gossipdp.parallel import monitoring
from gossipdp.protocol.actions import Notice
from gossipdp_lab.report.run_log import RunLog, WorkerLog


def train(log_dir, num_steps=3, **options) -> GossipDataParallel:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD([{"params": net.weight}, {"params": net.bias, "lr": 0.2}], lr=0.1)
    model = GossipDataParallel(net, optimizer, monitor=Monitor(log_dir), **options)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        model.log(loss=loss, learning_rate=0.1)
    return model


def read(directory, rank=0) -> WorkerLog:
    return RunLog.read(directory).workers[rank]


def test_a_run_of_one_worker_is_logged_whole_with_any_number_and_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--output", "best.txt"])
    model = train(tmp_path / "new" / "run", budget_samples=100)
    model.log(accuracy=np.mean([0.5, 1.0]), file="caf\udce9", passed=True)
    model.consolidate()
    model.log(loss=5.0)  # alone it makes no record
    model.log(test_accuracy=np.float64(0.9), name=np.str_("best"))
    worker = read(tmp_path / "new" / "run")
    assert (worker.counts[-1].gradient_steps, worker.counts[-1].samples) == (3, 24)
    assert (len(worker.lives), worker.counts[-1].state) == (1, "left")
    assert worker.averaging.state == "averaging"
    assert (worker.end.gradient_steps, worker.end.consensus_distance) == (3, 0.0)
    before = {"learning_rate": 0.1, "accuracy": 0.75, "file": "caf\\udce9", "passed": True}
    assert worker.last_values() == before | {"test_accuracy": 0.9, "name": "best"}
    assert worker.counts[-1].loss == 5.0
    known = {"parameters": 10, "optimizer": "SGD(lr=0.1)", "budget_samples": 100}
    known |= {"script": "train.py", "workers": 1, "precision": "float32", "device": "cpu"}
    assert worker.start.configuration.items() >= known.items()


def test_notices_and_exchanges_are_written_once_however_often_the_log_is_looked_at(tmp_path):
    model = train(tmp_path)
    log, stats = model._worker.monitoring, model._worker.stats()
    notices = (Notice(1, "lost", 5, 1), Notice(2, "lost", 5.5, 2), Notice(1, "answered", 6, 3, 1.2))
    ended = tuple(CompletedExchange(1, True, at_s, 2 * at_s, 0.0) for at_s in (1.0, 2.0, 3.0, 4.0))
    for noticed, exchanged in ((1, 0), (1, 0), (1, 2), (3, 2), (3, 3), (3, 3), (3, 4)):
        news = {"noticed": notices[:noticed], "recent_exchanges": ended[:exchanged]}
        now = replace(stats, exchanges_initiated=exchanged, **news)
        log._stats = lambda now=now: now
        log._write_last()
    model.close()
    assert read(tmp_path).noticed == [*notices]
    seen = [one for each in read(tmp_path).counts for one in each.recent]
    assert seen == [(1, 1.0), (1, 2.0), (1, 3.0), (1, 4.0)]


def test_news_and_the_first_step_are_written_though_records_are_rare_by_now(tmp_path):
    model = train(tmp_path)
    log, stats = model._worker.monitoring, model._worker.stats()
    log._write_last()
    log._writer.wait_s = lambda: math.inf
    with log._lock:  # the log's thread looks no more
        notice, num_before = Notice(1, "lost", 5.0, 1), len(read(tmp_path).counts)
        for noticed in ((), (notice,), (notice,)):
            now = replace(stats, noticed=noticed, exchanges_initiated=5)  # exchanges can wait
            log._stats = lambda now=now: now
            log._look(log._writer)
        assert read(tmp_path).noticed == [notice]
        assert len(read(tmp_path).counts) == num_before + 1
        log._recorded = (1, 0, *log._recorded[2:])  # as before its first step
        log._look(log._writer)
        assert len(read(tmp_path).counts) == num_before + 2
    model.close()


def test_a_second_model_leaves_the_log_of_the_first_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GOSSIPDP_LOG_DIR", "elsewhere")
    model = train(tmp_path)
    assert "GOSSIPDP_LOG_DIR, here elsewhere, takes effect only if" in caplog.messages[0]
    monkeypatch.setenv("GOSSIPDP_LOG_DIR", str(tmp_path))  # the same directory
    other = train(tmp_path, num_steps=1)
    assert "another model of this process writes the log" in caplog.messages[1]
    model.close()
    other.close()
    worker = read(tmp_path)
    assert (len(worker.lives), worker.counts[-1].gradient_steps) == (1, 3)


def test_a_log_s_disk_that_hangs_holds_up_the_end_by_20_s_in_all(tmp_path, monkeypatch):
    model, longest_s, waits_s = train(tmp_path), monitoring.JOIN_TIMEOUT_S, []
    log, join = model._worker.monitoring, threading.Thread.join
    monkeypatch.setattr(monitoring, "JOIN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(threading.Thread, "join", lambda *of: waits_s.append(of[1:]) or join(*of))
    with log._lock:
        for number in range(1000):
            model.log(number=number)
        model.consolidate()
    assert waits_s.count((0.05,)) * longest_s == 20.0
    wait_until(lambda: read(tmp_path).end is not None, "all is written later")
    assert read(tmp_path).last_values()["number"] == 999


def test_the_variable_does_as_the_argument_and_the_secret_is_not_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIPDP_LOG_DIR", str(tmp_path))
    train(None, network=Network(secret="hush-hush-hush-hush")).close()
    assert read(tmp_path).counts[-1].gradient_steps == 3
    assert b"hush" not in worker_file(tmp_path, 0).read_bytes()


def test_the_thread_writes_while_it_trains_and_ends_with_the_run(tmp_path, monkeypatch):
    """The first step wakes it, and no two threads write at once."""
    monkeypatch.setattr(monitoring, "LOOK_EVERY_S", FOR_EVER_S)
    model = train(tmp_path)
    wait_until(lambda: read(tmp_path).counts, "a step is in the log")
    log, stats, held = model._worker.monitoring, model._worker.stats(), []
    waits_s, wait = [], log._wake.wait
    log._wake.wait = lambda limit_s: waits_s.append(limit_s) or wait(limit_s)
    log._stats = lambda: held.append(log._lock.locked()) or stats
    log._wake.set()
    wait_until(lambda: held, "it looks again")
    may_end, join = threading.Event(), log._thread.join
    log._wake.clear = may_end.wait  # it ends only once somebody waits for its end
    log._thread.join = lambda limit_s: may_end.set() or join(limit_s)
    model.close()
    assert not log._thread.is_alive()
    assert len(held) > 1, "the end writes too"
    assert all(held)
    assert set(waits_s) == {FOR_EVER_S}
    train(tmp_path / "idle", num_steps=0).close()
    assert read(tmp_path / "idle").counts == [], "nothing has happened"
    model = train(None)  # and without a directory there is none
    unasked = model._worker.monitoring
    assert (unasked._writer, unasked.page, unasked._values) == (None, None, {})
    model.close()


def test_an_earlier_run_s_other_workers_are_removed_but_no_joiner_s(tmp_path):
    """One may have joined before a worker of the start, which is late, begins its log."""
    worker_file(tmp_path, 3).write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    (model := train(tmp_path)).close()
    assert list(RunLog.read(tmp_path).workers) == [0]
    model._worker.world_size = 2  # the other one replaces its own
    run_ids = dict.fromkeys((1, 2, 3), "earlier") | {4: model._worker.run_id}
    for rank, run_id in run_ids.items():
        with closing(RunLogWriter(worker_file(tmp_path, rank), run_id=run_id)) as log:
            log.start(rank=rank, num_workers=1, configuration={})
    worker_file(tmp_path, 5).touch()  # a joiner's that begins
    monitoring._begun_log(worker_file(tmp_path, 0), model._worker).close()
    assert list(RunLog.read(tmp_path).workers) == [0, 1, 4]
    assert {"worker-5.jsonl", "notes.txt"} < {path.name for path in tmp_path.iterdir()}


def test_who_takes_another_rank_goes_on_in_that_one_s_log_and_leaves_the_other(tmp_path):
    """The worker that has its former rank writes there. Its new exchanges count notices from 1."""
    model, notice = train(tmp_path), Notice(1, "lost", 5.0, 1)
    worker, log = model._worker, model._worker.monitoring
    log._stats = lambda: replace(worker.stats(), noticed=(notice,))
    log._write_last()
    worker.rank = 4
    log.come_again()
    log._write_last()
    before = worker_file(tmp_path, 0).read_bytes()
    log.stepped(8)
    model.log(accuracy=0.5)
    model.close()
    assert worker_file(tmp_path, 0).read_bytes() == before
    former, present = (read(tmp_path, rank) for rank in (0, 4))
    assert former.noticed == present.noticed == [notice]
    assert (former.counts[-1].gradient_steps, former.last_values()) == (3, {"learning_rate": 0.1})
    assert (present.counts[-1].gradient_steps, present.counts[-1].samples) == (1, 8)
    assert present.last_values() == {"accuracy": 0.5}
    idle = train(tmp_path / "idle", num_steps=0)
    idle._worker.rank = 4
    idle._worker.monitoring.come_again()
    idle.close()
    assert read(tmp_path / "idle", 4).counts == [], "nothing has happened"


def test_a_loss_that_can_be_read_no_more_is_left_out(tmp_path):
    model = train(tmp_path, num_steps=0, counting=Counting(samples_per_step=8))
    model.log(loss=torch.empty((), device="meta"))
    model._worker.monitoring._unread.extend(torch.arange(1000.0, 1003.0))  # of a device
    for loss in range(1000):  # a record holds the mean of the last 256
        model.log(loss=np.float32(loss))
    model._worker.stepped(0)
    model.close()
    assert [step.loss for step in read(tmp_path).counts] == [874.5]
    assert model._worker.monitoring._losses[-1] == 1002.0, "they are read in their order"


def test_what_goes_wrong_in_the_log_ends_neither_thread_nor_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(RunLogWriter, "wait_s", wait_s := Mock(side_effect=RuntimeError("of ours")))
    model = train(tmp_path)
    wait_until(lambda: wait_s.called, "the log's thread has failed")
    no_thread_is_left = {"Thread.return_value.start.side_effect": RuntimeError}
    monkeypatch.setattr(monitoring, "threading", Mock(**no_thread_is_left))
    model.log(accuracy=0.5)
    model.consolidate()
    worker = read(tmp_path)
    assert (worker.end.gradient_steps, worker.last_values()["accuracy"]) == (3, 0.5)
    assert caplog.text.count("RuntimeError('of ours')): training goes on") == 1


def test_a_run_that_resumes_goes_on_with_its_log(tmp_path):
    checkpoints = Checkpoints(tmp_path / "saved", resume="auto")
    model = train(tmp_path / "log", checkpoints=checkpoints)
    model.save_checkpoint()
    model.close()
    train(tmp_path / "log", checkpoints=checkpoints).close()
    worker = read(tmp_path / "log")
    assert (worker.counts[-1].gradient_steps, len(worker.lives)) == (6, 2)
