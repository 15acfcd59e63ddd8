"""Real workers at the end of a run, and the lines that their users read."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from waiting import FOR_EVER_S, wait_until

from gossipdp import Checkpoints, Counting, GossipDataParallel, Network, WorkerFailedError
from gossipdp.links.clock import since_boot_s

pytestmark = pytest.mark.processes


def wrap(log: Path, timeout_s: float = 5.0, **options: Any) -> Any:
    """Return a wrapped model, and a function that makes a step; its warnings go to ``log``."""
    logging.getLogger("gossipdp").addHandler(logging.FileHandler(log / f"{os.getpid()}.log"))
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = GossipDataParallel(net, optimizer, network=Network(timeout_s=timeout_s), **options)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(8, 4)).sum().backward()
        optimizer.step()

    return model, step


def said_in(log: Path) -> str:
    """Return what all workers have said since the last call."""
    said = ""
    for path in log.glob("*.log"):
        said += path.read_text()
        path.unlink()
    return said


def has_noticed_a_death(model: GossipDataParallel) -> bool:
    return "lost" in [notice.kind for notice in model.stats().noticed]


def forget(log: Path, saves: bool) -> None:
    model, step = wrap(log, timeout_s=FOR_EVER_S, counting=Counting(samples_per_step=8))
    step()  # of its own: it may answer an exchange before
    # Of each worker, since a budget might be used up by one; after it has given the other a state.
    wait_until(lambda: model.stats().exchanges > 0, "an exchange", step)
    with model.averaged():  # an evaluation
        pass
    if saves:
        model.save_averaged(log / f"{model.rank}.pt")
    if model.rank > 0:
        wait_until(lambda: has_noticed_a_death(model), "worker 0 has ended")


def test_a_forgotten_consolidate_is_said_once(workers, tmp_path):
    workers(forget, 2, (tmp_path, False))
    said = said_in(tmp_path)
    assert said.count("ends without consolidate(): its module holds its own") == 1
    assert "worker 0 ends" in said
    workers(forget, 2, (tmp_path, True))
    assert "ends without" not in said_in(tmp_path)


def leave_the_others(log: Path, budget: int | None) -> None:
    """End worker 1 without an average: early, or after worker 0 has called ``consolidate()``."""
    model, step = wrap(log, timeout_s=FOR_EVER_S, budget_samples=budget)
    step()
    if model.rank == 0:
        if budget is not None:
            wait_until(lambda: has_noticed_a_death(model), "worker 1 has ended")
        model.consolidate()
    elif budget is None:
        wait_until(lambda: model._worker.view()[0].state == "done", "worker 0 waits for this")


@pytest.mark.parametrize(("budget", "why"), [(None, "its module"), (1000, "the budget is not")])
def test_one_that_leaves_without_the_average_is_told_so(workers, tmp_path, budget, why):
    workers(leave_the_others, 2, (tmp_path, budget))
    said = said_in(tmp_path)
    assert said.count(f"worker 1 ends without consolidate(): {why}") == 1
    assert said.count("ended without consolidate(), which every worker has to call") == 1


def forget_long_after_a_death(log: Path) -> None:
    model, step = wrap(log, timeout_s=1.0, counting=Counting(samples_per_step=8))
    # Both, or the launcher takes the death for a failed start.
    wait_until(lambda: all(each.gradient_steps > 0 for each in model._worker.view()), "steps", step)
    wait_until(lambda: model.stats().exchanges > 0, "an exchange", step)
    if model.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: has_noticed_a_death(model), "worker 0 is dead")
    death = next(each for each in model.stats().noticed if each.kind == "lost")
    wait_until(lambda: since_boot_s() > death.at_s + 1.0, "the death is a time-out ago")


def test_another_worker_says_it_where_the_first_was_killed(workers, tmp_path):
    with pytest.raises(WorkerFailedError, match="worker 0 died of signal 9"):
        workers(forget_long_after_a_death, 2, (tmp_path,))
    assert "worker 1 ends without consolidate()" in said_in(tmp_path)


def draw(log: Path, changes: Callable[[GossipDataParallel], object], resumes: bool) -> None:
    torch.manual_seed(5)
    saving = Checkpoints(log / "saved", resume="auto") if resumes else None
    model, step = wrap(log, budget_samples=1000, checkpoints=saving)
    changes(model)
    loader = DataLoader(TensorDataset(torch.zeros(64, 4)), 8, shuffle=True)
    next(model.batches(loader))
    next(model.batches(loader))
    step()
    if resumes:
        model.save_checkpoint()
    model.consolidate()


def test_workers_that_draw_the_same_batches_are_warned_once(workers, tmp_path):
    """Not where they are seeded apart; nor where a run goes on, with states of its own."""
    said = "all workers go through the data in the same order, since torch has the same random"
    workers(draw, 3, (tmp_path, lambda model: None, True))
    assert said_in(tmp_path).count(said) == 1
    workers(draw, 2, (tmp_path, lambda model: None, True))
    assert said not in said_in(tmp_path)
    workers(draw, 2, (tmp_path, lambda model: torch.manual_seed(model.rank + 1), False))
    assert said not in said_in(tmp_path)
