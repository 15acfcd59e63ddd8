"""WorkerProtocol when others fail, and after it failed itself."""

import inspect

import pytest
from driven_worker import TIMEOUT_S, ask, make_worker, member, of_type, run, said, tell

from gossipdp.links.frames import MAX_CONTROL_BYTES
from gossipdp.protocol import messages as say
from gossipdp.protocol.actions import Notice, Send, Stop
from gossipdp.protocol.members import Member, ProgressEntry, Status, first_incarnation
from gossipdp.protocol.worker import WorkerProtocol


def test_an_exchange_ends_where_nothing_of_it_comes_though_its_link_lives():
    """Else a peer that accepts, and sends only heartbeats then, holds both ends for ever."""
    worker = make_worker(0, 2)
    worker.receive(0, ask(0), 1.0)
    assert of_type(run(worker, 1.0, 4.0, [0, 2]), Stop) == []
    worker.progressed(4.0)
    assert of_type(run(worker, 4.0, 4.0 + 0.99 * TIMEOUT_S, [0, 2]), Stop) == []
    (stop,) = of_type(run(worker, 8.9, 4.1 + TIMEOUT_S, [0, 2]), Stop)
    assert (stop.peer, stop.id) == (0, say.ExchangeId(0, 0, 1))
    assert "nothing of it" in stop.reason
    assert worker.exchanges_failed == 1
    assert worker.peers.live == {2}, "its link is closed"
    worker.done(9.1)
    worker.link_up(0, 9.2)
    closed = say.Busy(ask(0, 2).message.id, is_closed=True)
    assert closed in said(worker.receive(0, ask(0, 2), 9.2), 0)
    told = said(run(worker, 9.2, 9.0 + 2 * TIMEOUT_S, [0, 2]), 0)
    assert [each for each in told if isinstance(each, say.Free)] == [say.Free()]
    again = said(worker.receive(0, ask(0, 3), 9.0 + 2 * TIMEOUT_S), 0)
    assert isinstance(again[0], say.Accept)


def test_a_sleep_within_an_exchange_is_no_gap_between_its_bytes():
    for share, is_asked in ((0.49, True), (0.51, False), (0.9, False)):
        worker = make_worker(0, 2)
        actions = [each for number in (1, 2) for each in worker.poll(number * share * TIMEOUT_S)]
        assert of_type(actions, Notice) == [], "too short to be noticed"
        assert any(isinstance(each, say.AskLife) for each in said(actions)) is is_asked
    worker.receive(0, ask(0), 9.0)
    worker.progressed(3604.0)
    actions = worker.finished(say.ExchangeId(0, 0, 1), 3604.1)
    assert worker.peers.patience_s(0) < TIMEOUT_S
    assert [notice.kind for notice in of_type(actions, Notice)] == ["stopped"]


INPUTS = [
    name
    for name, method in inspect.getmembers(WorkerProtocol, inspect.isfunction)
    if not name.startswith("_") and "now" in inspect.signature(method).parameters
]
# A value for every parameter without a default of any input, but the time.
GIVEN = dict.fromkeys(("samples", "peer", "chunk", "rank", "squared_distance"), 0)
GIVEN |= dict.fromkeys(("epoch", "origin"), say.Epoch(1, 0, 70))
GIVEN |= {"id": say.ExchangeId(0, 0, 1), "envelope": tell(), "message": say.Heartbeat()}
GIVEN |= {"reason": "a test", "is_refused": False}


@pytest.mark.parametrize("waits_for", ["bytes", "answers"])
@pytest.mark.parametrize("first", INPUTS)
def test_who_slept_blames_nobody_whatever_it_is_told_first(first, waits_for):
    worker = make_worker(0, 2)
    run(worker, 0.0, 4.0, [0, 2])
    worker.receive(0, ask(0), 4.0)
    if waits_for == "answers":  # of worker 2: to FREE, and to a proposal
        worker.receive(2, ask(2), 4.0)
        worker.finished(ask(0).message.id, 4.0)
        worker._settle(worker.pairing.tick(), 4.0)
    now = 4.0 + 3600.0
    parameters = inspect.signature(getattr(WorkerProtocol, first)).parameters.values()
    given = {
        each.name: GIVEN[each.name]
        for each in list(parameters)[1:]
        if each.name != "now" and each.default is inspect.Parameter.empty
    }
    told = getattr(worker, first)(**given, now=now)
    actions = []
    if first != "progressed":
        actions += told
        assert worker.next_deadline() > now, "it settled: all that was due was looked at"
    actions += run(worker, now, now + 0.4 * TIMEOUT_S, [])
    asked = [each for each in said(actions, 0) if isinstance(each, say.AskLife)]
    assert [each for each in asked if each.suspect == 2] == []
    assert worker.peers.silent == frozenset()
    assert worker.proposals_unanswered == 0
    assert 2 in worker.pairing.available
    assert worker.membership.live() == tuple(range(6))
    (notice,) = of_type(actions, Notice)
    assert (notice.rank, notice.kind) == (1, "stopped")
    assert notice.silent_s == 3600.0


@pytest.mark.parametrize("linked", [(), (0,)])
def test_the_clock_is_looked_at_even_where_there_is_nothing_to_wait_for(linked):
    """Or a long quiet time would look like a stall. No input puts off what is due, either."""
    worker, now = make_worker(*linked, status=Status.JOINING), 0.0
    for _ in range(20):
        worker.poll(now)
        due = worker.next_deadline()
        assert now < due <= now + TIMEOUT_S / 4
        worker.receive(0, say.Envelope(say.AskMembers()), (now + due) / 2)
        assert worker.next_deadline() == due
        now = due


def test_poison_answers_busy_and_gives_nothing():
    worker = make_worker(0, 2)
    worker.receive(0, ask(0), 0.1)
    assert [type(each) for each in worker.poisoned(0.5)[:2]] == [Send, Stop]
    assert not worker.can_donate
    worker.release(0.6)
    assert isinstance(said(worker.receive(2, ask(2), 0.7), 2)[0], say.Busy)


def one_of_three(*done: int) -> WorkerProtocol:
    """Return worker 1, linked to 0 and 2, which alone live beside it; some of them are done."""
    worker = make_worker(0, 2)
    dead = (member(rank, Status.DEAD) for rank in (3, 4, 5))
    worker.receive(0, tell(*dead, *(member(rank, Status.DONE) for rank in done)), 0.1)
    return worker


@pytest.mark.parametrize(("slept_s", "late_s"), [(0.0, 0.2), (3600.0, 0.6)])
def test_the_average_goes_on_without_one_whose_training_hangs(slept_s, late_s):
    """Its gossip thread beats, so nothing else ends the wait. A sleep is no part of that wait."""
    worker, ends = one_of_three(2), 31.0 + slept_s
    worker.done(1.0, wait_s=30.0)
    run(worker, 1.0, 11.0, [0, 2])
    run(worker, 11.0 + slept_s, ends - 0.1, [0, 2])
    assert not worker.consolidation.has_begun
    assert worker.consolidation.participants.missing() == (0,)
    actions = run(worker, ends - 0.1, ends + late_s, [0, 2])
    (begun,) = (each for each in said(actions, 2) if isinstance(each, say.BeginEpoch))
    assert [rank for rank, _ in begun.members] == [1, 2]
    assert worker.membership.get(0) == member(0), "nobody is declared dead"
    assert worker.answer_joiner().is_ending


@pytest.mark.parametrize("status", [Status.ALIVE, Status.DONE])
def test_an_exchange_with_one_that_still_trains_keeps_nobody_out_of_the_average(status):
    """It may take long; the leader leaves out a member that gives nothing for 2.5 time-outs."""
    worker, trains = one_of_three(0), status is Status.ALIVE
    worker.done(0.2)
    worker.receive(2, ask(2), 0.3)
    worker.receive(2, tell(member(2, status)), 0.4)
    begin = say.BeginEpoch(say.Epoch(1, 0, 70), ((0, 70), (1, 71)), None, waits_for_all=False)
    worker.receive(0, say.Envelope(say.NewerEpoch(begin.epoch)), 0.45)  # which waits too
    actions = worker.receive(0, say.Envelope(begin), 0.5)
    assert [stop.peer for stop in of_type(actions, Stop)] == ([2] if trains else [])
    assert worker.consolidation.has_begun is trains
    worker.receive(0, say.Envelope(say.CommitEpoch(begin.epoch, 0.0)), 0.55)
    worker.finished(ask(2).message.id, 0.6)
    assert worker.consolidation._attempt.is_committed, "each message came in its turn"


def test_a_leader_whose_wait_is_over_ends_its_exchange_with_one_that_still_trains():
    worker = one_of_three(2)
    worker.done(1.0, wait_s=2.0)
    worker.receive(0, ask(0), 2.9)
    actions = run(worker, 2.9, 3.1, [0, 2])
    assert [stop.peer for stop in of_type(actions, Stop)] == [0]
    (begun,) = (each for each in said(actions, 2) if isinstance(each, say.BeginEpoch))
    assert not begun.waits_for_all


@pytest.mark.parametrize("meanwhile", ["time passes", "another link is lost"])
def test_a_wait_that_ends_within_an_exchange_begins_no_average_before_its_end(meanwhile):
    """The peer is done, and has ended its half: what is still to be applied here counts."""
    worker = one_of_three()
    worker.done(1.0, wait_s=2.0)
    worker.receive(2, ask(2), 2.9)
    worker.receive(0, tell(member(2, Status.DONE)), 2.95)
    actions = run(worker, 2.95, 3.2, [0, 2])
    if meanwhile == "another link is lost":
        actions += worker.link_down(0, 3.3)
    actions += run(worker, 3.3, 6.0, [0, 2])
    assert of_type(actions, Stop) == []
    assert not worker.consolidation.has_begun
    actions = worker.finished(ask(2).message.id, 6.1)
    (begun,) = (each for each in said(actions, 2) if isinstance(each, say.BeginEpoch))
    assert [rank for rank, _ in begun.members] == [1, 2]


def crowd(count: int, status: Status = Status.ALIVE) -> list[Member]:
    """Return members whose records are as long as they may be."""
    host = "h" * 255
    return [
        Member(rank, 2**31 - 1, 2**63 - 1, status, host, 65535, host, 65535)
        for rank in range(6, 6 + count)
    ]


def test_news_of_a_thousand_travels_in_parts_that_all_arrive():
    worker, other = make_worker(2), make_worker(1, rank=2, process_id=72)
    many = crowd(1000, Status.JOINING)  # no graph of a thousand, which takes seconds
    worker.membership.merge_all(many)
    entries = [ProgressEntry(rank, 2**63 - 1, 2**53, 2**53) for rank in range(6, 1006)]
    worker.progress.merge_all(entries, 0.0)
    now = 0.0
    while other.membership.get(many[-1].rank) is None or len(other.progress.by_rank()) < 1000:
        now += 0.3
        assert now < 10.0
        other.heard(1, now)
        for action in [*worker.heard(2, now), *worker.poll(now)]:
            if isinstance(action, Send) and action.peer == 2:
                data = say.encode(action.message)
                assert len(data) < MAX_CONTROL_BYTES
                other.receive(1, say.decode(data), now)
    assert len(other.membership.members()) == 1006


def test_a_joiner_is_told_of_the_living_of_thousands_in_one_message():
    worker = make_worker(0, 2)
    many = crowd(3000)
    worker.membership.merge_all(many)
    for each in many[:-1]:
        worker.membership.declare_dead(each.rank)
    entries = (ProgressEntry(each.rank, each.process_id, 2**53, 2**53) for each in many)
    worker.progress.merge_all(entries, 0.0)
    answer = worker.answer_joiner()
    assert len(answer.members) == len(answer.progress) == say.MAX_RECORDS
    assert len(say.encode(say.Envelope(answer))) < MAX_CONTROL_BYTES
    told = {each.rank for each in say.decode(say.encode(say.Envelope(answer))).message.members}
    assert told >= {0, 1, 2, 3, 4, 5, many[-1].rank}, "so that it takes the rank after the highest"


def test_a_joiner_is_told_of_the_latest_of_a_forgotten_ranks_thousands_of_lives():
    """Else it has the incarnation and the seed of one before it once more."""
    worker = make_worker(0, 2)
    lives = (ProgressEntry(6, life << 32 | 77, 10, 1) for life in range(2000))
    worker.progress.merge_all(lives, 0.0)
    answer = worker.answer_joiner()
    assert first_incarnation(answer.members, None, answer.progress) == (6, 2000)


def test_the_reasons_why_a_thousand_are_left_out_fit_one_message():
    reason, epoch = "\U0001f600" * 200, say.Epoch(2**62, 2**20 - 1, 2**32 - 1)  # the longest
    left_out = tuple(say.LeftOut((rank, 2**63 - 1), reason) for rank in range(1000))
    begin = say.BeginEpoch(epoch, ((epoch.leader, 70),), None, left_out=left_out)
    data = say.encode(say.Envelope(begin))
    assert len(data) < MAX_CONTROL_BYTES
    assert say.decode(data).message == begin
