"""Messages go through ``logging.getLogger("gossipdp")``; nothing in the library prints.

An application that configures :mod:`logging` gets them like any other library's. Where nobody
configured anything, Python shows warnings and errors on standard error and hides the rest: so no
NullHandler is attached, which would hide the warnings too. The command line's ``--log-level`` and
the variable GOSSIPDP_LOG choose another level and attach a handler of our own.

What strangers can cause is bounded: :class:`OnceLog`, and :func:`printable` for their text.
"""

import logging
import os
import sys
from typing import Literal, final, get_args

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
MAX_WARNINGS = 1024

_handler: logging.Handler | None = None


def configure(level: str | None = None) -> None:
    """Show messages of at least ``level`` on standard error; a second call changes the level.

    Without ``level`` the variable GOSSIPDP_LOG decides; without that either, nothing changes.
    The records then no longer go to the root logger's handlers, so that no line appears twice.

    Raises:
        ValueError: the level, or GOSSIPDP_LOG, is not one of :data:`LEVELS`.

    Example:
        >>> configure("info")
        >>> logging.getLogger("gossipdp").level == logging.INFO
        True
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
    logger = logging.getLogger("gossipdp")
    if _handler is not None:
        logger.removeHandler(_handler)
    rank = os.environ.get("RANK")
    who = f"gossipdp worker {rank}" if rank else "gossipdp"
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(
        logging.Formatter(f"%(asctime)s {who} %(levelname)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(_handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def printable(text: str, most: int = 200) -> str:
    r"""``text`` from another process, safe for a terminal: no control characters, ``most`` long.

    Example:
        >>> printable("rank 3\x1b[2J")
        'rank 3?[2J'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


@final
class OnceLog:
    """Warns once of each ``(kind, who)``, so that no one can flood the log or the memory."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[tuple[str, str]] = set()

    def warn_once(self, kind: str, who: str, message: str, *values: object) -> None:
        """Log ``message % values`` unless this kind was logged of ``who`` before."""
        if (kind, who) in self._seen or len(self._seen) >= MAX_WARNINGS:
            return
        self._seen.add((kind, who))
        self._logger.warning(message, *values)
        if len(self._seen) == MAX_WARNINGS:
            self._logger.warning("further warnings of this kind are not shown")
