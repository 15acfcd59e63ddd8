"""One mistake in a script is one traceback, though every worker dies of it.

The second worker whose standard error shows the same traceback is passed on as one line that names
the first, and so on. All else passes as it comes; only the lines of a traceback wait for its last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

START = b"Traceback (most recent call last):"
MAX_LINES = 500
MAX_REMEMBERED = 100
# torch.distributed writes "[rank2]: " before each line.
_RANK = re.compile(rb"^\[rank\d+\]: ")


@final
class TracebackFolder:
    r"""The lines of one worker's standard error, without what another worker has shown.

    Args:
        shown: which worker showed a traceback first; the same object for all workers.

    Example:
        >>> shown = {}
        >>> lines = [b"Traceback (most recent call last):", b'  File "a.py"', b"ValueError: no"]
        >>> len(TracebackFolder(shown).fold(lines, b"0"))
        3
        >>> TracebackFolder(shown).fold(lines, b"1")
        [b"the same traceback as worker 0's: ValueError: no"]
    """

    def __init__(self, shown: dict[bytes, bytes]) -> None:
        self._shown = shown
        self._held: list[bytes] = []

    def fold(self, lines: Sequence[bytes], worker: bytes) -> list[bytes]:
        """What to pass on of ``lines``, which ``worker`` has written; a traceback when it ends."""
        passed: list[bytes] = []
        for line in lines:
            text = _RANK.sub(b"", line)
            if text.startswith(START):
                passed += self.release()
                self._held = [line]
            elif not self._held:
                passed.append(line)
            else:
                self._held.append(line)
                # Between its first line and the error's own all lines are indented.
                if not text.startswith(b" "):
                    passed += self._ended(text, worker)
                elif len(self._held) > MAX_LINES:
                    passed += self.release()
        return passed

    def release(self) -> list[bytes]:
        """What is held of a traceback whose end has not come, or will not."""
        held, self._held = self._held, []
        return held

    def _ended(self, error: bytes, worker: bytes) -> list[bytes]:
        held = self.release()
        traceback = b"\n".join(_RANK.sub(b"", line) for line in held)
        first = self._shown.get(traceback)
        if first is None and len(self._shown) < MAX_REMEMBERED:
            self._shown[traceback] = worker
        if first in (None, worker):  # a worker may say the same again: that is news
            return held
        assert first is not None
        return [b"the same traceback as worker " + first + b"'s: " + error]
