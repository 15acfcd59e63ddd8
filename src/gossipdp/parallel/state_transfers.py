"""The main thread's end of state transfers: taking another worker's state, and giving one's own.

Races, besides those of :mod:`gossipdp.runtime.transfers`:

- The donor trains on: its main thread encodes the optimizers' state at a step boundary, or while it
  waits for others, when no optimizer steps; its parameters are read chunk by chunk under their
  locks. So the two are a few steps apart, as parameters and momentum of gossip always are.
- The donor dies or stops: the next one is asked, and what came whole is kept. One that turns away
  may be poisoned, and what it gave before is dropped.
- NaN or infinity in parameters, buffers or optimizers' state: looked for at both ends.
- All donors consolidate meanwhile: each says that it gives nothing; when all have left, the joiner
  ends with an error.
- Nothing advances for ``start_timeout_s``: the joiner ends with an error.
- A worker that stood still is alive again some time before it holds another's parameters, and
  refuses until then: who averages asks it again for as long as the time-out, then does without it.
  What it had given before it refused, on a link that was replaced, counts once.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossipdp.dynamics.state import Chunk
from gossipdp.errors import PeerLostError, RendezvousError
from gossipdp.parallel import training_state
from gossipdp.parallel.options import GossipOptions
from gossipdp.runtime.gossip_loop import GossipLoop
from gossipdp.runtime.gossip_thread import GossipThread
from gossipdp.runtime.joining import donors
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.transfers import StateRefusedError, TurnedAwayError

logger = logging.getLogger("gossipdp")

PAUSE_BETWEEN_ROUNDS_S = 0.1
LOOK_AT_LIFE_EVERY_S = 0.1
# What a donor's encoded optimizers' state may take at most, next to this worker's own model. AdamW
# takes twice the parameters, Shampoo and its like more.
TRAINING_BYTES_PER_BYTE = 32
OTHER_TRAINING_BYTES = 64 << 20


class StateTransfers:
    """Takes and gives states over one gossip thread. Main thread only.

    Args:
        thread, loop: of this worker.
        shared: its parameters.
        optimizers: whose state is given.
        options: its time-outs.

    Attributes:
        num_donated: optimizers' states given.
        donated_s: time that training waited for that.
    """

    def __init__(
        self,
        thread: GossipThread,
        loop: GossipLoop,
        shared: SharedState,
        optimizers: Sequence[torch.optim.Optimizer],
        options: GossipOptions,
    ) -> None:
        self.num_donated = 0
        self.donated_s = 0.0
        self._rank = loop.protocol.rank
        self._thread = thread
        self._loop = loop
        self._shared = shared
        self._optimizers = optimizers
        self._options = options

    def live(self) -> tuple[int, ...]:
        """The workers that this one believes to live, itself included where it takes part."""
        return self._thread.call(self._loop.protocol.membership.live).result()

    def fetch(
        self,
        peer: int,
        sink: Callable[[Chunk, Tensor], None],
        timeout_s: float,
        *,
        only_while_live: bool = False,
    ) -> None:
        """Run one state transfer from ``peer`` to its end; raises what ended it.

        Args:
            peer: whom to ask.
            sink: is called with each chunk and its values, in the gossip thread.
            timeout_s: the longest time without progress.
            only_while_live: end it as soon as ``peer`` is taken for dead, which it may be by its
                silence long before ``timeout_s`` is over.
        """
        arrived: Future[None] = Future()

        def on_end(error: Exception | None) -> None:
            if error is None:
                arrived.set_result(None)
            else:
                arrived.set_exception(error)

        self._thread.call(lambda: self._loop.fetch_state(peer, sink, on_end, timeout_s)).result()
        while only_while_live and not arrived.done():
            wait([arrived], LOOK_AT_LIFE_EVERY_S)
            if peer not in self.live():
                dead = PeerLostError(f"worker {peer} is dead")
                self._thread.call(partial(self._loop.transfers.gone, peer, dead)).result()
        arrived.result()

    def fetch_all(self, sink: Callable[[Chunk, Tensor], None]) -> None:
        """Run a state transfer from every other live worker, except those that cannot give one.

        One that refuses may be about to have a state again: it is asked again, after the others,
        until it has refused for ``timeout_s``. So all that do are waited for at once. One that
        sends NaN is not: it would send all of its state each time.

        Args:
            sink: is called once with each chunk of each worker, in the gossip thread.

        Raises:
            PeerLostError: a live worker did not answer for ``start_timeout_s``.
        """
        missing = {peer: _once(sink) for peer in self.live() if peer != self._rank}
        asked_until_s: dict[int, float] = {}
        while missing:
            for peer, sink_once in list(missing.items()):
                try:
                    self.fetch(peer, sink_once, self._options.start_timeout_s, only_while_live=True)
                except PeerLostError as error:
                    is_live, now = peer in self.live(), time.monotonic()
                    if is_live and not isinstance(error, TurnedAwayError):
                        raise
                    if is_live and isinstance(error, StateRefusedError):
                        until_s = asked_until_s.setdefault(peer, now + self._options.timeout_s)
                        if now < until_s:
                            continue
                    logger.warning(
                        "worker %d averages without worker %d: %s", self._rank, peer, error
                    )
                del missing[peer]
            if missing:
                time.sleep(PAUSE_BETWEEN_ROUNDS_S)

    def take(self) -> Any:
        """Take parameters and buffers of a live worker; return its optimizers' state.

        The training state comes first, since a donor gives it at its next step boundary, and the
        parameters are then as fresh as can be. They may come from two donors, if the first died.
        """
        loop, limit_s = self._loop, self._options.start_timeout_s
        patience_s = self._options.timeout_s
        training: Any = None
        giver: int | None = None
        advanced, deadline_s = 0, time.monotonic() + limit_s
        reason = ""
        while True:
            order = donors(self.live(), self._rank)
            for donor in order:
                self._thread.check()
                try:
                    if training is None:
                        training = self.fetch_training(donor, patience_s)
                        giver = donor
                    self.fetch(donor, self._shared.replace, patience_s)
                    return training
                except PeerLostError as error:
                    self._thread.check()
                    reason = str(error)
                    logger.warning("worker %d asks another: %s", self._rank, reason)
                    is_turned_away = isinstance(error, TurnedAwayError)
                    if is_turned_away and donor == giver:
                        training = giver = None
                # Being turned away again and again in the middle is no progress.
                if loop.transfers.num_chunks_received > advanced and not is_turned_away:
                    deadline_s = time.monotonic() + limit_s
                advanced = loop.transfers.num_chunks_received
            if not order or time.monotonic() >= deadline_s:
                raise RendezvousError(
                    f"worker {self._rank} could not join: no live worker gave it a state"
                    f"{'; the last: ' if reason else ''}{reason}"
                )
            # A donor whose steps take longer than the time-out answers at its next one.
            patience_s = min(2 * patience_s, limit_s)
            time.sleep(PAUSE_BETWEEN_ROUNDS_S)

    def fetch_training(self, peer: int, timeout_s: float) -> Any:
        """Run one transfer of an optimizers' state to its end; raises what ended it.

        Raises:
            PeerLostError: none came, or one that is damaged or poisoned.
        """
        arrived: Future[bytes] = Future()
        num_bytes = sum(s.x.numel() * s.x.element_size() for s in self._shared.state.segments)
        max_bytes = OTHER_TRAINING_BYTES + TRAINING_BYTES_PER_BYTE * num_bytes

        def on_end(outcome: bytes | Exception) -> None:
            if isinstance(outcome, Exception):
                arrived.set_exception(outcome)
            else:
                arrived.set_result(outcome)

        self._thread.call(
            lambda: self._loop.transfers.fetch_training(peer, max_bytes, on_end, timeout_s)
        ).result()
        data = arrived.result()
        try:
            state = training_state.decode(data)
            training_state.refuse_poison(state)
        except ValueError as error:
            raise TurnedAwayError(f"worker {peer} cannot give its state: {error}") from error
        return state

    def donate(self) -> None:
        """Give joiners the optimizers' state; called where no optimizer steps."""
        if not self._loop.transfers.training_wanted:
            return
        started_s = time.perf_counter()
        try:
            state = training_state.capture(self._optimizers)
            data = training_state.encode(state)
            training_state.refuse_poison(state)
        except ValueError as error:
            reason = str(error)
            logger.error("worker %d cannot help another to join: %s", self._rank, reason)
            self._thread.call(lambda: self._loop.transfers.refuse_training(reason)).result()
            return
        pause_s = time.perf_counter() - started_s
        self.donated_s += pause_s
        self.num_donated += 1
        self._thread.call(lambda: self._loop.transfers.give_training(data))
        logger.info(
            "worker %d gives a joiner its optimizers' state, %d bytes; training paused for %.0f ms",
            self._rank,
            len(data),
            1e3 * pause_s,
        )


def _once(sink: Callable[[Chunk, Tensor], None]) -> Callable[[Chunk, Tensor], None]:
    """Pass each chunk on to ``sink`` the first time: a transfer that is begun anew brings all."""
    passed_on: set[int] = set()

    def sink_once(chunk: Chunk, values: Tensor) -> None:
        if chunk.index not in passed_on:
            passed_on.add(chunk.index)
            sink(chunk, values)

    return sink_once
