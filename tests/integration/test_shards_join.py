"""New replicas of two processes, sharded by FSDP2, join a run that goes on."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_runs import ENDLESS, Seen, loader, step, values, wrapped
from waiting import wait_until

from gossipdp import GossipDataParallel, Network
from gossipdp.launcher.environment import OF_REPLICA
from gossipdp.launcher.launch_plan import ask_join_infos
from gossipdp.parallel import module
from gossipdp.parallel.worker import Worker

pytestmark = pytest.mark.processes
NUM_SHARDS = 2


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
