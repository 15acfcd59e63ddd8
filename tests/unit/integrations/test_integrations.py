"""Integrations without their frameworks: a worker before there is a model, and Ray's meeting."""

import importlib
import os
import select
import sys
import threading
from contextlib import closing, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
from waiting import LONGEST_S, wait_until

import gossipdp.integrations.ray as integration
from gossipdp.errors import RendezvousError, WorkerFailedError
from gossipdp.integrations import single_process
from gossipdp.integrations.ray import Meeting, _Worker, launch
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.reports import Report, ReportChannel, send_report
from gossipdp.launcher.store import connect, ready_key


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("transformers", "transformers", "transformers"),
        ("accelerate", "accelerate", "transformers"),
        ("lightning", "lightning.pytorch.strategies", "lightning"),
    ],
)
def test_the_error_names_the_extra(monkeypatch, module, package, extra):
    importlib.import_module(package)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"gossipdp.integrations.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'gossipdp\[{extra}\]'"):
        importlib.import_module(f"gossipdp.integrations.{module}")


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gossipdp\[ray\]'"):
        launch(print, 1)


def launched(rank: int, num_workers: int = 4, **others: str) -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(num_workers), "LOCAL_RANK": str(rank)}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **others}


def test_a_worker_is_named_and_its_launcher_hidden():
    with mock.patch.dict(os.environ, launched(2)):
        with single_process() as worker:
            assert (worker.rank, worker.world_size, worker.is_first) == (2, 4, False)
            assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & set(os.environ)
        assert os.environ["RANK"] == "2"


def seed_of(seed: int, variables: dict[str, str]) -> int:
    with mock.patch.dict(os.environ, variables), single_process(seed) as worker:
        return worker.seed


@pytest.mark.parametrize("seed", [0, 1, 42, 2**40])
def test_seeds_are_small_enough_for_numpy_and_differ(seed):
    seeds = [seed_of(seed, launched(rank, 64)) for rank in range(64)]
    seeds += [seed_of(seed, launched(rank, 64, GOSSIPDP_RESTARTS="1")) for rank in range(64)]
    assert len(set(seeds)) == 128
    assert all(0 <= each < 2**32 for each in seeds)
    assert seeds[3] == seed_of(seed, launched(3, 64))


def test_those_that_join_have_seeds_of_their_own():
    joining = {"GOSSIPDP_JOIN": "127.0.0.1:4", "GOSSIPDP_RUN_ID": "a", "GOSSIPDP_SECRET": 16 * "s"}
    assert seed_of(0, joining) != seed_of(0, joining)


@pytest.fixture
def meeting():
    made = Meeting(3, "127.0.0.1")
    yield made
    made._plan.close()


def test_a_second_start_joins_the_others_by_their_latest_addresses(meeting):
    first = [Environment.read(meeting.variables(rank)) for rank in range(3)]
    assert [environment.rank for environment in first] == [0, 1, 2]
    assert not any(environment.is_joining for environment in first)
    assert {environment.local_rank for environment in first} == {0}
    assert not meeting.has_begun()
    store = connect(first[0], 10)
    for rank in range(3):
        store.set(ready_key(first[0].key_prefix, rank), "1")
    store.get(ready_key(first[0].key_prefix, 2))  # set() does not wait until the store has it
    assert meeting.has_begun()
    meeting.note_addresses({0: ("10.0.0.1", 1), 1: ("10.0.0.2", 2), 2: ("10.0.0.3", 3)})
    again = Environment.read(meeting.variables(1))
    assert (again.rank, again.num_restarts) == (1, 1)
    assert set(again.join) == {("10.0.0.1", 1), ("10.0.0.3", 3)}
    assert (again.run_id, again.secret) == (first[1].run_id, first[1].secret)
    assert Environment.read(meeting.variables(1)).num_restarts == 2


def test_a_death_before_all_have_begun_is_the_runs(meeting):
    meeting.variables(2)
    with pytest.raises(RendezvousError, match="worker 2 died before all workers had begun"):
        meeting.variables(2)


@pytest.mark.parametrize(
    ("has_begun", "looked_at"),
    [
        (None, ["call 0", "call 1", "call 2"]),
        (True, ["call 0", "call 1", "begun", "call 2"]),
        (False, ["call 0", "call 1", "begun"]),
    ],
)
def test_no_actor_outlives_the_run(monkeypatch, has_begun, looked_at):
    """Worker 1 fails, once all have begun or before; None: it does not fail."""
    error = type("RayError", (Exception,), {})
    meeting, *actors = made = [mock.Mock() for _ in range(4)]
    meeting.has_begun.remote.return_value = "begun"
    for rank, actor in enumerate(actors):
        actor.work.remote.return_value = f"call {rank}"
    ray, seen = mock.Mock(), []
    ray.exceptions.RayError = ray.exceptions.RayActorError = error
    ray.remote.return_value.options.return_value.remote.side_effect = made
    ray.wait = lambda waiting, num_returns: (waiting[:1], waiting[1:])

    def get(call: str) -> object:
        seen.append(call)
        if call == "call 1" and has_begun is not None:
            raise error("no good")
        return has_begun if call == "begun" else call

    ray.get = get
    monkeypatch.setattr(integration, "_import_ray", lambda: ray)
    fails = pytest.raises(WorkerFailedError, match="^worker 1 failed:\nno good$")
    with nullcontext() if has_begun is None else fails:
        assert launch(print, 3) == ["call 0", "call 1", "call 2"]
    assert seen == looked_at
    killed = [each.args[0] for each in ray.kill.call_args_list]
    assert killed == [*([] if has_begun is None else [actors[1]]), *actors, meeting]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_s_thread_sleeps_until_there_is_a_report_to_pass_on(monkeypatch, meeting, caplog):
    channel, waits, ends, handle = ReportChannel(), [], threading.Event(), mock.Mock()
    handle.variables.remote = meeting.variables
    handle.note_addresses.remote = meeting.note_addresses

    def wait(*descriptors: list) -> object:
        waits.append(descriptors)
        if ends.is_set():
            raise SystemExit  # the end of this thread
        return select.select(*descriptors)

    def function(number: int) -> int:
        assert send_report(Report(addresses={1: ("10.0.0.1", 5)}))
        assert send_report(Report(unsaved="the disk is full"))
        wait_until(lambda: "the disk is full" in caplog.text, "both reports are passed on")
        return number + int(os.environ["RANK"])

    monkeypatch.setattr(integration, "_import_ray", lambda: SimpleNamespace(get=lambda ref: ref))
    monkeypatch.setattr(integration, "ReportChannel", lambda: channel)
    monkeypatch.setattr(integration, "select", SimpleNamespace(select=wait))
    with mock.patch.dict(os.environ), closing(channel):
        assert _Worker().work(handle, 2, function, (5,)) == 7
        (thread,) = (each for each in threading.enumerate() if each.name == "gossipdp reports")
        ends.set()
        send_report(Report())  # wakes it
        thread.join(LONGEST_S)
        assert all(each == ([channel.receiver], [], []) for each in waits)
    assert meeting._plan.join_infos[0].addresses == {1: ("10.0.0.1", 5)}
