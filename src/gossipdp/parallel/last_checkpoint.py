"""SIGTERM where checkpoints are made: one more is taken, then the worker ends.

Launchers, Slurm and Kubernetes send SIGTERM some seconds before SIGKILL, and so does the kernel to
the workers of a ``gossipdp run`` that was killed.
"""

import os
import signal
import threading
from types import FrameType

from gossipdp.runtime.relayed_output import HeldOutput

LONGEST_WAIT_S = 1.0


class LastCheckpoint:
    """Turns SIGTERM into a request; the time limit ends the process.

    A signal handler cannot save: it may run in the middle of ``optimizer.step()``. So it only
    asks; the training loop sees :attr:`is_asked` between two steps, saves, and ends. A loop that
    does not get there in ``LONGEST_WAIT_S`` gets the signal again, which then raises SystemExit,
    wherever it is; one that does takes for its checkpoint what it takes. One that others send
    meanwhile changes nothing: the kernel sends it once for each thread of a parent that is killed,
    and Slurm to the launcher, which passes it on, as well as to the workers. A handler that the
    user or a launcher installed is left alone. Until :meth:`close` the loop may print although
    the supervisor that would read it is dead.

    Only the main thread of a process may install it.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._is_late = False
        self._again: threading.Timer | None = None
        self._is_installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        )
        self._output: HeldOutput | None = None
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._handle)
            self._output = HeldOutput()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_late and self._again is not None:
            raise SystemExit(128 + number)
        if self.is_asked:
            return
        self.is_asked = True
        self._again = threading.Timer(LONGEST_WAIT_S, self._send_again, (number,))
        self._again.name, self._again.daemon = "gossipdp last checkpoint", True
        self._again.start()

    def _send_again(self, number: int) -> None:
        self._is_late = True
        os.kill(os.getpid(), number)

    def begin(self) -> None:
        """The loop got there: neither the checkpoint nor what unwinds the stack is broken into."""
        self._forget()

    def end(self) -> None:
        """End the process, as the signal asked."""
        raise SystemExit(128 + signal.SIGTERM)

    def close(self) -> None:
        """Let SIGTERM end the process at once again."""
        self._forget()
        if self._is_installed and threading.current_thread() is threading.main_thread():
            self._is_installed = False
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._output is not None:
            self._output.close()

    def _forget(self) -> None:
        """Send the signal no second time; one that was sent at this moment is not heeded."""
        again, self._again = self._again, None
        if again is not None:
            again.cancel()
