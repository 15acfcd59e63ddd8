"""Random schedules of faults: the real protocol, every invariant, at every event."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import get_args

import pytest
from exploring import seeds
from simulated_faults.draws import draw_schedule
from simulated_faults.run import Outcome, run_schedule
from simulated_faults.schedule import (
    BrokenExchange,
    Crash,
    EndingFault,
    EndingKind,
    FaultSchedule,
    Join,
    Partition,
    Restart,
    Stall,
)

NUM_SCHEDULES = 20
LARGEST = 12
"""`make chaos` runs the large ones too."""


def expect_whole(schedule: FaultSchedule) -> Outcome:
    outcome = run_schedule(schedule)
    assert not outcome.broken, f"{outcome.details}\n{schedule}"
    return outcome


@pytest.mark.parametrize("seed", seeds(NUM_SCHEDULES))
def test_no_schedule_breaks_an_invariant(seed: int) -> None:
    expect_whole(draw_schedule(seed, largest=LARGEST))


def test_a_large_one_too() -> None:
    schedule = replace(draw_schedule(1, largest=LARGEST), num_workers=32, graph="ring")
    assert expect_whole(schedule).num_consolidated > 28


def test_the_same_seed_gives_the_same_trace() -> None:
    first, again = (run_schedule(draw_schedule(3, largest=8)) for _ in range(2))
    assert first == again
    other = run_schedule(replace(draw_schedule(3, largest=8), seed=4))
    assert other.digest != first.digest


def test_schedules_travel_and_print() -> None:
    schedule = draw_schedule(3)
    assert pickle.loads(pickle.dumps(schedule)) == schedule == draw_schedule(3)
    assert all(f"{fault.at_s:.3f} s" in str(schedule) for fault in schedule.faults)


def test_partitions_do_not_overlap() -> None:
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    with pytest.raises(ValueError, match=r"a partition at 2.0 s begins before the one up to 3.0 s"):
        FaultSchedule(seed=1, faults=(Partition(1.0, 2.0, halves), Partition(2.0, 2.0, halves)))


def test_without_faults_all_exchange_and_consolidate() -> None:
    outcome = expect_whole(FaultSchedule(seed=1))
    assert outcome.num_torn == outcome.num_taken_over == 0
    assert outcome.num_consolidated == 8
    assert outcome.num_exchanges > 60


def test_a_restarted_worker_and_a_joiner_take_parameters_and_consolidate() -> None:
    faults = (Crash(1.0, 0), Restart(1.5, 0, asked=3), Join(2.0, asked=0))
    outcome = expect_whole(FaultSchedule(seed=1, faults=faults))
    assert outcome.num_taken_over == 2
    assert outcome.num_consolidated == 9


def test_two_are_left_then_one() -> None:
    faults = tuple(Crash(1.0 + rank, rank) for rank in range(7))
    assert expect_whole(FaultSchedule(seed=1, faults=faults)).num_consolidated == 1


def test_halves_meet_again_after_each_declared_the_other_dead() -> None:
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    outcome = expect_whole(FaultSchedule(seed=1, faults=(Partition(1.0, 5.0, halves),)))
    assert outcome.num_consolidated == 8
    assert outcome.num_taken_over == 0


@pytest.mark.parametrize("duration_s", [0.9, 1.6])
def test_who_stood_still_keeps_its_parameters(duration_s: float) -> None:
    outcome = expect_whole(FaultSchedule(seed=1, faults=(Stall(2.0, 3, duration_s),)))
    assert outcome.num_taken_over == 0
    assert outcome.num_consolidated == 8


def test_one_that_stands_still_halts_the_others_for_less_than_half_the_timeout() -> None:
    """Its neighbours withdraw their proposals; but for one, perhaps, who is exchanging with it."""
    hungriest_s = [
        expect_whole(
            FaultSchedule(seed=seed, num_workers=4, graph="ring", faults=(Stall(2.0, 1, 0.95),))
        ).hungriest_s
        for seed in range(11)
    ]
    assert sorted(hungriest_s)[5] < 0.5


def test_exchanges_lose_their_link_at_every_point() -> None:
    """Before any data, half way, at one end done and at the other not, after the end."""
    transfer_s, num_torn = 0.03, 0
    for eighth in range(16):
        broken = tuple(BrokenExchange(20 + k, eighth / 8 * transfer_s) for k in range(0, 40, 5))
        schedule = FaultSchedule(seed=eighth, transfer_s=transfer_s, broken_exchanges=broken)
        num_torn += expect_whole(schedule).num_torn
    assert num_torn > 0


@pytest.mark.parametrize("kind", get_args(EndingKind))
def test_consolidation_loses_a_link_or_a_worker_at_every_fifth_frame(kind: EndingKind) -> None:
    """``make chaos`` does so at every frame."""
    for frame in range(0, 120, 5):
        ending = (EndingFault(frame, kind),)
        schedule = FaultSchedule(seed=frame, faulty_s=2.0, num_workers=8, ending=ending)
        assert expect_whole(schedule).num_consolidated >= 7
