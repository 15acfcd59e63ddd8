import math
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from gossipdp_lab import baselines
from gossipdp_lab.baselines import SynchronousDataParallel
from gossipdp_lab.report.run_log import RunLog

BATCH, STEPS = 4, 6


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))


def batches_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(BATCH, 8, generator=generator) for _ in range(4)]


def train(directory: Path, num_workers: int, slow_s: float) -> tuple[dict, float, int, float]:
    """Return the state, worker 0's waiting, the worker's seed and the progress after one step."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = SynchronousDataParallel(
        net, batch_size=BATCH, budget_samples=STEPS * BATCH * num_workers, seed=7, log_dir=directory
    )
    seen = []
    for batch in model.batches(batches_of(rank)):
        if rank == 1:
            time.sleep(slow_s)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        model.log(loss=loss)
        seen.append(model.progress())
    model.log(rate=0.1)
    end = model.consolidate()
    assert (end.samples, end.gradient_steps) == (STEPS * BATCH * num_workers, STEPS * num_workers)
    assert (model.stats().gradient_steps, model.stats().samples) == (STEPS, STEPS * BATCH)
    model.save_averaged(directory / f"{rank}.pt")
    return net.state_dict(), model.stats().waited_seconds, model.worker_seed, seen[1]


def trained_alone(num_workers: int) -> nn.Module:
    """Train one network by the mean of the losses of all workers."""
    torch.manual_seed(0)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = [batches_of(rank) for rank in range(num_workers)]
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [net(own[step % len(own)]).square().mean() for own in batches]
        (sum(losses) / num_workers).backward()
        optimizer.step()
    return net


@pytest.mark.processes
def test_it_trains_in_step_on_the_budget_and_measures_who_waits(workers, tmp_path):
    slow_s = 0.2
    results = workers(train, 2, (tmp_path, 2, slow_s))
    states, waits, seeds, progress = zip(*results, strict=True)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    for name, value in trained_alone(2).named_parameters():
        torch.testing.assert_close(states[0][name], value.detach())
    assert progress == (1 / STEPS, 1 / STEPS)  # the step itself is counted when the body ends
    assert len(set(seeds)) == 2
    # A step ends for both with the slow one's gradients, so worker 0 waits for each but the first.
    assert waits[0] > waits[1] >= 0
    saved = torch.load(tmp_path / "1.pt", weights_only=True)
    assert all(torch.equal(value, states[0][name]) for name, value in saved.items())
    log = RunLog.read(tmp_path)
    for worker in log.workers.values():
        assert worker.start.configuration["method"] == "allreduce"
        last = worker.counts[-1]
        assert (last.gradient_steps, last.samples) == (STEPS, STEPS * BATCH)
        assert any(math.isfinite(each.loss) for each in worker.counts)
        assert worker.end is not None
        assert worker.end.num_averaged == 2
        assert worker.last_values() == {"rate": 0.1}
        assert len(worker.lives) == 1


SMALLEST = {"batch_size": 1, "budget_samples": 1, "seed": 0}


def test_its_process_group_outlives_it(tmp_path):
    """If torch frees one with its model, a process waits for ever now and then."""
    model = SynchronousDataParallel(make_net(), log_dir=tmp_path, **SMALLEST)
    model.consolidate()
    assert model.process_group in baselines._groups


def test_it_is_not_passed_off_as_protected(run_tls, monkeypatch, tmp_path):
    monkeypatch.setenv("GOSSIPDP_TLS", str(run_tls))
    with pytest.raises(ValueError, match="would send everything in the clear"):
        SynchronousDataParallel(make_net(), log_dir=tmp_path, **SMALLEST)
