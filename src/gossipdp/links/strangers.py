"""What strangers can cause here: bounded warnings, and text that is safe to show."""

import logging
from typing import final

MAX_WARNINGS = 1024


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
