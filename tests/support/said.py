"""The texts that this process's gossipdp logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def said_by_gossipdp(level: int) -> Iterator[list[str]]:
    """Yield a list that gets the text of each message of at least this level."""
    texts: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gossipdp")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
