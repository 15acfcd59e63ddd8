"""Messages go through ``logging.getLogger("gossipdp")``; nothing in the library prints.

An application that configures :mod:`logging` gets them like those of any library. Without a
configuration Python shows warnings and errors on standard error and hides the rest. So no
NullHandler is attached, which would hide the warnings too. The command line's ``--log-level`` and
the variable GOSSIPDP_LOG choose another level and attach a handler of our own.

A warning about the whole run, marked by ``extra=OF_RUN``, comes from one worker alone: the others
would repeat it. At level info all show theirs.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Literal, final, get_args

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
MAX_WARNINGS = 1024
OF_RUN = {"is_of_run": True}

_handler: logging.Handler | None = None
_is_lead: Callable[[], bool] | None = None


def speak_for_run(is_lead: Callable[[], bool]) -> None:
    """Let warnings about the run pass while ``is_lead()``; before it, on the worker of RANK 0."""
    global _is_lead  # noqa: PLW0603 (the run of this process)
    _is_lead = is_lead


def _passes(record: logging.LogRecord) -> bool:
    if not getattr(record, "is_of_run", False) or _logger.isEnabledFor(logging.INFO):
        return True
    return os.environ.get("RANK", "0") == "0" if _is_lead is None else _is_lead()


_logger = logging.getLogger("gossipdp")
_logger.addFilter(_passes)


def configure(level: str | None = None) -> None:
    """Show messages of at least ``level`` on standard error; a second call changes the level.

    Without ``level`` the variable GOSSIPDP_LOG decides; without that either, nothing changes.
    The records then no longer go to the root logger's handlers, so that no line appears twice.

    Raises:
        ValueError: the level, or GOSSIPDP_LOG, is not one of :data:`LEVELS`.
    """
    global _handler  # noqa: PLW0603 (one handler a process)
    name = "the log level"
    if level is None:
        name = "GOSSIPDP_LOG"
        level = os.environ.get("GOSSIPDP_LOG")
        if not level:
            return
    if level.lower() not in LEVELS:
        raise ValueError(f"{name} is {level!r}; choose one of {', '.join(LEVELS)}")
    if _handler is not None:
        _logger.removeHandler(_handler)
    rank = os.environ.get("RANK")
    who = f"gossipdp worker {rank}" if rank else "gossipdp"
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(
        logging.Formatter(f"%(asctime)s {who} %(levelname)s: %(message)s", "%H:%M:%S")
    )
    _logger.addHandler(_handler)
    _logger.setLevel(level.upper())
    _logger.propagate = False


def printable(text: str, most: int = 200) -> str:
    r"""Return at most ``most`` letters of a foreign text, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


@final
class OnceLog:
    """A log that warns once of each ``(kind, who)``: strangers on the network cannot flood it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[tuple[str, str]] = set()

    def warn_once(self, kind: str, who: str, message: str, *values: object) -> None:
        """Log ``message % values`` unless this kind was logged for ``who`` before."""
        if (kind, who) in self._seen or len(self._seen) >= MAX_WARNINGS:
            return
        self._seen.add((kind, who))
        self._logger.warning(message, *values)
        if len(self._seen) == MAX_WARNINGS:
            self._logger.warning("further warnings of this kind are not shown")
