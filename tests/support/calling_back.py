"""Makes races happen: a lock that lets another thread's work come just before or just after it."""

import threading
from collections.abc import Callable


class CallingLock:
    """A mutex that calls back once: before it is next taken, or once it is next free.

    What another thread may do at that moment is done there, in the test's own thread. ``before``
    may be set later too.
    """

    def __init__(
        self,
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self.before, self._after = before, after

    @property
    def has_called(self) -> bool:
        return self.before is None and self._after is None

    def acquire(self, blocking: bool = True) -> bool:
        call, self.before = self.before, None
        if call is not None:
            call()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()
        call, self._after = self._after, None
        if call is not None:
            call()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
