"""Random schedules of faults, and one worker that lies: every invariant, at every event.

``GOSSIPDP_EXPLORE=1 pytest tests/simulation/test_faults.py`` draws 1,000 schedules of up to 64
workers, loses the link, the sender and the receiver of each of the first 120 frames of
consolidation in turn, and draws 200 schedules in which one of eight workers lies. A schedule that
breaks an invariant is run again, and every action of it is shown.
"""

from dataclasses import replace
from typing import get_args

import pytest
from exploring import SEED, seeds
from simulated_faults import schedule as faults
from simulated_faults.adversary import Adversary, draw_adversary, run_adversary
from simulated_faults.draws import draw_schedule
from simulated_faults.run import Outcome, run_schedule
from simulated_faults.schedule import FaultSchedule

NUM_SCHEDULES, LARGEST, FRAMES = (8, 10, range(60, 61)) if SEED is None else (1000, 64, range(120))


def expect_whole(schedule: FaultSchedule) -> Outcome:
    outcome = run_schedule(schedule)
    if outcome.broken:
        run_schedule(schedule, log=print)
    assert not outcome.broken, f"{outcome.details}\n{schedule}"
    return outcome


@pytest.mark.parametrize("seed", seeds(NUM_SCHEDULES))
def test_no_schedule_breaks_an_invariant(seed):
    expect_whole(draw_schedule(seed, largest=LARGEST))


@pytest.mark.parametrize("kind", get_args(faults.EndingKind))
@pytest.mark.parametrize("frame", FRAMES)
def test_a_fault_at_any_frame_of_consolidation(frame, kind):
    ending = (faults.EndingFault(frame, kind),)
    expect_whole(FaultSchedule(seed=frame, faulty_s=2.0, ending=ending))


def test_the_same_seed_gives_the_same_trace():
    schedule = draw_schedule(3, largest=8)
    first, again, other = map(run_schedule, (schedule, schedule, replace(schedule, seed=4)))
    assert first == again
    assert other.digest != first.digest


def test_a_restarted_worker_and_a_joiner_take_parameters_and_consolidate():
    what = (faults.Crash(1.0, 0), faults.Restart(1.5, 0, asked=3), faults.Join(2.0, asked=0))
    outcome = expect_whole(FaultSchedule(seed=1, faults=what))
    assert outcome.num_taken_over == 2
    assert outcome.num_consolidated == 9


def test_down_to_one_worker_and_to_the_end():
    deaths = tuple(faults.Crash(at_s, rank) for at_s, rank in ((1.0, 2), (2.5, 0), (4.0, 1)))
    outcome = expect_whole(FaultSchedule(seed=1, num_workers=4, faults=deaths))
    assert outcome.num_consolidated == 1


def test_exchanges_lose_their_link_at_every_point():
    """Before any data, half way, at one end done and at the other not, after the end."""
    schedule, num_torn = FaultSchedule(seed=0, num_workers=6, transfer_s=0.03, faulty_s=4.0), 0
    for quarter in range(8):
        delay_s = quarter / 4 * schedule.transfer_s
        broken = tuple(faults.BrokenExchange(begin, delay_s) for begin in range(20, 60, 5))
        num_torn += expect_whole(replace(schedule, seed=quarter, broken_exchanges=broken)).num_torn
    assert num_torn > 0


# One worker of eight that holds the key and lies stops the others only for a few time-outs.


@pytest.mark.parametrize(
    "lies",
    [
        *(("stall", "progress"), ("lengths", "ids"), ("members", "gains"), ("deaths",)),
        *(("epochs",), ("no answer",)),
    ],
    ids=" and ".join,
)
def test_each_lie(lies):
    share = 1.0 if lies == ("no answer",) else 0.3
    assert run_adversary(Adversary(1, "ring", 3, lies, share, is_ever_done=False)) == []


@pytest.mark.parametrize("seed", [71, 1059, 1087, *(seeds(200) if SEED is not None else ())])
def test_drawn_lies(seed):
    adversary = draw_adversary(seed)
    assert run_adversary(adversary) == [], adversary
