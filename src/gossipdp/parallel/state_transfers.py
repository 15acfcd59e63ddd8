"""The main thread's end of state transfers and live averages.

Races, besides those of :mod:`gossipdp.gossip.transfer`:

- The donor trains on: its optimizers' state is read between its steps and its parameters chunk by
  chunk, so the two are a few steps apart, as parameters and momentum of gossip always are.
- The donor dies, stops or stalls: the next one is asked for all of it.
- Rank 0 trains on at the start, while others take its state: they take that of a few steps later.
- Parameters, buffers or optimizers' state hold NaN or infinity: the taker checks them.
- All donors consolidate meanwhile: each refuses; when all have left, the joiner ends with an error.
- Nothing advances for ``start_timeout_s``: the joiner ends with an error. The whole may take any
  time.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from gossipdp.dynamics.state import State
from gossipdp.errors import PeerLostError, RendezvousError
from gossipdp.gossip.loop import GossipLoop
from gossipdp.gossip.sums import Average
from gossipdp.gossip.thread import GossipThread
from gossipdp.gossip.transfer import NoStateYetError, TurnedAwayError
from gossipdp.parallel.options import Network
from gossipdp.parallel.training_state import Arriving

logger = logging.getLogger("gossipdp")

PAUSE_BETWEEN_ROUNDS_S = 0.1
LOOK_AT_LIFE_EVERY_S = 0.1
# The most that a donor's optimizers' state may take, beside this worker's own model. AdamW takes
# twice the parameters, Shampoo and its like more.
TRAINING_BYTES_PER_BYTE = 32
OTHER_TRAINING_BYTES = 64 << 20


def fetch_state(
    thread: GossipThread, loop: GossipLoop, peer: int, arriving: Arriving | None, timeout_s: float
) -> Any:
    """Take one worker's parameters and buffers; return its optimizers' state, or None without.

    Raises:
        PeerLostError: none came, or a bad one.
    """
    unfold = None if arriving is None else arriving.unfold
    ended: Future[Exception | None] = Future()
    fetch = partial(loop.transfers.fetch, peer, unfold, ended.set_result, timeout_s)
    thread.call(fetch).result()
    if (error := ended.result()) is not None:
        raise error
    try:
        return None if arriving is None else arriving.state()
    except ValueError as error:
        raise TurnedAwayError(f"worker {peer} cannot give its state: {error}") from error


def take_state(
    thread: GossipThread, loop: GossipLoop, state: State, network: Network, *, is_start: bool
) -> Any:
    """Take the parameters and buffers of a worker that has some; return its optimizers' state.

    At the start of a run all optimizers are fresh: their state is not taken, and None is returned.
    There each worker asks its parent in a binary tree under rank 0, so that no worker gives to all,
    and the ancestors of one that does not answer. Later it asks the nearest in rank first, so that
    joiners ask different donors.
    """
    rank, transfers = loop.protocol.rank, loop.transfers
    limit_s, patience_s = network.start_timeout_s, network.timeout_s
    num_bytes = sum(segment.x.nbytes for segment in state.segments)
    most_bytes = OTHER_TRAINING_BYTES + TRAINING_BYTES_PER_BYTE * num_bytes
    ancestors = tuple(_ancestors(rank)) if is_start else ()
    advanced, deadline_s = 0, time.monotonic() + limit_s
    reason = ""
    while True:
        live = set(thread.call(loop.protocol.membership.live).result()) - {rank}
        nearest = sorted(live.difference(ancestors), key=lambda each: (abs(each - rank), each))
        for donor in [*filter(live.__contains__, ancestors), *nearest]:
            thread.check()
            try:
                arriving = None if is_start else Arriving(most_bytes)
                return fetch_state(thread, loop, donor, arriving, patience_s)
            except PeerLostError as error:
                thread.check()
                reason = str(error)
                is_turned_away = isinstance(error, TurnedAwayError)
                has_none_yet = isinstance(error, NoStateYetError)
            if is_start and has_none_yet:
                break  # it will have one soon: ask it again
            if is_start and is_turned_away:
                raise RendezvousError(f"worker {rank} cannot start: {reason}")
            logger.warning("worker %d asks another: %s", rank, reason)
            # Refusal after refusal in the middle of a transfer is no progress.
            if transfers.num_chunks_received > advanced and not is_turned_away:
                deadline_s = time.monotonic() + limit_s
            advanced = transfers.num_chunks_received
        if not live or time.monotonic() >= deadline_s:
            raise RendezvousError(
                f"worker {rank} could not join: no live worker gave it a state"
                f"{'; the last: ' if reason else ''}{reason}"
            )
        # The donor sends after its optimizer's step, which may take longer than the time-out.
        patience_s = min(2 * patience_s, limit_s)
        time.sleep(PAUSE_BETWEEN_ROUNDS_S)


def _ancestors(rank: int) -> Iterator[int]:
    while rank > 0:
        rank = (rank - 1) // 2
        yield rank


def average_over_live(thread: GossipThread, loop: GossipLoop) -> Average:
    """Average z = x + pending + c/2 over all live workers, which train on.

    See :mod:`gossipdp.protocol.averages`. A live worker that gives nothing is left out with a
    warning.
    """
    asked = thread.call(loop.sums.ask).result()
    while not asked.done():
        wait([asked], LOOK_AT_LIFE_EVERY_S)
        thread.check()
    average = asked.result()
    if average.without:
        logger.warning(
            "worker %d averages without %s",
            loop.protocol.rank,
            "; ".join(f"worker {rank} ({why})" for rank, why in average.without.items()),
        )
    return average
