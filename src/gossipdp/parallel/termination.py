"""The effect of SIGTERM and Ctrl+C on a process with wrapped models that are saved."""

import gc
import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from gossipdp.launcher.reports import Report, send_report

logger = logging.getLogger("gossipdp")

# The handlers that are replaced; SIGINT's not where it stops a cell or a line that somebody typed.
DEFAULTS: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class Saved(Protocol):
    """A wrapped model's :class:`~.checkpointer.Checkpointer`, which explains these."""

    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> tuple[int, str]: ...
    @property
    def is_within_batches(self) -> bool: ...
    def begin_save(self) -> "Future[Path]": ...


class Termination:
    """Turns SIGTERM or SIGINT into a request for one more checkpoint; a time limit ends it.

    Launchers, Slurm and Kubernetes send SIGTERM some seconds before SIGKILL, and so does the kernel
    to the workers of a ``gossipdp run`` that was killed. A signal handler cannot save: it may run
    in the middle of ``optimizer.step()``. So it only asks; the training loop sees :attr:`is_asked`
    between two steps, saves all models of the process as they are at that moment, and ends. A loop
    that does not get there in ``LONGEST_WAIT_S`` gets the signal again, which then raises
    SystemExit, wherever it is. A checkpoint that has begun takes the time that it takes. Further
    signals that others send meanwhile change nothing; a second SIGINT interrupts at once. A handler
    that the user, a notebook or a launcher installed is left alone.

    A launcher is told that a checkpoint is being written, so that it waits, and the step. It then
    prints one line for the run; without one, each worker logs its own.

    Only the main thread of a process may install the handler, which stays for as long as there is
    a model. A signal that no model has answered when the last one is closed ends the process then.
    In a forked child SIGTERM ends the process at once: torch ends its loaders' processes so, and
    waits for them.
    """

    LONGEST_WAIT_S = 1.0

    def __init__(self) -> None:
        self._models: list[Saved] = []
        self._again: threading.Timer | None = None
        self._reset()

    def _reset(self) -> None:
        self._cancel_timer()
        self.is_asked = self._is_answered = self._is_late = False
        self._number: int = signal.SIGTERM

    def add(self, model: Saved) -> None:
        """Save this model too."""
        self._models.append(model)
        for number, default in DEFAULTS.items():
            is_ours = _is_main_thread() and signal.getsignal(number) == default
            if is_ours and not (number == signal.SIGINT and _is_interactive()):
                signal.signal(number, self._handle)

    def remove(self, model: Saved) -> None:
        """Leave this model alone from now on; without any, SIGTERM ends the process at once."""
        if model not in self._models:
            return
        self._models.remove(model)
        if not self._models:
            is_owed = self.is_asked and not (self._is_answered or self._is_late)
            number = self._number
            self._reset()
            self._restore_defaults()
            if is_owed:
                os.kill(os.getpid(), number)

    def _restore_defaults(self) -> None:
        for number, default in DEFAULTS.items():
            if _is_main_thread() and signal.getsignal(number) == self._handle:
                signal.signal(number, default)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._models:  # the last was closed in another thread, which may set no handler
            self._restore_defaults()
            os.kill(os.getpid(), number)
        elif self._is_late and not self._is_answered:
            raise SystemExit(128 + number)
        elif self.is_asked and number == signal.SIGINT and not self._is_answered:
            self._is_answered = True
            self._cancel_timer()
            raise KeyboardInterrupt
        elif not self.is_asked:
            self.is_asked, self._number = True, number
            self._again = threading.Timer(self.LONGEST_WAIT_S, self._send_again)
            self._again.name, self._again.daemon = "gossipdp-termination", True
            self._again.start()

    def _send_again(self) -> None:
        self._is_late = True
        os.kill(os.getpid(), self._number)

    def _cancel_timer(self) -> None:
        again, self._again = self._again, None
        if again is not None:
            again.cancel()

    def may_end_in(self, model: Saved) -> bool:
        """Return whether the loop may end where ``model`` is between two steps.

        It may not in the body of a loop over another model's batches: the rest of that body would
        be lost.
        """
        return model in self._models and (
            model.is_within_batches or not any(each.is_within_batches for each in self._models)
        )

    def save_and_end(self) -> NoReturn:
        """Save all models, side by side, and end the process.

        Further signals interrupt neither the checkpoints nor the unwinding of the stack. With
        shards another process may have been asked first; this one's own signal then comes now.
        """
        self.is_asked = self._is_answered = True
        self._cancel_timer()
        is_told = send_report(Report(saves=True))
        begun: list[tuple[Saved, Future[Path]]] = []
        for model in self._models:
            try:
                begun.append((model, model.begin_save()))
            except Exception as error:  # nothing else ends the process any more
                logger.error("worker %d is stopped; nothing saved: %s", model.rank, error)
        for model, written in begun:
            try:
                path = written.result()
            except Exception as error:
                logger.error("worker %d is stopped; nothing saved: %s", model.rank, error)
                continue
            level = logging.INFO if is_told else logging.WARNING
            logger.log(level, "worker %d is stopped; saved %s", model.rank, path)
            send_report(Report(saved=model.place))
        send_report(Report(saves=False))
        # A kill may follow soon. At its end the interpreter would look for garbage among all of
        # torch's objects, for most of a second on a free core: freezing them prevents that.
        gc.freeze()
        raise SystemExit(128 + self._number)

    def in_child(self) -> None:
        """Forget the parent's models after a fork."""
        self._models.clear()
        self._again = None  # its thread is the parent's
        self._reset()
        self._restore_defaults()


def _is_interactive() -> bool:
    shell = sys.modules.get("IPython")
    is_cell = shell is not None and shell.get_ipython() is not None
    return is_cell or hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


TERMINATION = Termination()
"""The one of this process."""

os.register_at_fork(after_in_child=TERMINATION.in_child)
