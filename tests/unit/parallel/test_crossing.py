"""Two workers that wait for each other end with an error; one that is merely slow is waited for."""

from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import wait_until

from gossipdp import GossipDataParallel
from gossipdp.parallel import worker as worker_module
from gossipdp.protocol.members import Status
from gossipdp.protocol.participants import Crossing

ALIVE, DONE, LEFT, DEAD = Status.ALIVE, Status.DONE, Status.LEFT, Status.DEAD
LIMIT_S = 6.0


def test_a_peer_that_is_done_elsewhere_and_never_here_is_found_after_the_limit():
    crossing = Crossing(LIMIT_S)
    here, there = {1: ALIVE, 2: DONE}, {1: DONE, 2: ALIVE}
    found = [crossing.look(here, [{1: ALIVE}, there], now_s) for now_s in (10.0, 13.0, 15.9, 16.0)]
    assert found == [[], [], [], [1]]


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


def test_news_that_come_late_start_the_time_anew():
    crossing = Crossing(LIMIT_S)
    crossed, apart = {1: ALIVE}, {1: DONE}
    times = [(0.0, crossed), (5.0, crossed), (5.9, apart), (6.1, crossed), (12.0, crossed)]
    assert not any(crossing.look(here, [{1: DONE}], now_s) for now_s, here in times)
    assert crossing.look(crossed, [{1: DONE}], 12.1) == [1]


@pytest.mark.parametrize(("left_at_s", "found"), [(2.9, []), (3.0, [1])])
def test_a_peer_that_saw_it_first_and_left_leaves_no_average_of_one(left_at_s, found):
    crossing = Crossing(LIMIT_S)
    crossing.look({1: ALIVE}, [{1: DONE}], 0.0)
    assert crossing.look({1: DEAD}, [{1: DEAD}], left_at_s) == found


def end_in_opposite_orders(directory: Path) -> str:
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
    # Who leaves first would be a death for the other.
    wait_until((directory / str(1 - rank)).exists, "the other has ended too")
    return message


@pytest.mark.processes
def test_opposite_orders_end_with_an_error_on_both_sides(workers, tmp_path):
    for rank, found in enumerate(workers(end_in_opposite_orders, 2, (tmp_path,))):
        kind = ("Linear", "Bilinear")[rank]
        message = f"worker {rank} waits in consolidate() of its {kind} for worker {1 - rank}, which"
        assert found.startswith(message)
        assert found.endswith("Consolidate the models in the same order on all workers")
