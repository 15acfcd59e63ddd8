"""Integrations without their frameworks: a worker before there is a model, and Ray's meeting."""

import importlib
import os
import sys
from unittest import mock

import pytest
from waiting import wait_until

import gossipdp.integrations.ray as integration
from gossipdp.errors import RendezvousError, WorkerFailedError
from gossipdp.integrations import single_process
from gossipdp.integrations.ray import Meeting, _Worker, launch
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.reports import Report
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
    assert seeds[3] == 1_009 * (1_000_003 * seed + 3) % 2**32, "a later version draws the same"


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
    places = [(each.rank, each.local_rank, each.is_joining) for each in first]
    assert places == [(rank, 0, False) for rank in range(3)]
    assert not meeting.has_begun()
    store = connect(first[0], 10)
    for rank in range(3):
        store.set(ready_key(first[0].key_prefix, rank), "1")
    # The store answers a moment before the thread that made it hands it to the meeting.
    wait_until(meeting.has_begun, "the meeting has seen that all have begun")
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


def test_no_actor_outlives_the_run(monkeypatch):
    ray, error = mock.Mock(), type("RayError", (Exception,), {})
    _, *actors = made = [mock.Mock() for _ in range(4)]  # the first is the meeting
    ray.exceptions.RayError = ray.exceptions.RayActorError = error
    ray.remote.return_value.options.return_value.remote.side_effect = made
    ray.wait = lambda waiting, num_returns: (waiting[:1], waiting[1:])
    ray.get.side_effect = [7, error("no good"), False]  # the run had not begun
    monkeypatch.setattr(integration, "_import_ray", lambda: ray)
    with pytest.raises(WorkerFailedError, match=r"^worker 1 failed:\nno good$"):
        launch(print, 3)
    assert [each.args[0] for each in ray.kill.call_args_list] == [actors[1], *actors, made[0]]


def test_a_worker_waits_for_reports_and_passes_them_on(monkeypatch, caplog):
    ray, channel, meeting, select, threads = (mock.Mock() for _ in range(5))
    ray.get.return_value, addresses = {}, {1: ("10.0.0.1", 5)}
    channel.take.return_value = [Report(unsaved="no room"), Report(addresses=addresses)]
    select.select.side_effect = [None, SystemExit]
    for name, made in (("_import_ray", ray), ("ReportChannel", channel), ("report_variables", {})):
        monkeypatch.setattr(integration, name, mock.Mock(return_value=made))
    for name, module in (("select", select), ("threading", threads)):
        monkeypatch.setattr(integration, name, module)
    assert _Worker().work(meeting, 2, sum, ([3, 4],)) == 7
    with pytest.raises(SystemExit):
        threads.Thread.call_args.kwargs["target"]()
    assert select.select.call_args_list[0].args == ([channel.receiver], [], [])
    meeting.note_addresses.remote.assert_called_once_with(addresses)
    assert caplog.messages == ["no room"]
