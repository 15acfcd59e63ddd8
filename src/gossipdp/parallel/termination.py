"""The effect of SIGTERM on a process with wrapped models that are saved."""

import gc
import logging
import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from gossipdp.parallel.checkpointer import Checkpointer

logger = logging.getLogger("gossipdp")


class Termination:
    """Turns SIGTERM into a request for one more checkpoint; a time limit ends the process.

    Launchers, Slurm and Kubernetes send SIGTERM some seconds before SIGKILL, and so does the kernel
    to the workers of a ``gossipdp run`` that was killed. A signal handler cannot save: it may run
    in the middle of ``optimizer.step()``. So it only asks; the training loop sees :attr:`is_asked`
    between two steps, saves all models of the process as they are at that moment, and ends. A loop
    that does not get there in ``LONGEST_WAIT_S`` gets the signal again, which then raises
    SystemExit, wherever it is. A checkpoint that has begun takes the time that it takes. Further
    signals that others send meanwhile change nothing. A handler that the user or a launcher
    installed is left alone.

    Only the main thread of a process may install the handler, which stays for as long as there is
    a model. A signal that no model has answered when the last one is closed ends the process then.
    In a forked child SIGTERM ends the process at once: torch ends its loaders' processes so, and
    waits for them.
    """

    LONGEST_WAIT_S = 1.0

    def __init__(self) -> None:
        self._models: list[Checkpointer] = []
        self._again: threading.Timer | None = None
        self._reset()

    def _reset(self) -> None:
        self._cancel_timer()
        self.is_asked = self._is_answered = self._is_late = False

    def add(self, model: "Checkpointer") -> None:
        """Save this model too."""
        self._models.append(model)
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    def remove(self, model: "Checkpointer") -> None:
        """Leave this model alone from now on; without any, SIGTERM ends the process at once."""
        if model not in self._models:
            return
        self._models.remove(model)
        if not self._models:
            is_owed = self.is_asked and not (self._is_answered or self._is_late)
            self._reset()
            if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if is_owed:
                os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._models:  # the last was closed in another thread, which may set no handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif self._is_late and not self._is_answered:
            raise SystemExit(128 + number)
        elif not self.is_asked:
            self.is_asked = True
            self._again = threading.Timer(self.LONGEST_WAIT_S, self._send_again)
            self._again.name, self._again.daemon = "gossipdp-termination", True
            self._again.start()

    def _send_again(self) -> None:
        self._is_late = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _cancel_timer(self) -> None:
        again, self._again = self._again, None
        if again is not None:
            again.cancel()

    def may_end_in(self, model: "Checkpointer") -> bool:
        """Return whether the loop may end where ``model`` is between two steps.

        Not in the body of a loop over the batches of another, of which the rest would be lost.
        """
        return model in self._models and (
            model.is_within_batches or not any(each.is_within_batches for each in self._models)
        )

    def save_and_end(self) -> NoReturn:
        """Save all models, side by side, and end the process.

        Neither the checkpoints nor what unwinds the stack is broken into. With shards another
        process may have been asked first; this one's own signal then comes now.
        """
        self.is_asked = self._is_answered = True
        self._cancel_timer()
        begun: list[tuple[Checkpointer, Future[Path]]] = []
        for model in self._models:
            try:
                begun.append((model, model.begin_save()))
            except Exception as error:  # nothing else ends the process any more
                logger.error("worker %d: SIGTERM; nothing saved: %s", model.rank, error)
        for model, written in begun:
            try:
                logger.warning("worker %d: SIGTERM; saved %s", model.rank, written.result())
            except Exception as error:
                logger.error("worker %d: SIGTERM; nothing saved: %s", model.rank, error)
        # A kill may follow soon. The interpreter's end looks for garbage among all of torch's
        # objects, for most of a second on a free core: they are not looked at.
        gc.freeze()
        raise SystemExit(128 + signal.SIGTERM)

    def in_child(self) -> None:
        """Forget the parent's models after a fork."""
        self._models.clear()
        self._again = None  # its thread is the parent's
        self._reset()
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


TERMINATION = Termination()
"""The one of this process."""

os.register_at_fork(after_in_child=TERMINATION.in_child)
