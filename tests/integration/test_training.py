import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from known_average import assert_is_mean, quietly, x_of, z_of
from small_run import patient, three_chunks
from threadpoolctl import threadpool_limits
from torch import nn
from waiting import wait_until

from gossipdp import Checkpoints, GossipDataParallel, Network
from gossipdp.links.clock import since_boot_s
from gossipdp.parallel.checkpoint import saved_in

pytestmark = pytest.mark.processes


def data_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs, inputs[:, :4].argmax(dim=1)


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in module.state_dict().values()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    inputs, labels = data_of(model.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        # Two cores hold many workers here: leave them time, as a GPU would.
        time.sleep(0.002)


def train_and_consolidate(method: str, graph: str, optimizer_name: str, options: dict) -> Any:
    net = three_chunks()
    if options.pop("bfloat16", False):
        net = net.to(torch.bfloat16)
        net[0].register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
    optimizer = getattr(torch.optim, optimizer_name)(net.parameters(), lr=0.01)
    model = GossipDataParallel(
        net, optimizer, method=method, graph=graph, network=patient(), **options
    )
    start = flat(net)
    wait_for_all(model)  # else rank 0 trains before all have its parameters
    train(model, optimizer, 40)
    if method in ("a2cid2", "gossip"):
        while model.stats().exchanges == 0:
            train(model, optimizer, 1)
    z = quietly(model, lambda _: wait_for_all(model), lambda: z_of(model))
    own, middle = flat(net), None
    if method == "none":  # all stand still, so the average in mid training is that of the end
        wait_for_all(model)  # one that is still held back gives nothing
        with model.averaged():
            middle = flat(net)
        assert torch.equal(flat(net), own)
        wait_for_all(model)
    result = model.consolidate()
    return start, flat(net), model.stats(), result, z, x_of(model), own, middle


CASES = {
    "a2cid2 on a ring": (4, ("a2cid2", "ring", "SGD", {})),
    "gossip, odd number": (3, ("gossip", "complete", "AdamW", {})),
    "star, bfloat16": (4, ("a2cid2", "star", "SGD", {"bfloat16": True})),
    "none": (3, ("none", "ring", "SGD", {})),
}


@pytest.mark.parametrize("case", CASES)
def test_all_start_from_rank_0_and_end_with_the_mean_of_all(workers, case):
    num_workers, arguments = CASES[case]
    results = workers(train_and_consolidate, num_workers, arguments)
    starts, ends, stats, outcomes, brought, averages, owns, middles = zip(*results, strict=True)
    assert all(torch.equal(start, starts[0]) for start in starts)
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert not torch.equal(starts[0], ends[0])
    for average in averages:
        assert_is_mean(average, brought)
    if case == "none":
        for middle in middles:
            # BatchNorm's count of batches, the only integer, is one's own here.
            assert (~torch.isclose(middle, sum(owns) / num_workers, atol=1e-5)).sum() <= 1
    (outcome,) = set(outcomes)
    assert outcome.world_size == num_workers
    steps = [each.gradient_steps for each in stats]
    assert min(steps) >= 40
    assert outcome.gradient_steps == sum(steps)
    assert outcome.gradient_steps_by_rank == dict(enumerate(steps))
    assert outcome.samples == 32 * sum(steps)
    assert math.isfinite(outcome.consensus_distance)
    initiated = sum(s.exchanges_initiated for s in stats)
    assert initiated == 0 if case == "none" else initiated > 0
    assert initiated == sum(s.exchanges_answered for s in stats)
    assert sum(s.exchanges_failed for s in stats) == 0
    for each in stats:
        recent = each.recent_exchanges
        assert len(recent) == min(16, each.exchanges)
        times_s = [at_s for one in recent for at_s in (one.started_s, one.ended_s)]
        assert times_s == sorted(times_s), "one at a time"
        assert {one.peer for one in recent} <= set(each.exchanges_by_neighbour)
        asked = sum(one.initiated for one in recent)
        assert asked <= each.exchanges_initiated
        assert len(recent) - asked <= each.exchanges_answered


def wait_for_all(model: GossipDataParallel) -> None:
    """Wait for all workers through the user's own process group beside gossipdp."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()


def end_a_run(directory: str) -> Any:
    """Train, unless the run had ended, and return the average and what the end says."""
    net = three_chunks()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = GossipDataParallel(net, optimizer, checkpoints=Checkpoints(directory, resume="auto"))
    if model._worker.resumption is None:
        train(model, optimizer, 5 + model.rank)
    end = model.consolidate()
    return flat(net), (end.world_size, end.samples, end.gradient_steps_by_rank)


def test_a_finished_run_started_again_holds_exactly_its_average_and_counts(workers, tmp_path):
    """Three of them: a sum of three equal numbers, divided by three, is often not that number."""
    firsts, again = (workers(end_a_run, 3, (str(tmp_path),)) for _ in range(2))
    assert {rank: len(kept) for rank, kept in saved_in(tmp_path).items()} == {0: 1, 1: 1, 2: 1}
    for average, end in [*firsts, *again]:
        assert torch.equal(average, firsts[0][0])
        assert end == (3, 32 * (5 + 6 + 7), {0: 5, 1: 6, 2: 7})


def os_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def serve_in_a_pause(served: Path) -> None:
    torch.set_num_threads(2)
    net = three_chunks()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    inputs, labels = data_of(0)
    nn.functional.cross_entropy(net(inputs), labels).backward()  # starts torch's own threads
    with threadpool_limits(1, user_api="blas"):
        pass  # a fork leaves the threads of numpy's library behind: they start here
    before = os_threads()
    model = GossipDataParallel(net, optimizer)
    train(model, optimizer, 15)
    if model.rank == 0:
        held, answered = flat(net), model.stats().exchanges_answered
        # A long evaluation.
        wait_until(lambda: model.stats().exchanges_answered > answered + 30, "it serves the other")
        assert torch.equal(flat(net), held)
        # Fifteen steps: a pause of many step durations must not have rung the clock.
        assert model.stats().achieved_comm_rate < 2.5
        served.touch()
    else:
        wait_until(served.exists, "worker 0 serves", lambda: train(model, optimizer, 1))
    assert os_threads() == before + 1
    assert f"gossipdp-{model.rank}" in {thread.name for thread in threading.enumerate()}
    model.consolidate()
    # A joined thread is still there for a moment.
    wait_until(lambda: os_threads() <= before, lambda: f"{os_threads()} threads, {before} before")
    assert (os_threads(), torch.get_num_threads()) == (before, 2)


def test_in_a_pause_one_thread_serves_exchanges_and_changes_no_parameter(workers, tmp_path):
    workers(serve_in_a_pause, 2, (tmp_path / "served",))


def train_until_its_rate_is_set() -> None:
    torch.manual_seed(0)
    net = nn.Linear(16, 1500)  # 102 kB, which take one or two seconds
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    network = Network(max_megabits_per_s=0.6)
    model = GossipDataParallel(net, optimizer, comm_rate="auto", network=network)

    stepped_s: list[float] = []

    def step() -> None:
        net(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()
        stepped_s.append(since_boot_s())
        time.sleep(0.1)  # a step wakes the gossip thread, whose work is not the bound here

    wait_until(lambda: model.stats().comm_rate_bound != "start", "the rate is known", step)
    stats = model.stats()
    model.consolidate(timeout_s=60)
    assert (stats.comm_rate_bound, len(stats.recent_exchanges) > 0) == ("link", True)
    assert 0.005 < stats.aimed_comm_rate < 0.2  # half a step of 0.1 s, over one or two seconds
    for each in stats.recent_exchanges:  # training does not wait for the limit
        assert sum(each.started_s < at_s < each.ended_s for at_s in stepped_s) > 1


def test_a_rate_that_sets_itself_follows_the_limit(workers):
    workers(train_until_its_rate_is_set, 2)
