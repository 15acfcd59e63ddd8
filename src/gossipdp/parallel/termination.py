"""The effect of SIGTERM and Ctrl+C on a process with wrapped models that are saved."""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from gossipdp.launcher.reports import Report, say_instead_of_traceback, send_report
from gossipdp.links.clock import since_boot_s
from gossipdp.rules import grace_s

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

    is_at_end: bool

    def begin_save(self) -> "Future[Path]": ...
    def finish_save(self, written: "Future[Path]") -> Path: ...


class Interrupted(SystemExit, KeyboardInterrupt):
    """The end of the training loop after Ctrl+C; if nothing catches it, the process just ends."""


class Termination:
    """Turns SIGTERM or SIGINT into a request for one more checkpoint.

    Launchers, Slurm and Kubernetes send SIGTERM some seconds before SIGKILL, and so does the kernel
    to the workers of a ``gossipdp run`` that was killed. A signal handler cannot save: it may run
    in the middle of ``optimizer.step()``. So it only asks; the training loop sees :attr:`asked_s`
    between two steps, saves all models of the process as they are at that moment, and ends; after
    SIGINT the script may catch KeyboardInterrupt and go on. A loop that does not get there in
    GOSSIPDP_GRACE_S gets the signal again, which then ends it wherever it is; if all models have
    come to the end of the run, the first signal does. Further signals change nothing, but a second
    SIGINT before the save. Handlers that the user, a notebook or a launcher installed stay.

    A launcher hears that this process will save, that it still does, the step, and a failure; it
    prints one line for the run. Without one each worker logs its own.

    Only the main thread of a process may install the handler, which stays for as long as there is
    a model. A signal that no model has answered when the last one is closed ends the process then.
    In a forked child SIGTERM ends the process at once: torch ends its loaders' processes so, and
    waits for them. Where every process of a job is signalled, as by Slurm's scancel, they end
    before the step does, for which torch would raise an error within it.
    """

    def __init__(self) -> None:
        self._models: list[Saved] = []
        self.failures: list[str] = []
        self._again: threading.Timer | None = None
        self._on_child_end: Callable[[int, FrameType | None], Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._cancel_timer()
        if _is_main_thread() and signal.getsignal(signal.SIGCHLD) == self._child_ended:
            signal.signal(signal.SIGCHLD, self._on_child_end)
        self._is_answered = self._is_late = self._is_interrupted = False
        self.asked_s = math.inf
        self._number: int = signal.SIGTERM

    @property
    def was_asked(self) -> bool:
        """Return whether this process was asked to end, also if its script has caught it."""
        return self.asked_s < math.inf or self._is_interrupted

    def add(self, model: Saved) -> None:
        """Save this model too; raise ValueError if another one is saved in its directory."""
        _, directory = model.place
        places = {os.path.abspath(each.place[1]) for each in self._models}
        if os.path.abspath(directory) in places:
            raise ValueError(
                f"another model of this process is saved in {directory!r}: close() that one first, "
                "or give each a directory of its own"
            )
        self._models.append(model)
        for number, default in DEFAULTS.items():
            is_ours = _is_main_thread() and signal.getsignal(number) == default
            if is_ours and not (number == signal.SIGINT and _is_interactive()):
                signal.signal(number, self._handle)
                send_report(Report(saves=True))

    def remove(self, model: Saved) -> None:
        """Leave this model alone from now on; without any, SIGTERM ends the process at once."""
        if model not in self._models:
            return
        self._models.remove(model)
        if not self._models:
            is_owed = self.asked_s < math.inf and not (self._is_answered or self._is_late)
            number = self._number
            self._reset()
            self._restore_defaults()
            send_report(Report(saves=False))
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
            self._is_answered = True
            for model in self._models:
                self.fail(model, f"the step in hand did not end in {grace_s():g} s")
            raise self._end()
        elif self.asked_s < math.inf and number == signal.SIGINT and not self._is_answered:
            self._is_answered = True
            self._cancel_timer()
            raise KeyboardInterrupt
        elif self.asked_s == math.inf:
            self.asked_s, self._number = since_boot_s(), number
            self.still_saves()
            if all(model.is_at_end for model in self._models):
                self._is_answered = True
                raise self._end()
            on_child_end = signal.getsignal(signal.SIGCHLD)
            if callable(on_child_end) and on_child_end != self._child_ended:
                self._on_child_end = on_child_end
                signal.signal(signal.SIGCHLD, self._child_ended)
            self._again = threading.Timer(grace_s(), self._send_again)
            self._again.name, self._again.daemon = "gossipdp-termination", True
            self._again.start()

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        """Pass it on, but raise no error of torch's within the step in hand."""
        if self._on_child_end is not None:
            with contextlib.suppress(RuntimeError):
                self._on_child_end(number, frame)

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
        self.asked_s, self._is_answered = min(self.asked_s, since_boot_s()), True
        self._cancel_timer()
        self.still_saves()
        begun: list[tuple[Saved, Future[Path]]] = []
        for model in self._models:
            try:
                begun.append((model, model.begin_save()))
            except Exception as error:  # nothing else ends the process any more
                self.fail(model, error)
        for model, written in begun:
            try:
                path = model.finish_save(written)
            except Exception as error:
                self.fail(model, error)
                continue
            if not send_report(Report(saved=model.place)):
                logger.warning("worker %d is stopped; saved %s", model.rank, path)
        raise self._end()

    def _end(self) -> SystemExit:
        code = 1 if self.failures else 128 + self._number
        if self._number != signal.SIGINT:
            return SystemExit(code)
        self._reset()  # the script may catch it and go on
        self._is_interrupted = True
        say_instead_of_traceback()
        return Interrupted(code)

    def still_saves(self) -> None:
        """Tell the launcher that this process, if it was asked to end, still saves or trains."""
        if self.was_asked:
            send_report(Report(saves=True))

    def fail(self, model: Saved, reason: object) -> None:
        """Have the run's last line and status say that a model's last checkpoint failed."""
        text = f"the last checkpoint could NOT be saved in {model.place[1]}: {reason}"
        self.failures.append(text)
        if not send_report(Report(unsaved=text)):
            logger.error("worker %d: %s", model.rank, text)

    def in_child(self) -> None:
        """Forget the parent's models after a fork."""
        self._models.clear()
        self.failures.clear()
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
