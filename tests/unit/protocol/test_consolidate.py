"""One worker's consolidation machine, driven by hand."""

import msgspec
import pytest

from gossipdp.protocol.actions import (
    Commit,
    FinishChunk,
    Finished,
    MeasureDistance,
    Prepare,
    Send,
    SendPartial,
    SendResult,
)
from gossipdp.protocol.consolidate import (
    MAX_REWINDS,
    Consolidation,
    ConsolidationAction,
    ConsolidationMessage,
    tree,
)
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import (
    Accuse,
    Average,
    BeginEpoch,
    CommitEpoch,
    Committed,
    Distance,
    Epoch,
    Held,
    NewerEpoch,
    PullPartials,
    PullResults,
    Release,
)
from gossipdp.protocol.stalling import (
    ACCUSE_AFTER,
    GIVE_UP_AFTER,
    MAX_RESTARTS,
    pass_over_after,
)


def process(rank: int) -> tuple[int, int]:
    return (rank, 100 + rank)


def view(num_workers: int, **others: Status) -> list[Member]:
    """All done, but for ``worker3=Status.DEAD`` and the like."""
    return [
        Member(rank, 1, 100 + rank, others.get(f"worker{rank}", Status.DONE))
        for rank in range(num_workers)
    ]


def epoch(number: int, leader: int = 0) -> Epoch:
    return Epoch(number, leader, 100 + leader)


def begin(number: int, *ranks: int, average: Average | None = None) -> BeginEpoch:
    return BeginEpoch(epoch(number, ranks[0]), tuple(process(rank) for rank in ranks), average)


def worker(rank: int, num_chunks: int = 2, num_copied_chunks: int = 0) -> Consolidation:
    return Consolidation(rank, 100 + rank, num_chunks, num_copied_chunks)


def test_alone_without_a_message() -> None:
    machine = worker(0, num_chunks=2, num_copied_chunks=1)
    assert machine.review(view(1)) == [
        Prepare(),
        FinishChunk(0, 1),
        FinishChunk(1, 1),
        MeasureDistance(epoch(1)),
    ]
    assert machine.distance_measured(epoch(1), 0.0) == [Commit(epoch(1), 0.0, 1), Finished()]
    assert machine.is_finished
    assert machine.review(view(1)) == []


def test_waits_for_whoever_still_trains() -> None:
    machine = worker(0)
    assert machine.review(view(3, worker2=Status.ALIVE)) == []
    assert machine.missing() == (2,)
    assert machine.receive(1, begin(4, 1, 2)) == [], "not a member"
    assert machine.review(view(3))[:2] == [Prepare(), Send(1, begin(5, 0, 1, 2))], "above epoch 4"
    assert machine.missing() == ()


def test_an_inner_worker_from_begin_to_release() -> None:
    machine = worker(1)
    assert machine.review(view(5)) == []
    start = begin(1, 0, 1, 2, 3, 4)
    assert machine.receive(0, start) == [
        Prepare(),
        Send(3, start),
        Send(3, PullPartials(epoch(1), 0, 2)),
        Send(4, start),
        Send(0, PullResults(epoch(1), 0)),
    ]
    assert not machine.accepts_partial(4, epoch(1), 0), "the left child's comes first"
    assert machine.accepts_partial(3, epoch(1), 0)
    assert machine.partial_landed(3, epoch(1), 0) == [Send(4, PullPartials(epoch(1), 0, 1))]
    assert machine.accepts_partial(4, epoch(1), 0)
    assert machine.receive(0, PullPartials(epoch(1), 0, 1)) == []
    assert machine.partial_landed(4, epoch(1), 0) == [SendPartial(0, epoch(1), 0)]
    assert machine.partial_landed(3, epoch(1), 1) == [Send(4, PullPartials(epoch(1), 1, 2))]
    assert machine.partial_landed(4, epoch(1), 1) == [], "its parent has not asked for chunk 1 yet"
    assert machine.receive(0, PullPartials(epoch(1), 0, 2)) == [SendPartial(0, epoch(1), 1)]

    assert machine.receive(3, PullResults(epoch(1), 0)) == []
    assert machine.receive(4, PullResults(epoch(1), 1)) == []
    assert machine.accepts_result(0, epoch(1), 0)
    assert machine.result_landed(0, epoch(1), 0) == [SendResult(3, epoch(1), 0)]
    assert machine.result_landed(0, epoch(1), 1) == [
        MeasureDistance(epoch(1)),
        SendResult(3, epoch(1), 1),
        SendResult(4, epoch(1), 1),
    ]
    assert machine.receive(4, Distance(epoch(1), 4.0)) == []
    assert machine.distance_measured(epoch(1), 1.0) == []
    assert machine.receive(3, Distance(epoch(1), 2.0)) == [Send(0, Distance(epoch(1), 7.0))]
    assert machine.receive(0, CommitEpoch(epoch(1), 0.5)) == [
        Commit(epoch(1), 0.5, 5),
        Send(3, CommitEpoch(epoch(1), 0.5)),
        Send(4, CommitEpoch(epoch(1), 0.5)),
    ]
    assert machine.receive(3, Committed(epoch(1))) == []
    assert machine.receive(4, Committed(epoch(1))) == [Send(0, Committed(epoch(1)))]
    assert machine.receive(0, Release(epoch(1))) == [
        Send(3, Release(epoch(1))),
        Send(4, Release(epoch(1))),
        Finished(),
    ]


def test_a_lower_epoch_is_not_followed_and_its_leader_is_told() -> None:
    machine = worker(2)
    machine.review(view(3))
    machine.receive(0, begin(5, 0, 1, 2))
    assert machine.receive(0, begin(4, 0, 1, 2)) == [Send(0, NewerEpoch(epoch(5)))]
    assert machine.receive(1, begin(6, 1, 2)) == [], "lower leader wins"
    assert machine.receive(1, CommitEpoch(epoch(4, 1), 0.0)) == []


def test_a_death_begins_a_new_epoch_under_the_next_lowest() -> None:
    machine = worker(1)
    machine.review(view(3))
    machine.receive(0, begin(3, 0, 1, 2))
    start = begin(4, 1, 2)
    actions = machine.review(view(3, worker0=Status.DEAD))
    assert actions[:2] == [Prepare(), Send(2, start)]
    assert not machine.accepts_result(0, epoch(3), 0)


def test_who_holds_a_result_refuses_to_compute_another_and_passes_it_on() -> None:
    machine = worker(1, num_chunks=1)
    machine.review(view(3))
    machine.receive(0, begin(1, 0, 1, 2))
    machine.result_landed(0, epoch(1), 0)
    machine.distance_measured(epoch(1), 2.0)
    held = Average(epoch(1), 3, None)
    assert machine.receive(0, begin(2, 0, 1)) == [Send(0, Held(epoch(2), held))]
    assert machine.receive(0, PullResults(epoch(1), 0)) == [SendResult(0, epoch(1), 0)]
    again = begin(3, 0, 1, average=held)
    assert machine.receive(0, again) == [Send(0, Distance(epoch(3), 2.0))], "measured once"


def test_a_leader_fetches_the_result_that_a_member_holds() -> None:
    machine = worker(1, num_chunks=1)
    machine.review(view(3, worker0=Status.DEAD))
    held = Average(epoch(1), 3, 0.25)
    start = begin(2, 1, 2, average=held)
    assert machine.receive(2, Held(epoch(1, 1), held)) == [
        Prepare(),
        Send(2, start),
        Send(2, PullResults(epoch(1), 0)),
    ]
    assert machine.accepts_result(2, epoch(1), 0)
    assert machine.result_landed(2, epoch(1), 0) == []
    assert machine.receive(2, Distance(epoch(2, 1), 0.0)) == [
        Commit(epoch(1), 0.25, 3),
        Send(2, CommitEpoch(epoch(2, 1), 0.25)),
    ]


def test_everything_is_asked_for_again_on_a_new_link() -> None:
    machine = worker(0, num_chunks=3)
    machine.review(view(2))
    machine.partial_landed(1, epoch(1), 0)
    assert machine.link_lost(1) == [
        Send(1, begin(1, 0, 1)),
        Send(1, PullPartials(epoch(1), 1, 3)),
    ]


def ticks(machine: Consolidation, number: int) -> list[ConsolidationAction]:
    """What a worker does in so many quarters of a time-out in which it hears everybody."""
    return [action for _ in range(number) for action in machine.tick(range(100))]


def begun(actions: list[ConsolidationAction]) -> set[BeginEpoch]:
    return {
        action.message
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, BeginEpoch)
    }


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


def test_nobody_else_begins_an_epoch_of_a_leader_that_is_linked() -> None:
    forged = begin(7, 0, 1, 2)
    for linked in (True, False):
        machine = Consolidation(2, 102, 1, is_linked=lambda rank, linked=linked: linked)  # type: ignore[misc]
        machine.review(view(4))
        assert tree(begin(7, 0, 2))[2] == 0
        assert machine.receive(1, begin(7, 0, 2)) == [], "not its parent"
        chain = BeginEpoch(forged.epoch, forged.members, None, has_suspects=True)
        assert (machine.receive(1, chain) != []) is not linked
        if linked:
            assert machine.receive(0, chain) != []


def test_a_child_that_joined_before_its_parent_says_once_more_what_it_wants() -> None:
    machine = Consolidation(3, 103, 1, is_linked=lambda rank: True)
    machine.review(view(4))
    start = begin(1, 0, 1, 2, 3)
    wants = Send(1, PullResults(epoch(1), 0))
    assert machine.receive(0, start) == [Prepare(), wants], "by the word of its leader"
    assert machine.receive(1, start) == [wants]
    assert machine.receive(1, start) == [], "a repetition"


def test_results_are_sent_anew_only_so_often() -> None:
    machine = worker(0, num_chunks=1)
    machine.review(view(2))
    machine.partial_landed(1, epoch(1), 0)
    sent = [machine.receive(1, PullResults(epoch(1), 0)) for _ in range(100)]
    assert sum(map(bool, sent)) == 1 + MAX_REWINDS


@pytest.mark.parametrize("ranks", [[], [1, 0], [0, 0, 1], [1, 2]])
def test_a_member_list_that_makes_no_sense_does_not_decode(ranks: list[int]) -> None:
    members = [[rank, 1] for rank in ranks]
    data = msgspec.msgpack.encode(["BeginEpoch", [1, 0, 7], members, None])
    with pytest.raises(msgspec.ValidationError, match="members of an epoch"):
        msgspec.msgpack.decode(data, type=ConsolidationMessage)
