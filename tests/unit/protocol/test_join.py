"""The rank and the life of a worker that joins."""

from __future__ import annotations

import pytest

from gossipdp.protocol.join import first_incarnation
from gossipdp.protocol.membership import Member, Status

KNOWN = [
    Member(0, 2, 7, Status.DEAD),
    Member(1, 0, 8, Status.ALIVE),
    Member(5, 1, 3, Status.JOINING),
]


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, (0, 3)), (1, (1, 1)), (2, (2, 0)), (5, (5, 2)), (None, (6, 0))]
)
def test_the_next_life(rank: int | None, expected: tuple[int, int]) -> None:
    assert first_incarnation(KNOWN, rank) == expected


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="ask a live worker"):
        first_incarnation([], None)
    with pytest.raises(ValueError, match="rank -1"):
        first_incarnation(KNOWN, -1)
