"""Learning rates that follow the progress of the run."""

import math

import pytest
import torch
from torch import nn

from gossipdp import ProgressLR


def sgd(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def factors(shape, at, **options):
    schedule = ProgressLR(sgd(), lambda: 0.0, shape, **options)
    return [schedule.factor(progress) for progress in at]


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ("constant", {}, [1, 1, 1, 1, 1]),
        ("constant", {"warmup": 0.5, "start": 0.1}, [0.1, 0.55, 1, 1, 1]),
        ("linear", {}, [1, 0.75, 0.5, 0.25, 0]),
        ("linear", {"warmup": 0.5, "start": 0.0, "end": 0.5}, [0, 0.5, 1, 0.75, 0.5]),
        ("cosine", {}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ({0.5: 0.1, 0.75: 0.01}, {}, [1, 1, 0.1, 0.01, 0.01]),
        (lambda p: 2 - p, {}, [2, 1.75, 1.5, 1.25, 1]),
    ],
)
def test_shapes(shape, options, expected):
    assert factors(shape, [0, 0.25, 0.5, 0.75, 1], **options) == pytest.approx(expected, abs=1e-12)


def test_one_cycle_is_torch_s():
    optimizer = sgd()
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 1001, cycle_momentum=False)
    expected = [theirs.get_last_lr()[0] / 0.1]
    for _ in range(1000):
        optimizer.step()
        theirs.step()
        expected.append(theirs.get_last_lr()[0] / 0.1)
    # Torch rounds the end of its warm-up to a step: 0.3 * 1001 - 1.
    ours = factors("one_cycle", [step / 1000 for step in range(1001)], warmup=0.2993)
    assert ours == pytest.approx(expected, abs=1e-3)


def test_it_follows_the_run_and_not_this_worker_s_steps_and_resumes_from_the_first_rates():
    """The optimizer's rates were scaled when it was saved; that is not done twice."""
    progress = 0.0
    optimizer = sgd(0.8)
    schedule = ProgressLR(optimizer, lambda: progress, "linear")
    progress = 0.5
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    assert schedule.state_dict() == {"base_lrs": [0.8]}
    resumed = sgd(0.8)
    resumed.load_state_dict(optimizer.state_dict())
    again = ProgressLR(resumed, lambda: progress, "linear")
    assert resumed.param_groups[0]["lr"] == pytest.approx(0.4)
    again.load_state_dict({"base_lrs": [0.6]})
    assert again.get_last_lr() == [resumed.param_groups[0]["lr"]] == pytest.approx([0.3])


def test_it_follows_a_compiled_wrapper():
    """That has the progress by ``__getattr__`` alone."""
    net, optimizer = nn.Linear(2, 2), sgd(0.8)
    net.progress = lambda: 0.5
    ProgressLR(optimizer, torch.compile(net), "linear")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
