"""Random schedules of faults: the real protocol, every invariant, at every event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exploring import seeds
from simulated_faults.draws import draw_schedule
from simulated_faults.run import Outcome, run_schedule
from simulated_faults.schedule import (
    BrokenExchange,
    Crash,
    FaultSchedule,
    Join,
    Partition,
    Restart,
    Stall,
)

NUM_SCHEDULES = 12
LARGEST = 10
"""`make chaos` runs the large ones too."""


def expect_whole(schedule: FaultSchedule) -> Outcome:
    outcome = run_schedule(schedule)
    assert not outcome.broken, f"{outcome.details}\n{schedule}"
    return outcome


@pytest.mark.parametrize("seed", seeds(NUM_SCHEDULES))
def test_no_schedule_breaks_an_invariant(seed: int) -> None:
    expect_whole(draw_schedule(seed, largest=LARGEST))


def test_the_same_seed_gives_the_same_trace() -> None:
    schedule = draw_schedule(3, largest=8)
    first, again, other = map(run_schedule, (schedule, schedule, replace(schedule, seed=4)))
    assert first == again
    assert other.digest != first.digest


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


def test_a_short_stall_costs_nobody_its_parameters() -> None:
    outcome = expect_whole(FaultSchedule(seed=1, faults=(Stall(2.0, 3, 0.9),)))
    assert outcome.num_taken_over == 0
    assert outcome.num_consolidated == 8


def test_one_that_stands_still_halts_the_others_for_less_than_half_the_timeout() -> None:
    """Its neighbours withdraw their proposals; but for one, perhaps, who is exchanging with it."""
    hungriest_s = [
        expect_whole(
            FaultSchedule(seed=seed, num_workers=4, graph="ring", faults=(Stall(2.0, 1, 0.95),))
        ).hungriest_s
        for seed in range(5)
    ]
    assert sorted(hungriest_s)[2] < 0.5


def test_exchanges_lose_their_link_at_every_point() -> None:
    """Before any data, half way, at one end done and at the other not, after the end."""
    transfer_s, num_torn = 0.03, 0
    for quarter in range(8):
        broken = tuple(BrokenExchange(20 + k, quarter / 4 * transfer_s) for k in range(0, 40, 5))
        schedule = FaultSchedule(
            seed=quarter,
            num_workers=6,
            transfer_s=transfer_s,
            faulty_s=4.0,
            broken_exchanges=broken,
        )
        num_torn += expect_whole(schedule).num_torn
    assert num_torn > 0
