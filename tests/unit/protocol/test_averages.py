"""One worker's part in averages of live workers, driven by hand."""

from consolidation import epoch

from gossipdp.protocol.actions import FinishChunk, Forget, Send, SendPartial
from gossipdp.protocol.averages import MAX_REQUESTS, LiveAverages
from gossipdp.protocol.messages import AskAverage, PullPartials, Stalled, TellAverage

NUM_CHUNKS = 9


def worker(rank: int) -> LiveAverages:
    return LiveAverages(rank, 100 + rank, 0, NUM_CHUNKS, lambda: True)


def ask(number: int, *ranks: int) -> AskAverage:
    return AskAverage(epoch(number, ranks[0]), ranks)


def pull(start: int, stop: int) -> PullPartials:
    return PullPartials(epoch(1), start, stop)


def test_what_the_parent_has_is_forgotten_and_no_more() -> None:
    leaf = worker(1)
    assert leaf.receive(0, ask(1, 0, 1, 2)) == [Send(0, TellAverage(epoch(1), 1))]
    sends = [SendPartial(0, epoch(1), chunk) for chunk in range(NUM_CHUNKS)]
    assert leaf.receive(0, pull(0, 2)) == [Forget(epoch(1), 0), *sends[:2]]
    assert leaf.receive(0, pull(1, 4)) == [Forget(epoch(1), 1), *sends[2:4]]
    leaf.link_lost(0)
    assert leaf.receive(0, pull(3, 4)) == [Forget(epoch(1), 3), sends[3]]
    assert leaf.receive(0, pull(NUM_CHUNKS, NUM_CHUNKS)) == [Forget(epoch(1))]
    assert leaf.is_idle


def test_a_death_begins_anew_without_it() -> None:
    root = worker(0)
    root.ask({0, 1, 2})
    root.receive(1, TellAverage(epoch(1), 1))
    actions = root.review({0, 1})
    assert actions[:2] == [Forget(epoch(1)), Send(1, ask(2, 0, 1))]
    assert root.receive(2, TellAverage(epoch(1), 1)) == []
    root.receive(1, TellAverage(epoch(2), 1))
    assert FinishChunk(epoch(2), 0, 2) in root.partial_landed(1, epoch(2), 0)


def test_the_sum_of_a_caller_that_died_is_forgotten() -> None:
    leaf = worker(1)
    leaf.receive(0, ask(1, 0, 1, 2))
    assert leaf.review({0, 1}) == [], "a death elsewhere is for the caller to see"
    assert leaf.review({1, 2}) == [Forget(epoch(1))]
    assert leaf.is_idle


def test_a_late_request_of_an_earlier_attempt_changes_nothing() -> None:
    leaf = worker(1)
    leaf.receive(0, ask(2, 0, 1))
    assert leaf.receive(0, ask(1, 0, 1, 2)) == []
    assert leaf.sum_of(epoch(1)) is None
    assert leaf.sum_of(epoch(2)) is not None


def test_who_takes_part_in_many_sums_says_that_it_cannot_in_one_more() -> None:
    last = MAX_REQUESTS + 1
    leaf = worker(last)
    for caller in range(MAX_REQUESTS):
        leaf.receive(caller, ask(1, caller, last))
    (refused,) = leaf.receive(last - 1, ask(1, last - 1, last))
    reason = f"it takes part in {MAX_REQUESTS} averages already"
    assert refused == Send(last - 1, Stalled(epoch(1, last - 1), last, True, reason))
    assert leaf.sum_of(epoch(1, last - 1)) is None
