"""Two workers that wait for each other end with an error; one that is merely slow is waited for."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from gossipdp import GossipDataParallel
from gossipdp.parallel import worker as worker_module
from gossipdp.protocol.members import Status
from gossipdp.protocol.participants import Crossing

ALIVE, DONE, LEFT, DEAD = Status.ALIVE, Status.DONE, Status.LEFT, Status.DEAD
LIMIT_S = 6.0


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({1: ALIVE}, []),  # one model, and a peer that takes its time
        ({1: ALIVE}, [{1: ALIVE}]),  # it trains both, slowly
        ({1: DONE}, [{1: DONE}]),  # it is a step ahead: this model's end is near
        ({1: DONE, 2: ALIVE}, [{1: DONE, 2: ALIVE}]),  # the slow one is another
        ({1: LEFT}, [{1: DONE}]),  # it went on without this worker, and waits in the next
        ({1: ALIVE}, [{1: LEFT}]),  # it went on without this worker there, and trains here
        ({1: DEAD}, [{1: DONE}]),
    ],
)
def test_a_peer_that_is_merely_slow_is_waited_for(here, there):
    crossing = Crossing(LIMIT_S)
    assert not any(crossing.look(here, there, float(now_s)) for now_s in range(1000))


CROSSED, AT_BOTH = {1: ALIVE}, [{1: ALIVE}, {1: DONE, 2: ALIVE}]


@pytest.mark.parametrize(
    "looks",  # each with the ranks that it finds
    [
        [(at_s, {1: ALIVE, 2: DONE}, AT_BOTH, []) for at_s in (10.0, 13.0, 15.9)]
        + [(16.0, {1: ALIVE, 2: DONE}, AT_BOTH, [1])],
        # News that come late start the time anew.
        [(at_s, CROSSED, [{1: DONE}], []) for at_s in (0.0, 5.0)]
        + [(5.9, {1: DONE}, [{1: DONE}], [])]
        + [(at_s, CROSSED, [{1: DONE}], [1] * (at_s > 12.0)) for at_s in (6.1, 12.0, 12.1)],
        # A peer that saw it first and left leaves no average of one.
        [(0.0, CROSSED, [{1: DONE}], []), (2.9, {1: DEAD}, [{1: DEAD}], [])],
        [(0.0, CROSSED, [{1: DONE}], []), (3.0, {1: DEAD}, [{1: DEAD}], [1])],
    ],
)
def test_a_peer_that_is_done_elsewhere_and_never_here_is_found_after_the_limit(looks):
    crossing = Crossing(LIMIT_S)
    for at_s, here, there, found in looks:
        assert crossing.look(here, there, at_s) == found, at_s


def end_in_opposite_orders(directory: Path) -> str:
    """Two models, of which worker 0 consolidates the first first, and worker 1 the second."""
    worker_module.CROSSED_FOR_TIMEOUTS = 0.5
    models = []
    for net in (nn.Linear(2, 1), nn.Bilinear(2, 2, 1)):
        models.append(GossipDataParallel(net, torch.optim.SGD(net.parameters(), 0.1)))
    rank, message = models[0].rank, "ended"
    try:
        for model in models if rank == 0 else reversed(models):
            model.consolidate()
    except RuntimeError as error:
        message = str(error)
    (directory / str(rank)).touch()
    deadline_s = time.monotonic() + 50.0  # who leaves first would be a death for the other
    while not (directory / str(1 - rank)).exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return message


@pytest.mark.processes
def test_opposite_orders_end_with_an_error_on_both_sides(workers, tmp_path):
    for rank, found in enumerate(workers(end_in_opposite_orders, 2, (tmp_path,))):
        kind = ("Linear", "Bilinear")[rank]
        message = f"worker {rank} waits in consolidate() of its {kind} for worker {1 - rank}, which"
        assert found.startswith(message)
        assert found.endswith("Consolidate the models in the same order on all workers")
