"""Refusals: a ValueError that names the value and the fix."""

import pytest
import torch

from gossipdp_lab.tasks import make_workload
from gossipdp_lab.tasks.digits import Digits
from gossipdp_lab.tasks.workload import BatchLoader, worker_device, worker_seed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_workload("mnist"), "no workload 'mnist'; choose one of digits, pystdlib"),
        (lambda: make_workload("digits", batch_size=0), "batch_size is 0"),
        (lambda: Digits(network="transformer"), "no network 'transformer'; choose convolutional"),
        (lambda: Digits(dirichlet_alpha=0.0), r"dirichlet_alpha is 0\.0; it must be a positive"),
        (lambda: Digits(disjoint=True, dirichlet_alpha=1.0), "exclude each other"),
        (lambda: Digits().train_loader(4, 4, 0), "rank is 4; with 4 workers"),
        (lambda: worker_seed(-1, 4, 0), "rank is -1"),
        (lambda: worker_seed(0, 1, -1), "seed is -1; it must be 0 or more"),
        (
            lambda: BatchLoader(torch.arange(3), batch_size=4, seed=0, gather=lambda rows: rows),
            "holds 3 samples, less than one batch of 4",
        ),
        (lambda: worker_device("tpu"), "--device is 'tpu'; choose cpu or cuda"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
