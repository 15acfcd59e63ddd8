"""The main thread's end of state transfers and live averages.

Races, besides those of :mod:`gossipdp.gossip.transfer`:

- The donor trains on: its optimizers' state is read between its steps and its parameters chunk by
  chunk, so the two are a few steps apart, as parameters and momentum of gossip always are.
- The donor dies, stops or stalls: the next one is asked, and a state that came whole is kept. A
  donor that refuses may be poisoned, so a state that it gave before is dropped.
- Parameters, buffers or optimizers' state hold NaN or infinity: the taker checks them.
- All donors consolidate meanwhile: each refuses; when all have left, the joiner ends with an error.
- Nothing advances for ``start_timeout_s``: the joiner ends with an error. The whole may take any
  time.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from gossipdp.dynamics.state import State
from gossipdp.errors import PeerLostError, RendezvousError
from gossipdp.gossip.loop import GossipLoop
from gossipdp.gossip.sums import Average
from gossipdp.gossip.thread import GossipThread
from gossipdp.gossip.transfer import OnEnd, TurnedAwayError
from gossipdp.parallel.options import Network
from gossipdp.parallel.training_state import Arriving

logger = logging.getLogger("gossipdp")

PAUSE_BETWEEN_ROUNDS_S = 0.1
LOOK_AT_LIFE_EVERY_S = 0.1
# The most that a donor's optimizers' state may take, beside this worker's own model. AdamW takes
# twice the parameters, Shampoo and its like more.
TRAINING_BYTES_PER_BYTE = 32
OTHER_TRAINING_BYTES = 64 << 20


def fetch_parameters(thread: GossipThread, loop: GossipLoop, peer: int, timeout_s: float) -> None:
    """Take one worker's parameters; raises PeerLostError."""
    _run(thread, lambda on_end: loop.transfers.fetch(peer, on_end, timeout_s))


def fetch_training(
    thread: GossipThread, loop: GossipLoop, state: State, peer: int, timeout_s: float
) -> Any:
    """Take one worker's optimizers' state; raises PeerLostError if none came, or a bad one."""
    num_bytes = sum(segment.x.nbytes for segment in state.segments)
    arriving = Arriving(OTHER_TRAINING_BYTES + TRAINING_BYTES_PER_BYTE * num_bytes)
    _run(
        thread,
        lambda on_end: loop.transfers.fetch_training(peer, arriving.unfold, on_end, timeout_s),
    )
    try:
        return arriving.state()
    except ValueError as error:
        raise TurnedAwayError(f"worker {peer} cannot give its state: {error}") from error


def _run(thread: GossipThread, fetch: Callable[[OnEnd], None]) -> None:
    ended: Future[Exception | None] = Future()
    thread.call(lambda: fetch(ended.set_result)).result()
    if (error := ended.result()) is not None:
        raise error


def take_state(thread: GossipThread, loop: GossipLoop, state: State, network: Network) -> Any:
    """Take parameters and buffers of a live worker; return its optimizers' state.

    The optimizers' state comes first, so that the parameters are as fresh as can be. The two may
    come from two donors, if the first died.
    """
    rank, transfers = loop.protocol.rank, loop.transfers
    limit_s, patience_s = network.start_timeout_s, network.timeout_s
    training: Any = None
    giver: int | None = None
    advanced, deadline_s = 0, time.monotonic() + limit_s
    reason = ""
    while True:
        # The nearest in rank first, so that joiners ask different donors.
        live = set(thread.call(loop.protocol.membership.live).result()) - {rank}
        for donor in sorted(live, key=lambda each: (abs(each - rank), each)):
            thread.check()
            try:
                if training is None:
                    training = fetch_training(thread, loop, state, donor, patience_s)
                    giver = donor
                fetch_parameters(thread, loop, donor, patience_s)
                return training
            except PeerLostError as error:
                thread.check()
                reason = str(error)
                logger.warning("worker %d asks another: %s", rank, reason)
                is_turned_away = isinstance(error, TurnedAwayError)
                if is_turned_away and donor == giver:
                    training = giver = None
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
