"""The rule for applying a chunk that travels in a code, at one end of one exchange.

A receiver decodes a code against its own values, and that may fail. So each end tells the other
whether it could decode a chunk (its *verdict*), and a chunk is applied only if both could. If
either failed, both send it again in a form that can always be read (the *repeat*), from the same
snapshots, and apply that. So both ends always apply the same difference::

    code out, code in  →  verdict out
    both verdicts yes  →  apply                      closed
    either verdict no  →  repeat out, repeat in  →  apply   closed

Some chunks travel in a form that can always be read. They have no verdict, and close when they
arrive.

A chunk may be opened while it is less than ``window`` behind the first one that is not closed.
Neither end waits for anything that the other sends only after waiting for this end, so there is no
deadlock: a code needs the window alone, a verdict the other's code, a repeat both verdicts.

A link keeps frames in order, so they arrive in time:

- a repeat comes after both verdicts are known here: the peer sends it after its own verdict, and
  when it has ours;
- code ``i + window`` comes after chunk ``i`` is closed here: the peer has closed it by then, so it
  has sent its verdict and its repeat before, and has ours. So ``window`` slots hold all chunks.

If a link is lost between the two ends' closing of a chunk, one end alone has applied it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Decision(Enum):
    """The next step of a chunk."""

    WAIT = "wait"
    APPLY = "apply"
    REPEAT = "repeat"


@dataclass(slots=True)
class _Verdicts:
    """The two verdicts on a chunk: ours on the peer's code, and the peer's; None: not known yet.

    That of the peer on a chunk which needs none is yes from the beginning.
    """

    ours: bool | None = None
    peers: bool | None = None
    is_closed: bool = False

    @property
    def decision(self) -> Decision:
        if self.is_closed or self.ours is None or self.peers is None:
            return Decision.WAIT
        return Decision.APPLY if self.ours and self.peers else Decision.REPEAT


class Confirmation:
    """The chunks of one exchange, from code to application.

    Args:
        is_certain: for each chunk, whether it needs no verdict.
        window: chunks between the first that is not closed and the last that is open.
    """

    def __init__(self, is_certain: Sequence[bool], window: int) -> None:
        self.num_sent = 0
        self.num_received = 0
        self.num_closed = 0
        self._first_open = 0
        self._window = window
        self._chunks = [_Verdicts(peers=each or None) for each in is_certain]

    @property
    def is_finished(self) -> bool:
        """Return whether every chunk was sent, and is closed."""
        return self.num_closed == self.num_sent == len(self._chunks)

    @property
    def may_send(self) -> bool:
        """Return whether the code of chunk ``num_sent`` may be sent."""
        return self.num_sent < self._end_of_window

    @property
    def _end_of_window(self) -> int:
        return min(self._first_open + self._window, len(self._chunks))

    def sent(self) -> None:
        """Count the code of chunk ``num_sent``, which was sent."""
        assert self.may_send
        self.num_sent += 1

    def expects_code(self, index: int) -> bool:
        """Return whether the peer's code of this chunk is the next one."""
        return index == self.num_received < self._end_of_window

    def expects_verdict(self, index: int) -> bool:
        """Return whether the peer's verdict on this chunk may come now."""
        return index < self.num_sent and self._chunks[index].peers is None

    def expects_repeat(self, index: int) -> bool:
        """Return whether the peer repeats this chunk."""
        return index < self.num_sent and self._chunks[index].decision is Decision.REPEAT

    def code(self, index: int, decoded: bool) -> Decision:
        """Take the peer's code, which came, and return the decision to follow.

        Unless the chunk is certain, send ``decoded`` as our verdict first.
        """
        assert self.expects_code(index)
        self.num_received += 1
        self._chunks[index].ours = decoded
        return self._decide(index)

    def verdict(self, index: int, decoded: bool) -> Decision:
        """Take the peer's verdict, which came, and return the decision to follow."""
        assert self.expects_verdict(index)
        self._chunks[index].peers = decoded
        return self._decide(index)

    def repeat(self, index: int) -> None:
        """Close a chunk whose repeat came from the peer: apply it."""
        assert self.expects_repeat(index)
        self._close(index)

    def _decide(self, index: int) -> Decision:
        decision = self._chunks[index].decision
        if decision is Decision.APPLY:
            self._close(index)
        return decision

    def _close(self, index: int) -> None:
        self._chunks[index].is_closed = True
        self.num_closed += 1
        while self._first_open < len(self._chunks) and self._chunks[self._first_open].is_closed:
            self._first_open += 1
