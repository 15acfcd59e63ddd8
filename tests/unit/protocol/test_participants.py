"""Members that are left out or passed over, seen from one worker's consolidation machine."""

import msgspec
import pytest
from consolidation import begin, begun, epoch, process, ticks, view, worker

from gossipdp.protocol import messages as say
from gossipdp.protocol.members import Status
from gossipdp.protocol.participants import MAX_EPOCHS, MAX_RESTARTS, PASS_OVER_AFTER
from gossipdp.protocol.reduction import GRACE, STALLED_AFTER


def test_a_leader_leaves_out_a_leaf_that_lives_and_gives_nothing():
    machine = worker(0, among=view(3))
    machine.partial_landed(1, epoch(1), 0)
    machine.partial_landed(1, epoch(1), 1)
    assert begun(ticks(machine, STALLED_AFTER + GRACE - 2)) <= {begin(1, 0, 1, 2)}
    (again,) = begun(ticks(machine, 2)) - {begin(1, 0, 1, 2)}
    reason = "worker 0 had nothing of it for 1.5 time-outs"
    left_out = (say.LeftOut(process(2), reason),)
    assert again == msgspec.structs.replace(begin(2, 0, 1), left_out=left_out)
    assert machine.left_out == {2: reason}
    assert machine.receive(2, say.NewerEpoch(epoch(9, 2))) == [], "it has no say any more"


DISTANCES = [(child, say.Distance(epoch(1), 0.0)) for child in (1, 2)]


@pytest.mark.parametrize("said", [[], DISTANCES[:1], [*DISTANCES, (1, say.Committed(epoch(1)))]])
def test_a_leader_leaves_out_each_child_that_says_nothing_in_its_turn(said):
    leader = worker(0, num_chunks=0, among=view(3))
    for child, message in said:
        leader.receive(child, message)
    ticks(leader, STALLED_AFTER + GRACE)
    assert set(leader.left_out) == ({2} if said else {1, 2})


@pytest.mark.parametrize("how", ["chunks", "what moves elsewhere", "new epochs"])
def test_a_leader_under_which_anything_moves_is_not_passed_over(how):
    machine = worker(1, num_chunks=100, among=view(3), joins=1)
    for number in range(2, 12):
        ticks(machine, PASS_OVER_AFTER - 1)
        match how:
            case "chunks":
                machine.result_landed(0, epoch(1), number - 2, 0.0)
            case "what moves elsewhere":
                machine.receive(0, say.Progressed(epoch(1), number))
            case "new epochs":
                machine.receive(0, begin(number, 0, 1, 2))
        ticks(machine, 1)
    assert machine.left_out == {}


def test_a_leader_whose_count_stands_still_is_passed_over():
    machine = worker(1, num_chunks=100, among=view(3), joins=1)
    for _ in range(PASS_OVER_AFTER + 1):
        assert machine.left_out == {}
        machine.receive(0, say.Progressed(epoch(1), 7))
        ticks(machine, 1)
    assert machine.left_out == {0: "it led, and worker 1 had nothing of it for 4 time-outs"}


def test_a_leader_that_begins_anew_without_end_is_passed_over():
    machine = worker(1, among=view(3))
    for number in range(1, MAX_EPOCHS + 3):
        machine.receive(0, begin(number, 0, 1, 2))
        ticks(machine, 1)
    assert machine.left_out == {0: "it began 16 times, and worker 1 had no result"}


@pytest.mark.parametrize("joins", [None, 1])
def test_a_leader_waits_for_those_that_train_as_long_as_was_asked(joins):
    """Also where it began before it had heard of one, and a member's own wait ends first."""
    machine = worker(1, among=view(2), joins=joins)
    machine.participants.wait_ticks = 100
    machine.waits_for_all = False
    machine.review(view(3, worker2=Status.ALIVE))
    ticks(machine, 100 + PASS_OVER_AFTER - 1)
    if joins:
        machine.tick(range(100), {epoch(1): [0]})
        ticks(machine, PASS_OVER_AFTER - 1)
    assert machine.left_out == {}
    ticks(machine, 1)
    assert set(machine.left_out) == {0}


def test_a_leader_whose_wait_ends_after_it_began_begins_anew_so_that_all_hear_of_it():
    """Else the others wait on for a joiner of which it had not heard, and it leaves them out."""
    machine = worker(0, among=view(3))
    among = view(4, worker3=Status.ALIVE)
    assert begun(machine.review(among)) == set()
    machine.waits_for_all = False
    again = begun(machine.review(among))
    assert again == {msgspec.structs.replace(begin(2, 0, 1, 2), waits_for_all=False)}
    assert begun(machine.review(among)) == set(), "once is enough"


def test_the_end_of_the_leaders_wait_is_that_of_all():
    """Else a worker that was done later waits longer, gives nothing meanwhile, and is left out."""
    leader, machine = worker(0), worker(1)
    for each in (leader, machine):
        assert each.review(view(3, worker2=Status.ALIVE)) == []
    assert machine.receive(0, begin(1, 0, 1)) == []
    assert not machine.has_begun, "a mean is computed over all"
    leader.waits_for_all = False
    (late,) = begun(leader.review(view(3, worker2=Status.ALIVE)))
    machine.receive(0, msgspec.structs.replace(late, epoch=epoch(2)))
    assert machine.has_begun
    assert not machine.waits_for_all


def test_who_has_a_leader_begin_anew_again_and_again_is_left_out():
    machine = worker(0, among=view(3))
    for number in range(2, 2 * MAX_RESTARTS + 4, 2):
        machine.receive(2, say.NewerEpoch(epoch(number, 2)))
    assert machine.left_out == {2: "it made worker 0 restart 8 times"}


def test_a_worker_that_cannot_give_says_so_and_is_left_out():
    leaf = worker(2, among=view(3), joins=1)
    (said,) = leaf.cannot_give(epoch(1), 2, "its parameters hold NaN or infinity")
    assert said.peer == 0
    leader = worker(0, among=view(3))
    leader.receive(2, said.message)
    (again,) = begun(ticks(leader, GRACE)) - {begin(1, 0, 1, 2)}
    assert again.left_out == (say.LeftOut(process(2), "its parameters hold NaN or infinity"),)
    leader = worker(0, among=view(3))
    leader.cannot_give(epoch(1), 0, "NaN")
    assert begin(2, 0, 1, 2) in begun(ticks(leader, GRACE)), "it does not leave itself out"


@pytest.mark.parametrize(("useless_of", "left_out"), [(None, {2}), (1, {2}), (2, set())])
def test_who_holds_the_result_and_sends_nothing_or_useless_values_is_left_out(useless_of, left_out):
    machine = worker(1, num_chunks=2, among=view(3, worker0=Status.DEAD))
    machine.receive(2, say.Held(epoch(1, 1), say.Average(epoch(1), 3, 0.25)))
    if useless_of is None:
        ticks(machine, STALLED_AFTER - 1)
        machine.result_landed(2, epoch(1), 0, 0.0)
        ticks(machine, STALLED_AFTER - 1)
        machine.tick(range(100), {epoch(1): [2]})  # some bytes of the next chunk
        ticks(machine, STALLED_AFTER - 1)
        assert machine.left_out == {}
        ticks(machine, 1)
    else:
        machine.cannot_give(epoch(useless_of), 2, "its result holds NaN")
    assert set(machine.left_out) == left_out


def test_accuser_and_accused_come_last_in_the_next_tree():
    machine = worker(0, among=view(8))
    stalled = begin(1, *range(8))
    machine.receive(3, say.Stalled(epoch(1), 6, True, "not a child of it"))
    machine.receive(3, say.Stalled(epoch(1), 7, True, "nothing came"))
    (second,) = begun(ticks(machine, GRACE)) - {stalled}
    assert [rank for rank, _ in second.members] == [0, 1, 2, 4, 5, 6, 3, 7]
    assert second.has_suspects
    machine.receive(5, say.Distance(epoch(1), 0.0))
    machine.receive(4, say.Stalled(epoch(2), 7, True, "nothing came again"))
    (third,) = begun(ticks(machine, GRACE)) - {second}
    assert third.left_out == (say.LeftOut(process(7), "nothing came again"),)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_epoch_that_began_without_one_that_trains_blames_nobody_until_that_is_done(rank):
    """Its leader heard of a joiner too late; whoever had heard before waits, and gives nothing."""
    machine = worker(rank, among=view(3), joins=1 if rank else None)
    machine.review(view(4, worker3=Status.ALIVE))
    assert ticks(machine, 3 * PASS_OVER_AFTER) == []
    assert machine.left_out == {}
    again = {begin(2, 0, 1, 2, 3)} if rank == 0 else set()
    assert begun(machine.review(view(4))) == again
    ticks(machine, PASS_OVER_AFTER + 1)
    assert machine.left_out, "from then on whoever gives nothing is left out"
