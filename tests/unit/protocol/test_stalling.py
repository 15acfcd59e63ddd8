"""Who is accused, left out and passed over, seen from one worker's consolidation machine."""

import pytest
from consolidation import begin, begun, epoch, process, ticks, view, worker
from gossipdp.protocol.stalling import ACCUSE_AFTER, GIVE_UP_AFTER, MAX_RESTARTS, pass_over_after

from gossipdp.protocol.actions import Finished
from gossipdp.protocol.consolidate import tree
from gossipdp.protocol.members import Status
from gossipdp.protocol.messages import Accuse, BeginEpoch, NewerEpoch, PullResults


def test_a_leader_leaves_out_a_leaf_that_lives_and_gives_nothing() -> None:
    machine = worker(0)
    machine.review(view(3))
    machine.partial_landed(1, epoch(1), 0)
    machine.partial_landed(1, epoch(1), 1)
    assert begun(ticks(machine, GIVE_UP_AFTER - 1)) == {begin(1, 0, 1, 2)}
    assert begun(ticks(machine, 1)) == {
        BeginEpoch(epoch(2), (process(0), process(1)), None, left_out=(process(2),))
    }
    assert machine.receive(2, NewerEpoch(epoch(9, 2))) == [], "it has no say any more"


def test_who_gets_on_however_slowly_is_waited_for() -> None:
    machine = worker(0, num_chunks=100)
    machine.review(view(2))
    for chunk in range(100):
        assert begun(ticks(machine, ACCUSE_AFTER)) <= {begin(1, 0, 1)}
        machine.partial_landed(1, epoch(1), chunk)
    machine.receive(1, PullResults(epoch(1), 0))
    for landed in range(1, 100):
        assert begun(ticks(machine, ACCUSE_AFTER)) <= {begin(1, 0, 1)}
        assert machine.receive(1, PullResults(epoch(1), landed)) == [], "they are on their way"
    assert begun(ticks(machine, GIVE_UP_AFTER)) == {begin(1, 0, 1)}, "who holds it is alone now"
    assert machine.is_finished is False


def test_accuser_and_accused_are_leaves_of_the_next_tree_and_one_of_them_is_found_out() -> None:
    machine = worker(0)
    machine.review(view(8))
    stalled = begin(1, *range(8))
    assert tree(stalled)[7] == 3
    ticks(machine, ACCUSE_AFTER)
    assert machine.receive(3, Accuse(epoch(1), 6, True)) == [], "not a child of it"
    for _ in range(2):  # what was said once may be out of date
        assert begun(ticks(machine, GIVE_UP_AFTER - ACCUSE_AFTER)) <= {stalled}
        machine.receive(1, Accuse(epoch(1), 3, True))
        machine.receive(3, Accuse(epoch(1), 7, True))
    (second,) = begun(ticks(machine, 1)) - {stalled}
    assert [rank for rank, _ in second.members] == [0, 1, 2, 4, 5, 6, 3, 7]
    parents = tree(second)
    assert not {3, 7} & set(parents.values())
    ticks(machine, ACCUSE_AFTER)
    parent = parents[7]
    assert parent is not None
    for _ in range(2):
        assert begun(ticks(machine, GIVE_UP_AFTER - ACCUSE_AFTER)) <= {second}
        machine.receive(parent, Accuse(epoch(2), 7, True))
    (third,) = begun(ticks(machine, 1)) - {second}
    assert third.left_out == (process(7),)
    assert process(3) in third.members


def test_a_bad_link_is_gone_round_and_leaves_nobody_out() -> None:
    machine = worker(0)
    machine.review(view(3))
    first = begin(1, 0, 1, 2)
    machine.partial_landed(1, epoch(1), 0)
    machine.partial_landed(1, epoch(1), 1)
    actions = [action for _ in range(GIVE_UP_AFTER) for action in machine.tick({1})]
    (second,) = begun(actions) - {first}
    assert second.left_out == ()
    assert tree(second) == {0: None, 1: 0, 2: 1}


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_leader_under_whom_nothing_lands_is_passed_over(is_joined: bool) -> None:
    machine = worker(1)
    machine.review(view(3))
    if is_joined:
        machine.receive(0, begin(1, 0, 1, 2))
        assert begun(ticks(machine, pass_over_after(3) - 1)) == set()
        machine.result_landed(0, epoch(1), 0)
    assert begun(ticks(machine, pass_over_after(3) - 1)) == set()
    number = 2 if is_joined else 1
    without = BeginEpoch(epoch(number, 1), (process(1), process(2)), None, left_out=(process(0),))
    assert begun(ticks(machine, 1 + is_joined)) == {without}
    assert machine.receive(0, begin(9, 0, 1, 2)) == [], "nor is it followed again"


def test_a_leader_that_waits_for_whoever_still_trains_is_not_passed_over() -> None:
    machine = worker(1)
    machine.wait_ticks = 100.0
    machine.review(view(4, worker2=Status.ALIVE))
    assert begun(ticks(machine, 99 + pass_over_after(4))) == set()
    machine.waits_for_all = False
    assert [each.left_out for each in begun(ticks(machine, 1))] == [(process(0),)]


def test_a_leader_has_its_time_from_when_all_are_done() -> None:
    machine = worker(1)
    machine.review(view(3, worker2=Status.ALIVE))
    ticks(machine, 100 * pass_over_after(3))
    machine.review(view(3))
    assert begun(ticks(machine, pass_over_after(3) - 1)) == set()
    assert begun(ticks(machine, 1)) != set()


def test_a_leader_that_begins_anew_and_gets_on_slowly_is_not_passed_over() -> None:
    machine = worker(1, num_chunks=100)
    machine.review(view(2))
    for number, num_landed in ((1, 90), (2, 90), (3, 100)):
        machine.receive(0, begin(number, 0, 1))
        for chunk in range(num_landed):
            assert begun(ticks(machine, pass_over_after(2) // 2)) == set()
            machine.result_landed(0, epoch(number), chunk)


def test_who_has_the_leader_begin_anew_again_and_again_is_left_out() -> None:
    machine = worker(0)
    machine.review(view(3))
    for number in range(MAX_RESTARTS):
        (again,) = begun(machine.receive(2, NewerEpoch(epoch(2 * number + 2, 2))))
        assert again.epoch == epoch(2 * number + 3)
    (without,) = begun(machine.receive(2, NewerEpoch(epoch(900, 2))))
    assert without.left_out == (process(2),)


def test_an_epoch_begun_anew_wins_no_time_for_who_stalls() -> None:
    machine = worker(0)
    machine.review(view(2))
    for number in range(1, 5):
        ticks(machine, 2)
        machine.receive(1, NewerEpoch(epoch(2 * number, 1)))
    (without,) = {each for each in begun(ticks(machine, 4)) if each.left_out} or {None}
    assert without is None, "it is alone now"
    assert machine.distance_measured(epoch(10), 0.0)[-1] == Finished()
