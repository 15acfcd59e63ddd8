"""SIGTERM where checkpoints are made: one more is taken, then the worker ends.

Launchers, Slurm and Kubernetes send SIGTERM some seconds before SIGKILL, and so does the kernel to
the workers of a ``gossipdp run`` that was killed.
"""

import os
import signal
import threading
from types import FrameType

LONGEST_WAIT_S = 1.0


class LastCheckpoint:
    """Turns the first SIGTERM into a request; the second, or the time limit, ends the process.

    A signal handler cannot save: it may run in the middle of ``optimizer.step()``. So it only
    asks; the training loop sees :attr:`is_asked` between two steps, saves, and ends. A loop that
    does not get there in ``LONGEST_WAIT_S`` gets the signal again, which then raises SystemExit,
    wherever it is. A handler that the user or a launcher installed is left alone.

    Only the main thread of a process may install it.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._again: threading.Timer | None = None
        self._is_installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        )
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise SystemExit(128 + number)
        self.is_asked = True
        self._again = threading.Timer(LONGEST_WAIT_S, os.kill, (os.getpid(), number))
        self._again.name, self._again.daemon = "gossipdp last checkpoint", True
        self._again.start()

    def end(self) -> None:
        """End the process, as the signal asked."""
        self._forget()
        raise SystemExit(128 + signal.SIGTERM)

    def close(self) -> None:
        """Let SIGTERM end the process at once again."""
        self._forget()
        if self._is_installed and threading.current_thread() is threading.main_thread():
            self._is_installed = False
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _forget(self) -> None:
        """Send the signal no second time: it would break into what unwinds the stack."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
