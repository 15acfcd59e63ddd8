"""Confirmation: whatever fails, both ends apply the same, once, and nothing waits for ever."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from gossipdp.protocol.confirmation import Confirmation, Decision


class End:
    """One end, as the exchange drives it: what it applied, and what is in each slot."""

    def __init__(self, certain: list[bool], undecodable: set[int], window: int, most: int) -> None:
        self.confirmation = Confirmation(certain, window)
        self.out: deque[tuple[str, int, bool]] = deque()
        self.applied: dict[int, str] = {}
        self.slots: list[int | None] = [None] * window
        self.num_taken = 0
        self._certain = certain
        self._undecodable = undecodable
        self._window = window
        self._most_queued = most

    def pump(self) -> bool:
        """Send one code if the window, the queue and the slot allow it."""
        index = self.confirmation.num_sent
        slot_is_queued = any(
            i % self._window == index % self._window and i != index and kind != "verdict"
            for kind, i, _ in self.out
        )
        if not self.confirmation.may_send or len(self.out) >= self._most_queued or slot_is_queued:
            return False
        self._take(index)
        assert not self.confirmation.expects_verdict(index)
        self.confirmation.sent()
        assert self.confirmation.expects_verdict(index) == (not self._certain[index])
        self.out.append(("code", index, True))
        return True

    def _take(self, index: int) -> None:
        if index < self.num_taken:
            return
        assert index == self.num_taken, "snapshots are taken in order"
        before = self.slots[index % self._window]
        assert before is None or before in self.applied, "a slot is used while its chunk is open"
        assert not any(i == before and kind != "verdict" for kind, i, _ in self.out), (
            "a slot is used while its code or repeat is still to be sent"
        )
        self.slots[index % self._window] = index
        self.num_taken += 1

    def receive(self, kind: str, index: int, decoded: bool) -> None:
        if kind == "code":
            assert self.confirmation.expects_code(index)
            assert not self.confirmation.expects_code(index + 1), "out of order"
            self._take(index)
            ours = index not in self._undecodable
            decision = self.confirmation.code(index, ours or self._certain[index])
            if not self._certain[index]:
                self.out.append(("verdict", index, ours))
            self._follow(index, decision)
        elif kind == "verdict":
            assert self.confirmation.expects_verdict(index)
            assert not self.confirmation.expects_repeat(index), "the verdict comes first"
            assert self.slots[index % self._window] == index
            self._follow(index, self.confirmation.verdict(index, decoded))
            assert not self.confirmation.expects_verdict(index), "it comes once"
        else:
            assert self.confirmation.expects_repeat(index)
            assert self.slots[index % self._window] == index
            self.confirmation.repeat(index)
            assert not self.confirmation.expects_repeat(index), "it comes once"
            self._apply(index, "repeat")

    def _follow(self, index: int, decision: Decision) -> None:
        if decision is Decision.APPLY:
            self._apply(index, "code")
        elif decision is Decision.REPEAT:
            self.out.append(("repeat", index, True))

    def _apply(self, index: int, how: str) -> None:
        assert index not in self.applied
        self.applied[index] = how


chunks = st.integers(0, 12)


@given(
    certain=st.lists(st.booleans(), max_size=12),
    undecodable=st.tuples(st.sets(chunks), st.sets(chunks)),
    window=st.integers(1, 6),
    most_queued=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=300)
def test_both_ends_apply_the_same_once_and_end(certain, undecodable, window, most_queued, data):
    ends = [End(certain, failing, window, most_queued) for failing in undecodable]
    moves = data.draw(st.lists(st.integers(0, 3), max_size=200), label="order")
    for turn in range(2000):
        if all(end.confirmation.is_finished and not end.out for end in ends):
            break
        # Drawn moves first, then all in turn: fair in the end, anything before.
        which, is_pump = divmod(moves[turn] if turn < len(moves) else turn % 4, 2)
        if is_pump:
            ends[which].pump()
        elif ends[which].out:
            ends[1 - which].receive(*ends[which].out.popleft())
    for end in ends:
        assert end.confirmation.is_finished
        for index, is_certain in enumerate(certain):
            failed = not is_certain and any(index in each for each in undecodable)
            assert end.applied[index] == ("repeat" if failed else "code")
