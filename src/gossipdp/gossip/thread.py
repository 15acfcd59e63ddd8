"""The gossip thread of a worker, through which alone other threads reach its loop."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Generic, TypeVar

import torch

from gossipdp.errors import PeerLostError, SupersededError
from gossipdp.gossip.loop import LONGEST_TURN_S, GossipLoop

logger = logging.getLogger("gossipdp")

Result = TypeVar("Result")

JOIN_TIMEOUT_S = 5.0
ENDS = (SupersededError, PeerLostError)
"""The errors that end a worker without a fault of its gossip thread."""


_blas_guard = threading.Lock()
"""BLAS's number of threads is the process's. Who limits it puts back what it found: one at a time,
or the limit of one would stay behind another's."""


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS take one core meanwhile: it would take all of them from training."""
    # Imported here, so that an import of the package does without it.
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with _blas_guard, threadpool_limits(1, user_api="blas"):
        yield


class Background(Generic[Result]):
    """A thread that works out one result after another for the gossip thread.

    The graph over hundreds of live workers and the description of a large state take longer than
    the gossip thread may be silent.

    Attributes:
        wake: called in that thread whenever a result is ready.
    """

    def __init__(self, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._within = within
        self._key: Hashable = None
        self._future: Future[Result] | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, key: Hashable, function: Callable[[], Result]) -> Result | None:
        """Return the result of ``function``, or None as long as it runs; ``key`` names it.

        A ``function`` with another key is called once the one before has ended.
        """
        if self._future is None or (self._future.done() and self._key != key):
            self.close()  # the one before has at most its wake-up left
            self._key, self._future = key, Future()
            target = partial(self._run, self._future, function)
            self._thread = threading.Thread(target=target, name="gossipdp-background", daemon=True)
            self._thread.start()
        if self._key != key or not self._future.done():
            return None
        future, self._future = self._future, None
        return future.result()

    def close(self) -> None:
        """Wait for the thread's end, but not for long: its function cannot be stopped."""
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self, future: "Future[Result]", function: Callable[[], Result]) -> None:
        try:
            with self._within():
                result = function()
            future.set_result(result)
        except Exception as error:
            future.set_exception(error)
        self.wake()


class GossipThread:
    """Runs a :class:`GossipLoop` until closed.

    From :meth:`start` on the loop and everything it owns belong to the thread. Other threads pass
    it work by :meth:`call` and steps by :meth:`step`; both are queues that only the thread empties.
    An exception in the loop ends the thread and fails every open call; :meth:`check` raises it in
    the caller's thread.
    """

    def __init__(self, loop: GossipLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._steps: deque[tuple[int, float]] = deque()
        self._num_steps = 0
        self._wake_at_step = math.inf
        self._stopping = False
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"gossipdp-{loop.protocol.rank}", daemon=True
        )

    def start(self) -> None:
        """Start the thread; its arithmetic is single-threaded, the caller's stays as it was."""
        num_threads = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        # torch.set_num_threads(1) in the thread also set the default of threads yet to come.
        torch.set_num_threads(num_threads)

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run ``function`` in the thread; the future gets its result or its exception."""
        future: Future[Result] = Future()
        # The queue holds futures of objects; this one's type is its own call's.
        self._calls.append((function, future))  # type: ignore[arg-type]
        self._loop.transport.wake()
        # The thread marks itself failed before it empties the queue for the last time: so a call
        # that is appended after that is seen here, and one appended before it is seen there.
        if self._failure is not None or not self._thread.is_alive():
            self._fail_calls()
        return future

    def step(self, samples: int) -> None:
        """Count one gradient step; wake the loop only if a tick comes due with it or soon after.

        No step is overlooked: the loop publishes ``_wake_at_step`` before it looks for steps a last
        time, and a step is queued here before that is read.
        """
        if self._num_steps == 0 and self._loop.protocol.exchange_rate is not None:
            self._loop.watch_this_thread()
        self._steps.append((samples, self._loop.clock()))
        self._num_steps += 1
        if self._num_steps >= self._wake_at_step:
            self._loop.transport.wake()

    @property
    def steps_behind(self) -> int:
        """Return the steps since a tick came due that the loop has not seen; 0: none is due."""
        due_after = min(self._wake_at_step, self._num_steps)
        return math.ceil(self._num_steps - due_after)

    def check(self) -> None:
        if isinstance(self._failure, ENDS):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError("the gossip thread has failed") from self._failure

    def close(self) -> None:
        self._stopping = True
        if self._thread.is_alive():
            self._loop.transport.wake()
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the gossip thread did not end within %g s", JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            # A thread's first get_num_threads sets the number to the process's default, and would
            # undo a set_num_threads before it.
            torch.get_num_threads()
            torch.set_num_threads(1)
        finally:
            self._ready.set()
        try:
            with self._loop.its_thread():
                self._turn_until_closed()
        except BaseException as error:
            if not isinstance(error, ENDS):
                logger.exception("the gossip thread has failed")
            self._failure = error
        finally:
            try:
                self._loop.close()
            finally:
                self._fail_calls()

    def _turn_until_closed(self) -> None:
        while not self._stopping:
            self._empty_queues()
            self._wake_at_step = self._loop.protocol.clock.timed_from_step
            self._loop.turn(0.0 if self._steps or self._calls else LONGEST_TURN_S)

    def _empty_queues(self) -> None:
        protocol = self._loop.protocol
        while self._steps:
            samples, ended_s = self._steps.popleft()
            # What it sends leaves now, however long ago the step ended: waits count from now.
            self._loop.perform(protocol.step(samples, self._loop.clock(), ended_s))
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)  # or its caller would wait for ever
                if not isinstance(error, Exception):
                    raise

    def _fail_calls(self) -> None:
        while self._calls:
            try:
                _, future = self._calls.popleft()
            except IndexError:  # the other thread was quicker
                return
            future.set_exception(self._failure or RuntimeError("this worker has left the run"))
