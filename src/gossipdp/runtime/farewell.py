"""``Farewell``: the end of a supervisor under torchrun, told to the others, and theirs awaited.

torchrun ends everybody when one of its processes fails. A supervisor whose worker failed therefore
stays until the others have ended, as torchrun's store tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gossipdp.runtime.store import reach

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.5
# Whose supervisor shows nothing for so long is not waited for: its host is gone, or it was killed.
LOST_AFTER_S = 60.0
# How long a store that does not answer holds up a supervisor for whom nobody is to be awaited.
TELL_WITHIN_S = 5.0
THREAD_NAME = "gossipdp farewell"


def alive_key(prefix: str, rank: int) -> str:
    """The number that grows while the supervisor of worker ``rank`` lives."""
    return f"{prefix}alive/{rank}"


def ended_key(prefix: str, rank: int) -> str:
    """The key that says that the supervisor of worker ``rank`` ends."""
    return f"{prefix}ended/{rank}"


class Farewell:
    """Tells that the supervisor of worker ``rank`` ends, and waits for the others.

    A thread of its own talks to the store, since no call on it ends by itself where the store's
    host is gone or stopped. It alone writes the attributes below, which the caller only reads; it
    is a daemon, and what it may still wait for dies with the process.

    Args:
        host, port: of the store.
        prefix: of the run's keys.
        rank, num_workers: of the run.
        sleep, now: for tests.
    """

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        rank: int,
        num_workers: int,
        *,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._port, self._prefix, self._rank = host, port, prefix, rank
        self._sleep, self._now = sleep, now
        self._done = threading.Event()
        self._answered_at = now()
        self._awaited = [other for other in range(num_workers) if other != rank]
        self._heard_at = dict.fromkeys(self._awaited, now())
        self._counts = dict.fromkeys(self._awaited, 0)

    def say(self, *, wait: bool) -> list[int]:
        """Tell the others; with ``wait``, return when all have ended or are lost.

        Returns:
            The ranks that were waited for in vain: nothing was heard of them for LOST_AFTER_S, or
            the store answered nobody for so long.
        """
        threading.Thread(target=self._run, args=(wait,), name=THREAD_NAME, daemon=True).start()
        limit_s = LOST_AFTER_S if wait else TELL_WITHIN_S
        while not self._done.wait(POLL_S):
            if self._now() - self._answered_at > limit_s:
                self._done.set()
        return self._awaited if wait else []

    def _run(self, wait: bool) -> None:
        store: Store | None = None
        while not self._done.is_set():
            try:
                if store is None:
                    store = reach(self._host, self._port)
                    store.set(ended_key(self._prefix, self._rank), "1")
                self._look(store)
                self._answered_at = self._now()
            except (OSError, RuntimeError):  # it may be there again before the limit
                store = None
            else:
                if not wait or all(self._is_lost(rank) for rank in self._awaited):
                    self._done.set()
                    return
            self._sleep(POLL_S)

    def _look(self, store: Store) -> None:
        """Who has ended, and who has shown life."""
        self._awaited = [
            rank for rank in self._awaited if not store.check([ended_key(self._prefix, rank)])
        ]
        for rank in self._awaited:
            count = store.add(alive_key(self._prefix, rank), 0)
            if count != self._counts[rank]:
                self._counts[rank], self._heard_at[rank] = count, self._now()

    def _is_lost(self, rank: int) -> bool:
        return self._now() - self._heard_at[rank] > LOST_AFTER_S
