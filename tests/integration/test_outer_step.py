"""The outer step between real workers: nothing of it is lost, at rare exchanges or by a resume."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gossipdp import Checkpoints, Counting, Exchange, GossipDataParallel, OuterStep
from gossipdp.dynamics.chunks import Chunk
from gossipdp.parallel.checkpoint import saved_by
from gossipdp.parallel.checkpoint_files import read_tensors
from gossipdp.protocol.step_clock import SKIPPED_STEPS

pytestmark = pytest.mark.processes

NUM_VALUES, LEARNING_RATE, MOMENTUM = 20_000, 0.125, 0.5


class Held(NamedTuple):
    """A worker's state: x + c/2 and pending, the steps since its last outer step, momentum."""

    z: Tensor
    g: Tensor
    m: Tensor


def train(steps: int, options: dict[str, Any], directory: Path | None) -> tuple[Any, ...]:
    """Take equal steps, another size on each worker; return what it began with and came to.

    One whose process is slow to start begins with what another has trained by then.
    """
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(NUM_VALUES))
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    saving = Checkpoints(directory, resume="auto") if directory else Checkpoints()
    rule = OuterStep(momentum=MOMENTUM, lr=1.0)
    options = {"comm_rate": 1 / 8, "exchange": Exchange(pace="strict"), "outer": rule, **options}
    model = GossipDataParallel(
        net, optimizer, counting=Counting(samples_per_step=1), checkpoints=saving, **options
    )
    last: list[Held] = []
    replace = Chunk.replace

    def record(chunk: Chunk, values: Tensor) -> None:
        if chunk.outer is not None:
            _, base, m = chunk.outer
            last.append(Held(chunk.x.clone(), chunk.x - base, m.clone()))
        replace(chunk, values)

    Chunk.replace = record  # type: ignore[method-assign]
    began = Held(net.weight.detach().double(), *(torch.zeros(NUM_VALUES) for _ in range(2)))
    net.weight.grad = torch.full((NUM_VALUES,), -1.0 - model.rank)
    for _ in range(steps):
        optimizer.step()
    if directory:
        model.save_checkpoint()
    assert model.consolidate().world_size == model.world_size
    held = Held(*(torch.cat(parts).double() for parts in zip(*last, strict=True)))
    return began, held, net.weight.detach().double(), model.stats().exchanges


def expected_sum(starts: Sequence[Held], ends: Sequence[Held], steps: int) -> Tensor:
    r"""Return the sum of z over workers at the end, which must be so whatever exchanges there were.

    With the outer rate 1 an outer step adds :math:`u = \\mu m`. Summed over a worker's outer steps,
    :math:`m_k = \\mu m_{k-1} + g_k` gives
    :math:`\\sum u = \\mu (\\sum g + \\mu (m_0 - m_K)) / (1 - \\mu)`.
    """
    total = torch.zeros(NUM_VALUES, dtype=torch.float64)
    for rank, (start, end) in enumerate(zip(starts, ends, strict=True)):
        own = steps * LEARNING_RATE * (1.0 + rank)
        seen = start.g + own - end.g
        total += start.z + own
        total += MOMENTUM * (seen + MOMENTUM * (start.m - end.m)) / (1 - MOMENTUM)
    return total


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (2, {"graph": "complete", "wire_format": "bfloat16"}),
        (2, {"graph": "complete", "wire_format": "lattice8"}),
        (4, {"graph": "ring", "method": "a2cid2"}),
    ],
)
def test_every_step_goes_on_in_the_outer_momentum(workers, n, options):
    steps = 400
    results = workers(train, n, (steps, options, None))
    starts, ends, averages, exchanges = zip(*results, strict=True)
    expected = expected_sum(starts, ends, steps) / n
    for average in averages:
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=0)
    # By the optimizer alone it would be 1; were there an exchange at every step, 2.
    share = averages[0].mean() / (steps * LEARNING_RATE * (1 + n) / 2)
    assert 1.5 < share < 2.0
    # Those that it asks for come evenly, those that it answers at random: five standard deviations
    # of a Poisson process, which varies more.
    demands = (steps - SKIPPED_STEPS - 1) / 8
    assert all(count >= demands - 5 * math.sqrt(demands) for count in exchanges), exchanges


def test_a_resumed_run_goes_on_with_its_outer_momentum(workers, tmp_path):
    n, steps = 2, 400
    options = {"graph": "complete"}
    workers(train, n, (steps, options, tmp_path))
    starts = []
    for rank in range(n):
        (saved,) = saved_by(tmp_path, rank)
        assert saved.facts.outer == "OuterStep(momentum=0.5, lr=1.0, every=2)"
        tensors, _ = read_tensors(saved.path)
        x, pending, g, m = (
            tensors.get(f"{kind}/weight", torch.zeros(NUM_VALUES)).double()
            for kind in ("model", "pending", "outer_g", "outer_m")
        )
        assert m.any()
        starts.append(Held(x + pending, g, m))
    results = workers(train, n, (steps, options, tmp_path))
    _, ends, averages, _ = zip(*results, strict=True)
    expected = expected_sum(starts, ends, steps) / n
    torch.testing.assert_close(averages[0], expected, rtol=1e-5, atol=0)
