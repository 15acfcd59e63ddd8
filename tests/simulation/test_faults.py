"""Random schedules of faults, and one worker that lies: every invariant, at every event.

``GOSSIPDP_EXPLORE=1 pytest tests/simulation/test_faults.py`` draws 1,000 schedules of up to 64
workers, and 200 schedules in which one of eight workers lies. A schedule that breaks an invariant
is run again, and every action of it is shown.
"""

from dataclasses import replace

import pytest
from exploring import SEED, seeds
from simulated_faults import schedule as faults
from simulated_faults.adversary import Adversary, draw_adversary, run_adversary
from simulated_faults.draws import draw_schedule
from simulated_faults.run import Outcome, run_schedule
from simulated_faults.schedule import FaultSchedule

NUM_SCHEDULES, LARGEST = (8, 10) if SEED is None else (1000, 64)


def expect_whole(schedule: FaultSchedule) -> Outcome:
    outcome = run_schedule(schedule)
    if outcome.broken:
        run_schedule(schedule, log=print)
    assert not outcome.broken, f"{outcome.details}\n{schedule}"
    return outcome


@pytest.mark.parametrize("seed", seeds(NUM_SCHEDULES))
def test_no_schedule_breaks_an_invariant(seed):
    expect_whole(draw_schedule(seed, largest=LARGEST))


def test_the_same_seed_gives_the_same_trace():
    schedule = draw_schedule(3, largest=8)
    first, again, other = map(run_schedule, (schedule, schedule, replace(schedule, seed=4)))
    assert first == again
    assert other.digest != first.digest


HALVES = faults.Partition(1.0, 5.0, ((0, 1, 2, 5), (3, 4, 6, 7)))
DEATHS = tuple(faults.Crash(at_s, rank) for at_s, rank in ((1.0, 2), (2.5, 0), (4.0, 1)))
NEW_ONES = faults.Crash(1.0, 0), faults.Restart(1.5, 0, asked=3), faults.Join(2.0, asked=0)


@pytest.mark.parametrize(
    ("schedule", "num_taken_over", "num_consolidated"),
    [
        (FaultSchedule(seed=1, faults=(HALVES,)), 0, 8),
        (FaultSchedule(seed=1, graph="star", faults=(HALVES,)), 0, 8),
        (FaultSchedule(seed=1, num_workers=4, faults=DEATHS), 0, 1),
        (FaultSchedule(seed=1, faults=NEW_ONES), 2, 9),
    ],
    ids=["halves of a ring", "halves of a star", "down to one", "a restarted one and a joiner"],
)
def test_who_comes_back_takes_parameters_and_all_that_live_consolidate(
    schedule, num_taken_over, num_consolidated
):
    outcome = expect_whole(schedule)
    assert (outcome.num_taken_over, outcome.num_consolidated) == (num_taken_over, num_consolidated)


def test_exchanges_lose_their_link_at_every_point():
    """Before any data, half way, at one end done and at the other not, after the end."""
    schedule, num_torn = FaultSchedule(seed=0, num_workers=6, transfer_s=0.03, faulty_s=4.0), 0
    for quarter in range(8):
        delay_s = quarter / 4 * schedule.transfer_s
        broken = tuple(faults.BrokenExchange(begin, delay_s) for begin in range(20, 60, 5))
        num_torn += expect_whole(replace(schedule, seed=quarter, broken_exchanges=broken)).num_torn
    assert num_torn > 0


@pytest.mark.parametrize(
    "lies",
    [
        *(("stall", "progress"), ("lengths", "ids"), ("members", "gains"), ("deaths",)),
        *(("epochs",), ("no answer",)),
    ],
    ids=" and ".join,
)
def test_each_lie_stops_the_others_only_for_a_few_time_outs(lies):
    share = 1.0 if lies == ("no answer",) else 0.3
    assert run_adversary(Adversary(1, "ring", 3, lies, share, is_ever_done=False)) == []


@pytest.mark.parametrize("seed", [71, 1059, 1087, *(seeds(200) if SEED is not None else ())])
def test_drawn_lies(seed):
    adversary = draw_adversary(seed)
    assert run_adversary(adversary) == [], adversary
