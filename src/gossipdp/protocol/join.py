"""How a worker comes into a run that is under way.

1. It asks any live worker (``AskMembers``) and is told everything there is to know (``Members``):
   the others, the progress, how many workers the run began with. The run's settings are compared
   by the handshake.
2. It takes the next life of its rank (:func:`first_incarnation`) and builds its protocol as
   *joining*: known to all, but neither in the graph nor waited for at the end.
3. It takes parameters from a live worker and says :meth:`WorkerProtocol.joined`: only then is it
   alive, and every graph is rebuilt with it.

Guarantees: nobody exchanges with, or waits for, a worker without parameters; one that dies while
joining is not missed.

Races:

- Two joiners without a rank take the same one: the higher process id keeps it, the other is told
  by ``Superseded`` and starts anew with another rank. Two of the same given rank: the other ends.
- The run ends meanwhile. A worker that has begun to consolidate says ``is_ending``, and gives no
  parameters, not even the rest of what is under way: the joiner is refused, and ends. One that had
  its parameters before is alive: it is waited for if no result is computed yet, and else takes that
  result, if it is done before all have left; if not, it trains on and consolidates by itself, as
  one cut off until then.
"""

from __future__ import annotations

from collections.abc import Iterable

from gossipdp.protocol.membership import Member


def first_incarnation(members: Iterable[Member], rank: int | None) -> tuple[int, int]:
    """Rank and incarnation of a worker that is about to join.

    Args:
        members: what a live worker knows.
        rank: the rank to take, or None for the one after the highest known.

    Returns:
        The rank, and the incarnation after the highest known one of it; 0 for a new rank.

    Raises:
        ValueError: nothing is known of anybody, or ``rank`` is negative.

    Example:
        >>> first_incarnation([Member(0, 2, 7), Member(1, 0, 8)], None)
        (2, 0)
        >>> first_incarnation([Member(0, 2, 7), Member(1, 0, 8)], 0)
        (0, 3)
    """
    known = {member.rank: member.incarnation for member in members}
    if not known:
        raise ValueError("no member of the run is known: ask a live worker of it")
    if rank is None:
        rank = max(known) + 1
    if rank < 0:
        raise ValueError(f"rank {rank} is negative: give a rank of at least 0, or none")
    return rank, known.get(rank, -1) + 1
