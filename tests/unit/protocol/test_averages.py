"""One worker's part in averages of live workers, driven by hand."""

import pytest
from consolidation import epoch

from gossipdp.protocol.actions import AverageEnded, FinishChunk, Forget, Send, SendPartial
from gossipdp.protocol.averages import MAX_REQUESTS, LiveAverages
from gossipdp.protocol.messages import AskAverage, Epoch, PullPartials, Stalled, TellAverage
from gossipdp.protocol.reduction import GRACE, REPEAT_AFTER, STALLED_AFTER, WINDOW

NUM_CHUNKS = 9


def worker(rank: int) -> LiveAverages:
    return LiveAverages(rank, 100 + rank, 0, NUM_CHUNKS, lambda: True)


def ask(number: int, *ranks: int) -> AskAverage:
    return AskAverage(epoch(number, ranks[0]), ranks)


def test_a_death_begins_anew_without_it():
    root = worker(0)
    root.ask({0, 1, 2})
    root.receive(1, TellAverage(epoch(1), 1))
    actions = root.review({0, 1})
    assert actions[:2] == [Forget(epoch(1)), Send(1, ask(2, 0, 1))]
    assert root.receive(2, TellAverage(epoch(1), 1)) == []
    root.receive(1, TellAverage(epoch(2), 1))
    assert FinishChunk(epoch(2), 0, 2) in root.partial_landed(1, epoch(2), 0)


def test_the_sum_of_a_caller_that_died_is_forgotten():
    leaf = worker(1)
    leaf.receive(0, ask(1, 0, 1, 2))
    for start in (0, NUM_CHUNKS):
        pull = PullPartials(epoch(1), start, NUM_CHUNKS)
        assert leaf.receive(2, pull) == [], "not its parent"
    assert leaf.review({0, 1}) == [], "a death elsewhere is for the caller to see"
    assert leaf.review({1, 2}) == [Forget(epoch(1))]
    leaf.receive(0, ask(1, 0, 1, 2))
    assert SendPartial(0, epoch(1), 8) in leaf.receive(0, PullPartials(epoch(1), 8, NUM_CHUNKS))
    quiet = [leaf.tick({0}, {}) for _ in range(24)]
    assert quiet.index([Forget(epoch(1))]) == 23, "its caller must have given it up"


def test_an_average_to_which_nobody_gives_ends_at_once():
    nobody = LiveAverages(0, 100, 0, NUM_CHUNKS, lambda: False)
    assert nobody.ask({0}) == [AverageEnded(epoch(1), 0, {})]
    assert nobody.is_idle


def test_a_child_whose_values_are_of_no_use_is_left_out():
    root = worker(0)
    root.ask({0, 1, 2})
    root.cannot_give(epoch(1), 2, "NaN")
    actions = [action for _ in range(GRACE) for action in root.tick({1, 2}, {})]
    assert Send(1, ask(2, 0, 1)) in actions
    assert root.cannot_give(epoch(1), 0, "NaN") == [], "that sum was given up"
    root.receive(1, TellAverage(epoch(2), 1))
    for chunk in range(NUM_CHUNKS):
        root.partial_landed(1, epoch(2), chunk)
        actions = root.chunk_finished(epoch(2), chunk)
    assert actions[-1] == AverageEnded(epoch(2), 2, {2: "NaN"})


@pytest.mark.parametrize("tells", [True, False])
def test_a_child_that_only_tells_or_only_gives_is_left_out_and_the_other_is_not(tells):
    root = worker(0)
    root.ask({0, 1, 2})
    for child in (1, 2) if tells else (1,):
        root.receive(child, TellAverage(epoch(1), 1))
    for child in (1,) if tells else (1, 2):
        for chunk in range(WINDOW):
            root.partial_landed(child, epoch(1), chunk)
    actions = [each for _ in range(STALLED_AFTER + GRACE) for each in root.tick({1, 2}, {})]
    assert Send(1, ask(2, 0, 1)) in actions


def test_in_each_sum_a_worker_repeats_its_words_and_forgets_a_caller_that_died():
    inner, first = worker(1), ask(1, 0, 1, 2, 3, 4)
    inner.receive(0, first)
    (told,) = inner.receive(2, ask(1, 2, 1, 3))
    assert told == Send(2, TellAverage(epoch(1, 2), 1))
    again = [each for _ in range(REPEAT_AFTER) for each in inner.tick(range(5), {})]
    assert again == [Send(3, first), Send(4, first), told]
    counted = Send(0, TellAverage(epoch(1), 3))
    assert [inner.receive(child, TellAverage(epoch(1), 1)) for child in (3, 4)] == [[], [counted]]
    sent_to = [[each.peer for each in inner.tick(range(5), {})] for _ in range(5)]
    assert sent_to == [[0, 3, 4], [], [], [2], [3, 4, 0]], "the first sum has got on"
    assert inner.receive(3, TellAverage(epoch(1), 1)) == inner.tick(range(5), {}) == []
    assert inner.receive(2, ask(1, 2, 1, 3)) == inner.link_lost(2) == [told]
    assert inner.review({0, 1, 3, 4}) == [Forget(epoch(1, 2))]


def test_the_silent_are_not_waited_for_and_are_named():
    root = worker(0)
    root.ask({0, 1, 2}, silent={2, 5})
    root.receive(1, TellAverage(epoch(1), 1))
    for chunk in range(NUM_CHUNKS):
        root.partial_landed(1, epoch(1), chunk)
        actions = root.chunk_finished(epoch(1), chunk)
    assert actions[-1] == AverageEnded(epoch(1), 2, {2: "it is silent"})


def test_a_request_gives_way_to_a_later_one_and_to_the_next_life_of_its_caller():
    """The numbers of a life begin anywhere: those of the former one may be higher."""
    leaf = worker(1)
    leaf.receive(0, ask(9, 0, 1))
    assert leaf.receive(0, ask(8, 0, 1, 2)) == [], "a late one of an earlier attempt"
    assert leaf.sum_of(epoch(9)) is not None
    anew = AskAverage(Epoch(3, 0, 777), (0, 1, 2))
    leaf.receive(0, anew)
    assert leaf.sum_of(anew.epoch) is not None
    assert leaf.sum_of(epoch(9)) is None


def test_who_takes_part_in_many_sums_says_that_it_cannot_in_one_more():
    last = MAX_REQUESTS + 1
    leaf = worker(last)
    for caller in range(MAX_REQUESTS):
        leaf.receive(caller, ask(1, caller, last))
    (refused,) = leaf.receive(last - 1, ask(1, last - 1, last))
    reason = "it takes part in 64 averages already"
    assert refused == Send(last - 1, Stalled(epoch(1, last - 1), last, True, reason))
    said = Stalled(epoch(1, last - 2), last, True, "NaN")
    given_up = [Send(said.epoch.leader, said), Forget(said.epoch)]
    assert leaf.cannot_give(said.epoch, last, "NaN") == given_up, "it took part in so many"
