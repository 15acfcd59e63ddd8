"""One sum over a tree, driven by hand; and its root's judgement on members that give nothing."""

from collections import Counter, defaultdict, deque
from random import Random

import pytest
from consolidation import epoch
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.protocol import reduction
from gossipdp.protocol.actions import FinishChunk, Send, SendPartial
from gossipdp.protocol.messages import Progressed, PullPartials, Stalled
from gossipdp.protocol.reduction import GRACE, REPEAT_AFTER, STALLED_AFTER, WINDOW, Blame, Reduction

EPOCH = epoch(1)


class Sum:
    """One member's sum over ``num_members``, and its requests since the last look."""

    def __init__(self, rank: int, num_members: int, num_chunks: int = 9, **options) -> None:
        self.actions = []
        self.blame = Blame(rank) if rank == 0 else None
        parents = reduction.tree(range(num_members))
        options.setdefault("divisor", num_members)
        self.sum = Reduction(
            EPOCH, rank, parents, num_chunks, self.actions, blame=self.blame, **options
        )

    def asked(self):
        asked, self.actions[:] = list(self.actions), []
        return asked


def pull(start, stop):
    return PullPartials(EPOCH, start, stop)


@pytest.mark.parametrize("has_suspects", [False, True])
def test_a_tree_is_binary_flat_and_has_its_last_members_as_leaves(has_suspects):
    for num_members in range(1, 70):
        ranks = list(range(100, 100 + num_members))
        parents = reduction.tree(ranks, has_suspects=has_suspects)
        assert list(parents) == ranks
        assert parents[100] is None
        for rank, above in list(parents.items())[1:]:
            assert above < rank, "no circle"
            assert list(parents.values()).count(rank) <= 2
        depth, rank = 0, ranks[-1]
        while (rank := parents[rank]) is not None:
            depth += 1
        assert depth <= num_members.bit_length() + has_suspects - 1
        assert list(parents.values()).count(100) <= (1 if has_suspects else 2)


def test_a_root_divides_only_once_it_knows_by_what():
    root = Sum(0, 1, num_chunks=1, divisor=None)
    root.sum.advance()
    assert root.asked() == []
    root.sum.divisor = 1
    root.sum.advance()
    assert root.asked() == [FinishChunk(EPOCH, 0, 1)]
    root.sum.finished(0)
    assert [root.sum.tick((), (), ()) for _ in range(2)] == [True, False], "it gets on by that"
    assert root.sum.progress == 1


class Sums:
    """All members of one sum; what they send waits until it is delivered, in order by link."""

    def __init__(self, num_members: int, num_chunks: int, random: Random) -> None:
        self.num_chunks, self._random = num_chunks, random
        self.members = [Sum(rank, num_members, num_chunks) for rank in range(num_members)]
        self.finished: deque[int] = deque()  # asked for, and not answered yet
        self.told: dict[int, int] = {}  # the first chunk that its parent lacks, as a member knows
        self._values = {
            (member.sum.rank, chunk): Counter([member.sum.rank])
            for member in self.members
            for chunk in range(num_chunks)
        }
        self._links: dict[tuple[int, int], deque] = defaultdict(deque)
        self._num_results = 0
        for member in self.members:
            member.sum.advance()
            self._send(member)

    def happen(self, may_lose: bool) -> bool:
        """Let one event happen; return whether there was any."""
        full = [ends for ends, queue in self._links.items() if queue]
        if not full and not self.finished:
            return False
        if may_lose and self._random.random() < 0.1:
            self._lose(self._random.choice(self.members[1:]))
        elif may_lose and self._random.random() < 0.1:
            child = self._random.choice(self.members[1:]).sum
            self.members[child.parent].sum.repeat(child.rank)
            self._send(self.members[child.parent])
        elif self.finished and (not full or self._random.random() < 0.3):
            self.members[0].sum.finished(self.finished.popleft())
            self._send(self.members[0])
        else:
            self._deliver(self._random.choice(full))
        return True

    def _deliver(self, ends: tuple[int, int]) -> None:
        sender, receiver = ends
        item, member = self._links[ends].popleft(), self.members[receiver]
        if isinstance(item, PullPartials):
            self.told[receiver] = item.start
            stop = item.stop if item.stop < self.num_chunks else 100  # more than there are
            member.sum.receive(sender, pull(item.start, stop))
        else:
            chunk, values = item
            assert member.sum.accepts(sender, chunk), "whatever comes is what was asked for"
            assert not member.sum.accepts(sender, chunk + 1), "out of order"
            self._values[receiver, chunk] += values
            assert member.sum.landed(sender, chunk)
            assert not member.sum.landed(sender, chunk), "it is there already"
            is_room = member.sum.awaits(sender)
            assert member.sum.accepts(sender, chunk + 1) == is_room, "only what there is room for"
        self._send(member)

    def _lose(self, child: Sum) -> None:
        """Lose a link, and what is on it; a new one is there at once."""
        parent = self.members[child.sum.parent]
        ends = child.sum.rank, parent.sum.rank
        self._links[ends].clear()
        self._links[ends[::-1]].clear()
        for one, other in ((child, parent), (parent, child)):
            one.sum.link_lost(other.sum.rank)
            one.sum.repeat(other.sum.rank)
            self._send(one)

    def _send(self, member: Sum) -> None:
        rank = member.sum.rank
        for action in member.asked():
            match action:
                case Send(peer=peer, message=message):
                    assert message.stop <= min(message.start + WINDOW, self.num_chunks)
                    self._links[rank, peer].append(message)
                case SendPartial(peer=peer, chunk=chunk):
                    assert peer == member.sum.parent
                    self._links[rank, peer].append((chunk, self._whole(rank, chunk)))
                case FinishChunk(chunk=chunk, divisor=divisor):
                    assert (rank, chunk, divisor) == (0, self._num_results, len(self.members))
                    self._whole(0, chunk)
                    self._num_results += 1
                    self.finished.append(chunk)

    def _whole(self, rank: int, chunk: int) -> Counter:
        """Return the sum of a chunk: of all below and of the worker, each of them once."""
        below = {rank}
        for each, above in self.members[0].sum.parents.items():
            below |= {each} if above in below else set()
        assert self._values[rank, chunk] == Counter(below)
        return self._values[rank, chunk]


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**32), st.booleans())
def test_in_any_order_and_over_lost_links_each_chunk_sums_each_member_once(
    num_members, num_chunks, seed, may_lose
):
    sums = Sums(num_members, num_chunks, Random(seed))
    for number in range(10_000):
        if not sums.happen(may_lose and number < 200 and num_members > 1):
            break
    root = sums.members[0].sum
    assert root.num_finished == num_chunks
    for member in sums.members:
        assert not any(member.sum.awaits(child) for child in member.sum.children)
        if member.sum.parent is not None and not may_lose:
            assert sums.told[member.sum.rank] == num_chunks, "it may forget its values"


some_peers = st.frozensets(st.integers(0, 5))
tick_event = st.one_of(
    st.tuples(st.just("word"), st.sampled_from([0, 0, 1, 2, 3, 4, 5]), st.integers(0, 4)),
    st.tuples(st.just("chunk"), st.integers(0, 5), st.none()),
    st.tuples(st.just("tick"), st.just(frozenset[int]()), some_peers),
    st.tuples(st.just("tick"), some_peers, some_peers),
)
tick_events = st.lists(tick_event, min_size=20, max_size=80)


@given(tick_events, st.sampled_from([(0, None, {1, 2}), (1, 0, {3, 4})]))
def test_progress_and_accusations_are_those_of_a_model_after_every_event(events, place):
    """A word that counts up, a chunk and payload are movement; nothing else is."""
    rank, parent, children = place
    member = Sum(rank, 5, num_chunks=100)
    member.sum.advance() if parent is None else member.sum.receive(parent, pull(0, 100))
    member.asked()
    counts = dict.fromkeys(children | ({parent} - {None}), 0)
    quiet, landed = dict.fromkeys(children, 0), dict.fromkeys(children, 0)
    moved: set[int] = set()
    progress = 0
    for kind, what, more in events:
        if kind == "word":
            member.sum.receive(what, Progressed(EPOCH, more))
            if what in counts and more > counts[what]:
                counts[what] = more
                moved.add(what)
        elif kind == "chunk" and member.sum.landed(what, landed.get(what, 0)):
            landed[what] += 1
            moved.add(what)
        for child in moved & children:
            quiet[child] = 0
        if kind != "tick":
            member.asked()
            continue
        awaited, heard = children & more, more | {max(children)}
        moved |= what & counts.keys()
        expected = []
        for child in sorted(children):
            quiet[child] = 0 if child in moved else quiet[child] + (child in awaited)
            late = quiet[child] - STALLED_AFTER
            if late >= 0 and late % REPEAT_AFTER == 0:
                reason = f"worker {rank} had nothing of it for {quiet[child] / 4:g} time-outs"
                expected.append((child, child in heard, reason))
        assert member.sum.tick(what, awaited, heard) == bool(moved)
        said = [(each.peer, each.message) for each in member.asked() if isinstance(each, Send)]
        if member.blame is None:
            found = [message for peer, message in said if isinstance(message, Stalled)]
        else:
            found = [message for _, message in member.blame._said.values()]
            member.blame.begin(children)
        assert [(each.rank, each.is_heard, each.reason) for each in found] == expected
        words = [each for each in said if isinstance(each[1], Progressed)]
        below = moved - {parent}
        progress += bool(below)
        of_all = progress if parent is None else counts[parent]
        up = [(parent, Progressed(EPOCH, progress))] if below and parent is not None else []
        down = [(child, Progressed(EPOCH, of_all)) for child in sorted(children)]
        assert words == up + (down if moved else [])
        moved.clear()


def stalled(rank, is_heard=True):
    return Stalled(EPOCH, rank, is_heard, f"{rank} it is")


@pytest.mark.parametrize(
    "attempts",
    [
        # The root does not hear its child; others may.
        [([(0, 1, False)], set(), {1}), ([(3, 1, True), (2, 5, True)], {1}, {1, 2, 5})],
        # Of two, one of whom accuses the other, both are suspect. A suspect stalls no other.
        [([(2, 5, True)], set(), {2, 5}), ([(4, 5, True)], {5}, {2, 5})],
        # Who waits for another is not to blame.
        [([(0, 1, True), (1, 3, True)], set(), {1, 3})],
    ],
)
def test_accused_and_accuser_are_suspect_and_a_suspect_that_stalls_again_is_left_out(attempts):
    """Of each attempt: who accused which, and is heard; who is left out; and who is suspect."""
    blame = Blame(0)
    for said, left_out, suspects in attempts:
        for accuser, rank, is_heard in said:
            blame.said(accuser, stalled(rank, is_heard))
        verdicts = [blame.tick() for _ in range(GRACE)]
        assert verdicts[:-1] == [None] * (GRACE - 1), "those from further down are waited for"
        assert verdicts[-1] == {rank: f"{rank} it is" for rank in left_out}
        assert blame.suspects == suspects
        others = sorted({1, 2, 3, 4, 5} - suspects)
        assert blame.begin(range(1, 6)) == ([*others, *sorted(suspects)], True)
        assert {blame.tick() for _ in range(GRACE)} == {None}, "what was said counts no more"
    assert blame.begin(others) == (others, False), "none of these is suspect"


@pytest.mark.parametrize(("ticks", "suspects"), [(1, {1}), (2, {1, 3})])
def test_an_attempt_never_ends_without_a_consequence(ticks, suspects):
    """A member that names its child just before each judgement could make it restart for ever."""
    blame = Blame(0)
    blame.said(0, stalled(1))
    assert {blame.tick() for _ in range(GRACE - ticks)} == {None}
    blame.said(1, stalled(3))  # after one tick it is not ripe, and yet an excuse
    assert [blame.tick() for _ in range(ticks)] == [*[None] * (ticks - 1), {}]
    assert blame.suspects == suspects


@pytest.mark.parametrize(
    ("accuser", "rank", "counts"),
    [(1, 3, True), (3, 3, True), (2, 3, False), (1, 2, False), (9, 9, False), (3, 1, False)],
)
def test_only_a_parent_and_the_worker_itself_may_accuse(accuser, rank, counts):
    root = Sum(0, 5)
    root.sum.receive(accuser, stalled(rank))
    assert bool(root.blame._said) is counts
