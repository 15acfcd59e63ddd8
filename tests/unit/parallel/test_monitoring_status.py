"""The status port of a worker that trains alone, and where it listens."""

import logging
import math
import re
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from torch import nn
from waiting import wait_until

from gossipdp import Counting, Monitor, Network
from gossipdp.gossip.counters import Counters, metrics_of
from gossipdp.launcher.environment import show_address
from gossipdp.observe.server import Page, StatusPort
from gossipdp.observe.status import METRICS_PATH, ask
from gossipdp.parallel.monitoring import MEAN_OF_LOSSES
from gossipdp.parallel.stats import Stats
from gossipdp.parallel.worker import Worker
from gossipdp.protocol.actions import Notice
from gossipdp_lab.report.run_log import RunLog


@pytest.fixture
def make(wrap_sgd):
    """Make a model that is closed in the end, and give its status address."""

    def make_model(**options):
        model, _ = wrap_sgd(nn.Linear(4, 2), **options)
        page = model._worker.monitoring.page
        shows = page is not None and page._server is not None
        return model, show_address(*page.announced("")) if shows else ""

    return make_model


def train(model, steps):
    for _ in range(steps):
        model(torch.ones(8, 4)).sum().backward()
        model._worker.stepped(0)


@pytest.mark.parametrize("method", ["a2cid2", "none"])
def test_a_worker_tells_how_far_it_is(make, tmp_path, method):
    """With numbers of NumPy as with all others."""
    model, address = make(
        monitor=Monitor(status_port=np.int64(0), log_dir=tmp_path),
        budget_samples=np.int64(64),
        counting=Counting(samples_per_step=np.int32(4)),
        comm_rate=np.float64(0.5),
        network=Network(timeout_s=np.float32(2.0)),
        seed=np.int64(7),
        method=method,
    )
    status = ask(address)
    assert (status.gradient_steps, status.state) == (0, "training")
    assert math.isnan(status.since_step_s)
    train(model, 5)
    status = ask_anew(model, address)
    assert (status.rank, status.world_size, status.method) == (0, 1, method)
    counted = (status.gradient_steps, status.samples, status.run_samples, status.budget_samples)
    assert (counted, status.comm_rate) == ((5, 20, 20, 64), 0.5)
    metrics = model._worker.monitoring.page._pages[METRICS_PATH].build()
    assert b'gossipdp_budget_samples{rank="0"} 64.0\n' in metrics
    assert b'gossipdp_samples_total{rank="0"} 20.0\n' in metrics
    configuration = RunLog.read(tmp_path).workers[0].start.configuration
    known = {"budget_samples": 64, "comm_rate": 0.5, "timeout_s": 2.0, "seed": 7}
    assert {name: configuration[name] for name in known} == known
    assert 0.0 <= status.since_step_s < 60.0, "not since the boot"
    (own,) = status.members
    assert (own.rank, own.state, own.status_address) == (0, "training", address)
    assert wait_until(lambda: ask_anew(model, address).members[0].since_step_s, "a look at it") > 0
    model.consolidate()
    with pytest.raises(ConnectionRefusedError):
        ask(address)


def test_a_metric_needs_no_other_place_than_its_field(make, tmp_path, monkeypatch):
    counted = {}
    for index, (name, metric) in enumerate(metrics_of(Counters).items()):
        value = f"as {name}" if metric.kind == "word" else 100 + index
        counted[name] = {7: value} if metric.label else value
    own = {"gradient_steps": 1, "samples": 8}  # the log counts these itself
    noticed = tuple(Notice(1, "lost", float(number), number) for number in range(1, 31))
    stats = Stats(rank=0, world_size=1, noticed=noticed, **counted)
    monkeypatch.setattr(Worker, "stats", lambda self: stats)
    model, address = make(monitor=Monitor(status_port=0, log_dir=tmp_path))
    train(model, 1)
    status = ask(address)
    metrics = model._worker.monitoring.page._pages[METRICS_PATH].build().decode()
    model.close()
    last = RunLog.read(tmp_path).workers[0].counts[-1]
    assert {name: getattr(status, name) for name in counted} == counted
    assert status.noticed == noticed[10:], "the last 20"
    assert {name: getattr(last, name) for name in counted} == counted | own
    for name, metric in metrics_of(Counters).items():
        if metric.kind == "word":
            line = rf'^gossipdp_{name}{{.*,word="as {name}"}} 1\.0$'
            assert re.search(line, metrics, re.MULTILINE)
            continue
        value = counted[name][7] if metric.label else counted[name]
        full_name = f"gossipdp_{name}_total" if metric.kind == "counter" else f"gossipdp_{name}"
        assert f"# HELP {full_name} {metric.help}\n# TYPE {full_name} {metric.kind}\n" in metrics
        assert re.search(rf"^{full_name}{{.*}} {value}\.0$", metrics, re.MULTILINE), name


def ask_anew(model, address):
    """Without the page that was built just before."""
    model._worker.monitoring.page._server._built.clear()
    return ask(address)


def test_what_the_script_logs_and_the_budget_of_its_epochs_are_shown(make):
    model, address = make(monitor=Monitor(status_port=0))
    assert (ask(address).logged, ask(address).budget_samples) == ({}, None)
    for step in range(2 * MEAN_OF_LOSSES):
        loss = torch.tensor(float(step), requires_grad=True)
        model.log(loss=loss, lr=0.1 * step, name="text")
    logged = ask_anew(model, address).logged
    assert logged["loss"] == 1.5 * MEAN_OF_LOSSES - 0.5
    assert set(logged) == {"loss", "lr"}
    model.log(loss=math.nan)
    assert ask_anew(model, address).logged["loss"] is None
    for number in range(200):
        model.log(**{f"value {number}": number})
    assert len(ask_anew(model, address).logged) == 101
    model.epochs([torch.ones(10, 2)], 3, samples=20)
    assert ask_anew(model, address).budget_samples == 60


def test_the_argument_counts_before_the_variable(make, monkeypatch, caplog):
    monkeypatch.setenv("GOSSIPDP_STATUS_PORT", "1")
    monkeypatch.setenv("GOSSIPDP_STATUS_HOST", "127.0.0.2")
    with caplog.at_level(logging.INFO, "gossipdp"):
        _, address = make(monitor=Monitor(status_port=0))
    assert address.startswith("127.0.0.2:")
    assert f"worker 0 shows its status at http://{address}/status" in caplog.text
    _, address = make(monitor=Monitor(status_port=0, status_host="127.0.0.1"))
    assert address.startswith("127.0.0.1:")


def test_each_rank_has_a_port_of_its_own_and_shows_its_pages_there():
    page = StatusPort("127.0.0.1", 0)
    page.bind(0)
    page.show({"/": Page("text/plain", lambda: b"here")})
    first = page.announced("")[1]
    page._first_port = first - 3
    page.bind(3)
    assert page.announced("10.0.0.1") == ("127.0.0.1", first)
    with urlopen(f"http://127.0.0.1:{first}/", timeout=30) as answer:
        assert answer.read() == b"here"
    page.close()
    page = StatusPort("0.0.0.0", 0)
    page.bind(0)
    assert page.announced("10.0.0.1") == ("10.0.0.1", page._server.address[1])
    page._first_port = 65532
    page.bind(3)
    with pytest.raises(ValueError, match="worker 4 would listen on 65536, and 65535 is the last"):
        page.bind(4)
    page.close()


def test_a_port_in_use_is_a_warning_and_a_wrong_one_an_error(make, monkeypatch, caplog):
    _, address = make(monitor=Monitor(status_port=0))
    _, other = make(monitor=Monitor(status_port=int(address.rpartition(":")[2])))
    assert other == ""
    assert caplog.text.count("worker 0 shows no status, and training goes on: port ") == 1
    assert caplog.text.count("choose another") == 1
    monkeypatch.setenv("GOSSIPDP_STATUS_PORT", "-1")
    with pytest.raises(ValueError, match="GOSSIPDP_STATUS_PORT is -1"):
        make()
