"""The rate of ``large_batch_schedule``."""

import pytest
import torch
from torch import nn

from gossipdp import large_batch_schedule


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def test_the_number_of_workers_may_be_known_later_only():
    progress, num_workers = 0.0, 1
    optimizer = sgd()
    schedule = large_batch_schedule(optimizer, lambda: progress, lambda: num_workers)
    assert schedule.get_last_lr() == pytest.approx([0.1])
    progress, num_workers = 0.3, 4
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.4])


@pytest.mark.parametrize("num_workers", [0, lambda: 0])
def test_no_worker_is_refused(num_workers):
    with pytest.raises(ValueError, match=r"num_workers is 0; .* lambda: model.num_workers"):
        large_batch_schedule(sgd(), lambda: 0.0, num_workers)
