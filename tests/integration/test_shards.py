"""Replicas of two processes, sharded by FSDP2, that train over gossip."""

import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_runs
import torch
from sharded_runs import BATCH, BUDGET

from gossipdp.launcher import supervisor

pytestmark = pytest.mark.processes
PAGE = Path(__file__).parents[2] / "docs" / "shards.md"


def program(call: str) -> str:
    """Return the indented block of docs/shards.md in which ``call`` is."""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", PAGE.read_text(), re.M)
    (found,) = [textwrap.dedent(block) for block in blocks if call in block]
    return found


@pytest.fixture(scope="module")
def one_mesh(workers: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    what = tmp_path_factory.mktemp("shards"), program("dcp.save("), program("dcp.load(")
    return workers(sharded_runs.on_one_mesh, 4, what, timeout_s=100)


def test_two_by_two_ends_as_two_workers_that_are_not_sharded(one_mesh):
    """On the same data, and with exchanges at the same moments; uneven and empty shards too."""
    for rank, (sharded, plain, _) in enumerate(one_mesh):
        assert sharded.norm() > 1
        torch.testing.assert_close(sharded, plain, rtol=1e-10, atol=1e-12)
        assert torch.equal(sharded, one_mesh[rank ^ 1][0])
    assert not torch.equal(one_mesh[0][0], one_mesh[2][0])


def test_replicas_are_the_workers_of_the_run(one_mesh):
    all_seen = [seen for *_, seen in one_mesh]
    assert [seen.replica for seen in all_seen] == [0, 0, 1, 1]
    assert len({seen.seed for seen in all_seen}) == 4
    for seen in all_seen:
        assert seen.num_replicas == seen.num_averaged == 2
        assert seen.exchanges > 0
        # Counted over all processes, and all ended at the same step.
        assert BUDGET <= seen.samples <= BUDGET + 2 * 2 * BATCH * 2
        assert torch.equal(seen.values, all_seen[0].values)
    assert all_seen[0].steps == all_seen[1].steps
    assert all_seen[2].steps == all_seen[3].steps
    assert (all_seen[0].steps + all_seen[2].steps) * 2 * BATCH == all_seen[0].samples


def test_one_process_stops_the_run_for_all(one_mesh):
    steps = [seen.facts["stopped after"] for *_, seen in one_mesh]
    assert steps[0] == steps[1]
    assert steps[2:] == [7, 7]  # the one that it had stopped after, and one more


def test_a_poisoned_replica_leaves_with_all_its_processes(one_mesh):
    one, other, *ill = [seen.facts for *_, seen in one_mesh]
    assert one["healthy values"].isfinite().all()
    assert torch.equal(one["healthy values"], other["healthy values"])
    assert ill[0]["poisoned at"] == ill[1]["poisoned at"] > 5


def test_what_one_replica_saved_goes_on_over_four_processes(one_mesh):
    """By the page's own programs; model and optimizer."""
    saved = one_mesh[0][2].facts["saved"]
    for *_, seen in one_mesh:
        everything, parameters = seen.facts["loaded"]
        torch.testing.assert_close(everything, saved)
        # Two moments and the number of steps for each parameter, besides the model.
        assert saved.numel() == 3 * parameters.numel() + 4


def test_all_processes_of_a_replica_resume_from_the_same_step(one_mesh):
    steps = [seen.facts["resumed from"] for *_, seen in one_mesh]
    # One of replica 0 has lost the checkpoint of its end, and goes on from the one before.
    assert steps[0] == steps[1] == (one_mesh[0][2].steps - 1) // 5 * 5
    assert steps[2] == steps[3] == one_mesh[2][2].steps


def test_a_replica_that_lost_a_process_comes_back(workers):
    """Kill -9 of one process of replica 1: its other ends too, and both join again."""
    failures: list[str] = []
    options = {"timeout_s": 120, "max_restarts": 1, "nproc_per_replica": 2}
    options["on_failure"] = lambda failure: failures.append(failure.ending.reason)
    all_seen = workers(sharded_runs.dying_replica, 4, **options)
    assert failures == ["lost its process 1, which died of signal 9 (SIGKILL)"]
    assert [seen.facts["life"] for seen in all_seen] == [0, 0, 1, 1]
    assert [seen.num_averaged for seen in all_seen] == [2] * 4
    assert all(torch.equal(seen.values, all_seen[0].values) for seen in all_seen)
    assert all(seen.exchanges > 0 for seen in all_seen)
    assert all_seen[0].steps == all_seen[1].steps
    assert [seen.steps for seen in all_seen[2:]] == [21, 21]
    assert all_seen[2].facts["began after"] == all_seen[3].facts["began after"] > 0
    for seen in all_seen[:2]:
        assert "lost" in seen.facts["noticed"]


def test_all_processes_save_the_same_step_when_asked_to_end(workers, tmp_path, monkeypatch):
    """One that is done with it ends no other that is still saving."""
    sent: list[int] = []

    def ask_once_all_train() -> None:
        if not sent and len(list(tmp_path.glob("[01].[01]"))) == 4:
            sent.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(supervisor, "PATIENCE_S", 60)
    options = {"nproc_per_replica": 2, "on_poll": ask_once_all_train}
    with pytest.raises(SystemExit) as ended:
        workers(sharded_runs.until_asked, 4, (tmp_path,), **options)
    assert ended.value.code == 128 + signal.SIGTERM
    for replica in (0, 1):
        places = [tmp_path / f"run/shard-{each}-of-2/worker-{replica}" for each in (0, 1)]
        first, second = ([path.name for path in place.iterdir()] for place in places)
        assert len(first) == 1
        assert first == second
