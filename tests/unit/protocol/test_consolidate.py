"""One worker's consolidation machine, driven by hand."""

import math

from consolidation import begin, epoch, ticks, view, worker

from gossipdp.protocol import actions as do
from gossipdp.protocol import messages as say
from gossipdp.protocol.consolidate import MAX_ACKNOWLEDGED, Consolidation
from gossipdp.protocol.members import Status
from gossipdp.protocol.reduction import REPEAT_AFTER, WINDOW


def pull_results(number: int, start: int) -> say.PullResults:
    """Ask for the chunks, of two, that are not here."""
    return say.PullResults(epoch(number), epoch(number), start, 2)


def test_alone_without_a_message():
    machine = worker(0, num_chunks=2, num_copied_chunks=1)
    assert machine.review(view(1)) == [do.FinishChunk(epoch(1), chunk, 1) for chunk in range(2)]
    assert machine.chunk_finished(epoch(1), 1, 0.0) == [], "out of order"
    assert machine.chunk_finished(epoch(1), 0, 0.0) == []
    assert machine.chunk_finished(epoch(2), 1, 0.0) == [], "of another sum"
    assert machine.chunk_finished(epoch(1), 1, 0.0) == [do.Commit(epoch(1), 0.0, 1), do.Finished()]
    assert machine.review(view(1)) == []


def test_an_infinite_distance_is_the_largest_that_can_be_said():
    """Parameters near 1e20 are finite, and their squares are not in float32."""
    machine = worker(0, num_chunks=1, num_copied_chunks=1, among=view(1))
    commit, _ = machine.chunk_finished(epoch(1), 0, math.inf)
    assert commit == do.Commit(epoch(1), 1e300, 1)
    told = say.Envelope(say.Distance(epoch(1), say.MAX_DISTANCE2))
    assert say.decode(say.encode(told)) == told


def test_an_inner_worker_from_begin_to_release():
    """Each message may arrive twice, and the second does nothing."""

    def down(message: say.ConsolidationMessage | say.ReductionMessage) -> list[do.Send]:
        return [do.Send(child, message) for child in (3, 4)]

    def hear(peer: int, message: say.ConsolidationMessage | say.ReductionMessage) -> list[object]:
        actions = machine.receive(peer, message)
        assert machine.receive(peer, message) == []
        return actions

    machine = worker(1)
    assert machine.review(view(5)) == []
    start = begin(1, 0, 1, 2, 3, 4)
    assert machine.receive(0, start) == [*down(start), do.Send(0, pull_results(1, 0))]
    first, second = (say.PullPartials(epoch(1), chunk, chunk + 1) for chunk in range(2))
    assert hear(0, first) == down(first)
    assert machine.partial_landed(4, epoch(1), 0) == machine.partial_landed(3, epoch(1), 1) == []
    assert machine.partial_landed(3, epoch(1), 0) == [do.SendPartial(0, epoch(1), 0)]
    assert hear(0, second) == down(second)
    machine.partial_landed(3, epoch(1), 1)
    assert machine.partial_landed(4, epoch(1), 1)[0] == do.SendPartial(0, epoch(1), 1)

    assert hear(3, pull_results(1, 0)) == hear(4, pull_results(1, 1)) == []
    commit, release = say.CommitEpoch(epoch(1), 0.5), say.Release(epoch(1))
    assert hear(0, commit) == hear(0, release) == [], "it does not hold the result yet"
    assert machine.result_landed(0, epoch(1), 1, 9.0) == [], "out of order"
    assert not machine.accepts_result(3, epoch(1), 0), "not its parent"
    assert not machine.accepts_result(0, epoch(2), 0), "another result"
    asks, sends = do.Send(0, pull_results(1, 1)), do.SendResult(3, epoch(1), 0)
    assert machine.result_landed(0, epoch(1), 0, 0.25) == [asks, sends]
    sends_both = [do.SendResult(child, epoch(1), 1) for child in (3, 4)]
    assert machine.result_landed(0, epoch(1), 1, 0.75) == sends_both
    assert hear(4, say.Distance(epoch(1), 4.0)) == []
    distance = say.Distance(epoch(1), 7.0)
    assert hear(3, say.Distance(epoch(1), 2.0)) == [do.Send(0, distance)]
    assert hear(0, commit) == [do.Commit(epoch(1), 0.5, 5), *down(commit)]
    assert hear(3, say.Committed(epoch(1))) == []
    assert hear(4, say.Committed(epoch(1))) == [do.Send(0, say.Committed(epoch(1)))]
    assert hear(0, release) == [*down(release), do.Finished()]


def test_a_lower_epoch_is_not_followed_and_its_leader_is_told():
    machine = worker(2, among=view(3), joins=5)
    assert machine.receive(0, begin(4, 0, 1, 2)) == [do.Send(0, say.NewerEpoch(epoch(5)))]
    assert machine.receive(1, begin(6, 1, 2)) == [], "lower leader wins"
    assert machine.receive(1, say.CommitEpoch(epoch(4, 1), 0.0)) == []


def test_of_two_results_the_later_one_stays():
    machine = worker(1, num_chunks=1, among=view(3), joins=2)
    machine.result_landed(0, epoch(2), 0, 2.0)
    old, held, newer = (say.Average(epoch(number), 3, None) for number in (1, 2, 4))
    tells = do.Send(0, say.Held(epoch(3), held))
    assert machine.receive(0, begin(3, 0, 1, 2, average=old)) == [tells]
    assert machine.receive(0, say.CommitEpoch(epoch(3), 0.5)) == [], "it holds another result"
    asks = do.Send(0, say.PullResults(epoch(5), epoch(4), 0, 1))
    assert machine.receive(0, begin(5, 0, 1, 2, average=newer)) == [do.Forget(epoch(2)), asks]
    machine.review(view(4, worker3=Status.ALIVE))  # for which the next epoch has to wait
    assert machine.receive(0, begin(7, 0, 1, 2, average=say.Average(epoch(6), 3, 0.0))) == []
    machine.receive(0, begin(5, 0, 1, 2, average=newer))  # once more, by another way
    machine.result_landed(0, epoch(4), 0, 2.0)
    asks = do.Send(0, say.PullResults(epoch(7), epoch(6), 0, 1))
    ends = [do.Commit(epoch(4), 0.5, 3), do.Forget(epoch(4)), asks]
    assert machine.receive(0, say.CommitEpoch(epoch(5), 0.5)) == ends, "in this order"


def test_nobody_else_begins_an_epoch_of_a_leader_that_is_linked():
    forged = begin(7, 0, 1, 2, 3)
    for linked in (True, False):
        machine = Consolidation(2, 102, 1, is_linked=lambda rank, linked=linked: linked)  # type: ignore[misc]
        machine.review(view(4, worker3=Status.DEAD))  # which is in it: no reason to wait
        assert machine.receive(1, begin(7, 0, 2)) == [], "not its parent"
        chain = say.BeginEpoch(forged.epoch, forged.members, None, has_suspects=True)
        assert (machine.receive(1, chain) != []) is not linked
        if linked:
            assert machine.receive(0, begin(7, 0, 3, 2)) != [], "whoever else is in it"


def test_a_child_that_joined_before_its_parent_says_once_more_what_it_wants():
    machine = Consolidation(3, 103, 1, is_linked=lambda rank: True)
    machine.review(view(4))
    start = begin(1, 0, 1, 2, 3)
    wants = do.Send(1, say.PullResults(epoch(1), epoch(1), 0, 1))
    assert machine.receive(0, start) == [wants], "by the word of its leader"
    assert machine.receive(1, start) == [wants]
    assert machine.receive(1, start) == [], "a repetition"


def test_a_result_is_sent_once_an_epoch_and_link_and_never_beyond_what_there_is_room_for():
    machine = worker(0, num_chunks=1, num_copied_chunks=9, among=view(2))
    machine.partial_landed(1, epoch(1), 0)
    machine.chunk_finished(epoch(1), 0, 0.0)
    sent = [do.SendResult(1, epoch(1), chunk) for chunk in range(WINDOW + 1)]
    asks = say.PullResults(epoch(1), epoch(1), 0, 2)
    assert machine.receive(1, asks)[-2:] == sent[:2]
    assert machine.receive(1, asks) == [], "they are on their way"
    further = say.PullResults(epoch(1), epoch(1), 1, 9)
    assert machine.receive(1, further) == sent[2:]
    assert ticks(machine, 1) == [do.Send(1, say.Progressed(epoch(1), 1))]
    machine.receive(1, further)
    assert ticks(machine, 1) == [], "a repetition brings nothing further"
    again = machine.receive(1, say.PullResults(epoch(2), epoch(1), 0, 9))
    assert [each for each in again if isinstance(each, do.SendResult)] == sent[:WINDOW]
    machine.link_lost(1)
    again = machine.receive(1, say.PullResults(epoch(2), epoch(1), 1, 9))
    assert [each for each in again if isinstance(each, do.SendResult)] == sent[1:]


def test_who_has_led_stays_while_one_lives_that_was_no_member():
    """One that is lower came: it leads from now on."""
    machine = worker(1, num_chunks=0, among=view(3, worker0=Status.DEAD))
    assert do.Commit(epoch(1, 1), 0.0, 2) in machine.receive(2, say.Distance(epoch(1, 1), 0.0))
    tells = do.Send(0, say.NewerEpoch(epoch(1, 1)))
    assert machine.review(view(3)) == [tells]
    assert machine.link_lost(0) == [tells], "it may be lost"
    assert machine.receive(2, say.Committed(epoch(1, 1))) == []


def test_a_member_stays_while_one_lives_that_was_no_member():
    machine = worker(1, num_chunks=0, among=view(2), joins=1)
    assert do.Send(0, say.Committed(epoch(1))) in machine.receive(0, say.CommitEpoch(epoch(1), 0.0))
    machine.review(view(3))
    assert machine.receive(0, say.Release(epoch(1))) == []
    machine.review(view(3, worker2=Status.DEAD))
    held = say.Average(epoch(1), 2, 0.0)
    for number in range(2, MAX_ACKNOWLEDGED + 2):
        machine.receive(0, begin(number, 0, 1, average=held))
        machine.receive(0, say.CommitEpoch(epoch(number), 0.0))
    assert machine.receive(0, say.Release(epoch(1))) == [], "too long ago"
    assert machine.receive(0, say.Release(epoch(2))) == [do.Finished()]


def test_a_new_epoch_begins_with_nothing_of_the_last():
    machine = worker(0, num_chunks=2, among=view(3))
    for child in (1, 2):
        machine.partial_landed(child, epoch(1), 0)
    machine.chunk_finished(epoch(1), 0, 5.0)
    machine.receive(2, pull_results(1, 0))
    machine.review(view(3, worker2=Status.DEAD))
    assert do.SendResult(1, epoch(2), 0) not in machine.receive(1, pull_results(2, 0))
    for chunk in range(2):
        machine.partial_landed(1, epoch(2), chunk)
    assert do.SendResult(1, epoch(2), 0) in machine.chunk_finished(epoch(2), 0, 1.0)
    assert machine.chunk_finished(epoch(2), 1, 1.0) == [do.SendResult(1, epoch(2), 1)]
    assert do.Commit(epoch(2), 2.0, 2) in machine.receive(1, say.Distance(epoch(2), 2.0))


def test_what_was_asked_in_vain_is_asked_again():
    machine = worker(2, among=view(3), joins=1)
    for _ in range(3):
        assert ticks(machine, REPEAT_AFTER - 1) == []
        assert ticks(machine, 1) == [do.Send(0, pull_results(1, 0))]
    assert ticks(machine, REPEAT_AFTER - 1) == []
    machine.result_landed(0, epoch(1), 0, 0.0)
    assert ticks(machine, REPEAT_AFTER - 1) == [], "it was not in vain"
    assert ticks(machine, 1) == [do.Send(0, pull_results(1, 1))]
    leader, pull = worker(0, among=view(3)), say.PullPartials(epoch(1), 0, 2)
    words = [do.Send(child, word) for child in (1, 2) for word in (begin(1, 0, 1, 2), pull)]
    assert ticks(leader, REPEAT_AFTER) == words


def test_a_sum_that_was_given_up_takes_nothing_more():
    machine = worker(0, num_chunks=1, among=view(3))
    machine.partial_landed(2, epoch(1), 0)
    machine.review(view(3, worker1=Status.DEAD))
    assert machine.partial_landed(2, epoch(1), 0) == machine.partial_landed(1, epoch(1), 0) == []
    assert machine.chunk_finished(epoch(1), 0, 0.0) == []
    divides = do.FinishChunk(epoch(2), 0, 2)  # by those that are left
    asks = do.Send(2, say.PullPartials(epoch(2), 1, 1))
    assert machine.partial_landed(2, epoch(2), 0) == [divides, asks]
