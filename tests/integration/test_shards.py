"""Replicas of two processes, sharded by FSDP2, that train over gossip."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import BATCH, BUDGET, dying_replica, on_one_mesh

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def one_mesh(workers: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return workers(on_one_mesh, 4, (tmp_path_factory.mktemp("shards"),), timeout_s=100)


def test_two_by_two_ends_as_two_workers_that_are_not_sharded(one_mesh: list[Any]) -> None:
    """The same data, and exchanges at the same moments; x and c, uneven and empty shards too."""
    for rank, (sharded, plain, *_) in enumerate(one_mesh):
        assert sharded.norm() > 1
        torch.testing.assert_close(sharded, plain, rtol=1e-10, atol=1e-12)
        assert torch.equal(sharded, one_mesh[rank ^ 1][0])
    assert not torch.equal(one_mesh[0][0], one_mesh[2][0])


def test_replicas_are_the_workers_of_the_run(one_mesh: list[Any]) -> None:
    all_seen = [seen for _, _, seen, _ in one_mesh]
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


def test_the_average_is_there_for_a_while(one_mesh: list[Any]) -> None:
    for _, _, seen, _ in one_mesh:
        assert seen.facts["average differs"]
        assert seen.facts["forward is of the average"]
        assert seen.facts["own are back"]


def test_what_one_replica_saved_goes_on_over_four_processes(one_mesh: list[Any]) -> None:
    for *_, more in one_mesh:
        torch.testing.assert_close(more["resharded"], one_mesh[0][2].facts["saved"])


def test_all_processes_of_a_replica_resume_from_the_same_step(one_mesh: list[Any]) -> None:
    steps = [more["resumed from"] for *_, more in one_mesh]
    assert steps[0] == steps[1] == one_mesh[0][2].steps // 5 * 5 - 5
    assert steps[2] == steps[3] == one_mesh[2][2].steps // 5 * 5
    assert all(more["moments"] == {"DTensor"} for *_, more in one_mesh)


def test_a_replica_that_lost_a_process_comes_back(workers: Callable, tmp_path: Path) -> None:
    """Kill -9 of one process of replica 1: its other ends too, and both join again."""
    failures: list[str] = []
    all_seen = workers(
        dying_replica,
        4,
        (tmp_path, 1),
        timeout_s=120,
        max_restarts=1,
        nproc_per_replica=2,
        on_failure=lambda failure: failures.append(failure.ending.reason),
    )
    assert failures == ["lost its process 1, which died of signal 9 (SIGKILL)"]
    assert [seen.facts["life"] for seen in all_seen] == [0, 0, 1, 1]
    assert [seen.num_averaged for seen in all_seen] == [2] * 4
    assert all(torch.equal(seen.values, all_seen[0].values) for seen in all_seen)
    assert all(seen.exchanges > 0 for seen in all_seen)
    assert all_seen[0].samples >= 2 * BUDGET
    for seen in all_seen[:2]:
        assert "dead" in seen.facts["noticed"]
