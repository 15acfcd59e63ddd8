"""Replicas of two processes, sharded by FSDP2, that train over gossip, and some that join."""

import json
import os
import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_runs
import torch
import torch.distributed as dist
from sharded_runs import BATCH, BUDGET, ENDLESS, Seen, loader, step, values, wrapped
from waiting import wait_until

from gossipdp import GossipDataParallel, Network
from gossipdp.launcher import supervisor
from gossipdp.launcher.environment import OF_REPLICA
from gossipdp.launcher.launch_plan import ask_join_infos
from gossipdp.parallel import module
from gossipdp.parallel.worker import Worker

pytestmark = pytest.mark.processes
PAGE = Path(__file__).parents[2] / "docs" / "shards.md"
NUM_SHARDS = 2


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
        # A count is up to ten steps late on its way: what is seen, and what is told.
        assert BUDGET <= seen.samples < BUDGET + 2 * 2 * BATCH * 10
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


def address_of(model: GossipDataParallel, directory: Path) -> None:
    """Write down where this process listens, whole or not at all."""
    identity = model._worker._loop.transport.identity
    path = directory / str(dist.get_rank())
    path.with_suffix(".new").write_text(json.dumps([identity.host, identity.port]))
    path.with_suffix(".new").rename(path)


def joining_variables(directory: Path) -> dict[str, str]:
    """Return what ``gossipdp run --join`` gives this process of a replica that joins."""
    paths = [directory / str(each) for each in range(NUM_SHARDS)]
    wait_until(lambda: all(path.exists() for path in paths), "the run has addresses")
    addresses = [tuple(json.loads(path.read_text())) for path in reversed(paths)]
    network = ask_join_infos(addresses, NUM_SHARDS)[int(os.environ["RANK"])]
    no_rank = dict.fromkeys(OF_REPLICA.values(), "") | {"GOSSIPDP_WORLD_SIZE": "0"}
    # The file with newer addresses ends with this object: its number may be a pipe's soon.
    own = {"GOSSIPDP_RUN_ID": str(network.run_id), "GOSSIPDP_JOIN_FILE": ""}
    return network.join_variables(-1, 0) | no_rank | own


class Lagging(Worker):
    """Hears of different numbers of steps in different networks."""

    def _join(self) -> None:
        super()._join()
        self.before = self.before._replace(step=10 + self._environment.shard)


def join_at_once(directory: Path) -> Seen:
    """Run as one of three replicas, the first or one of two that join; the learning rate is 0."""
    torch.set_num_threads(1)
    is_run = os.environ["GOSSIPDP_RANK"] == "0"
    os.environ["GOSSIPDP_WORLD_SIZE"] = "1"
    if not is_run:
        os.environ.update(joining_variables(directory))
        module.Worker = Lagging  # type: ignore[misc]
    dist.init_process_group("gloo")
    network = Network(timeout_s=2.0)  # a joining replica waits as long for others of its rank
    model, net, optimizer = wrapped(
        0 if is_run else 1, lr=0.0, graph="complete", budget_samples=ENDLESS, network=network
    )
    seen = Seen(model.rank, model.world_size, 0, model.worker_seed)
    counted = [int(each["step"]) for each in optimizer.state_dict()["state"].values()]
    seen.facts |= {"at first": values(net), "steps taken over": counted}
    seen.facts["step number"] = model._worker.step_number
    for batch in model.batches(loader(model.worker_seed)):
        step(model, optimizer, batch)
        seen.steps += 1
        if is_run and seen.steps == 1:
            address_of(model, directory)
        # The second shard's process of a replica is the last to join.
        joined = {each.rank for each in model.stats().noticed if each.kind == "joined"}
        if is_run and dist.get_rank() == 1 and joined == {1, 2} and model.stats().exchanges > 3:
            model.stop()
    seen.at_the_end(model, net)
    dist.barrier()
    dist.destroy_process_group()
    return seen


def test_two_replicas_that_join_at_once_get_a_rank_each(workers, tmp_path):
    all_seen = workers(join_at_once, 3 * NUM_SHARDS, (tmp_path,), nproc_per_replica=NUM_SHARDS)
    # Both processes of a replica have the same one.
    assert [seen.replica for seen in all_seen[::2]] == [seen.replica for seen in all_seen[1::2]]
    assert sorted(seen.replica for seen in all_seen) == [0, 0, 1, 1, 2, 2]
    assert len({seen.seed for seen in all_seen}) == 6
    for seen in all_seen[2:]:
        # Each shard is that of the run, and so are the optimizer's.
        assert torch.equal(seen.facts["at first"], all_seen[0].facts["at first"])
        assert all(steps > 0 for steps in seen.facts["steps taken over"])
        assert seen.facts["step number"] == 11  # the newest that one of its networks had heard of
    for seen in all_seen:
        assert (seen.num_replicas, seen.num_averaged) == (1, 3)
        assert seen.samples == all_seen[0].samples
        torch.testing.assert_close(seen.values, all_seen[0].facts["at first"])
