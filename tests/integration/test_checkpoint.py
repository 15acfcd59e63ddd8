from typing import Any

import pytest
import torch
from small_run import three_chunks
from torch import Tensor, nn

from gossipdp import Checkpoints, GossipDataParallel
from gossipdp.parallel.checkpoint import saved_in

pytestmark = pytest.mark.processes


def end_a_run(directory: str) -> tuple[dict[str, Tensor], Any]:
    """Train, unless the run had ended, and return the average and what the end says."""
    net = three_chunks()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    checkpoints = Checkpoints(directory, every_steps=100, resume="auto")
    model = GossipDataParallel(net, optimizer, checkpoints=checkpoints)
    for _ in range(5 + model.rank if model._worker.resumption is None else 0):
        inputs = torch.randn(8, 16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(dim=1)).backward()
        optimizer.step()
    end = model.consolidate()
    return net.state_dict(), (end.world_size, end.samples, end.gradient_steps_by_rank)


def test_a_finished_run_started_again_holds_exactly_its_average_and_counts(workers, tmp_path):
    """Three of them: a sum of three equal numbers, divided by three, is often not that number."""
    firsts, again = (workers(end_a_run, 3, (str(tmp_path),)) for _ in range(2))
    assert {rank: len(kept) for rank, kept in saved_in(tmp_path).items()} == {0: 1, 1: 1, 2: 1}
    average, _ = firsts[0]
    for state, end in [*firsts, *again]:
        assert all(torch.equal(value, average[name]) for name, value in state.items())
        assert end == (3, 8 * (5 + 6 + 7), {0: 5, 1: 6, 2: 7})
