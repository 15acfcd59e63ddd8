"""SIGTERM where checkpoints are made: one more is taken, then the worker ends."""

import os
import signal
import threading
from types import FrameType


class Termination:
    """Turns SIGTERM into a request for one more checkpoint; a time limit ends the process.

    Launchers, Slurm and Kubernetes send SIGTERM some seconds before SIGKILL, and so does the kernel
    to the workers of a ``gossipdp run`` that was killed. A signal handler cannot save: it may run
    in the middle of ``optimizer.step()``. So it only asks; the training loop sees :attr:`is_asked`
    between two steps, saves, and ends. A loop that does not get there in ``LONGEST_WAIT_S`` gets
    the signal again, which then raises SystemExit, wherever it is. A checkpoint that has begun
    takes the time that it takes. Further signals that others send meanwhile change nothing. A
    handler that the user or a launcher installed is left alone.

    Only the main thread of a process may install it.
    """

    LONGEST_WAIT_S = 1.0

    def __init__(self) -> None:
        self.is_asked = False
        self._is_late = False
        self._again: threading.Timer | None = None
        self._is_installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        )
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_late and self._again is not None:
            raise SystemExit(128 + number)
        if not self.is_asked:
            self.is_asked = True
            self._again = threading.Timer(self.LONGEST_WAIT_S, self._send_again)
            self._again.name, self._again.daemon = "gossipdp-termination", True
            self._again.start()

    def _send_again(self) -> None:
        self._is_late = True
        os.kill(os.getpid(), signal.SIGTERM)

    def begin(self) -> None:
        """The loop got there: neither the checkpoint nor what unwinds the stack is broken into."""
        again, self._again = self._again, None
        if again is not None:
            again.cancel()

    def close(self) -> None:
        """Let SIGTERM end the process at once again."""
        self.begin()
        if self._is_installed and threading.current_thread() is threading.main_thread():
            self._is_installed = False
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
