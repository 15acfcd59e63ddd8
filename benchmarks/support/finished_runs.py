"""A file of finished runs: a second call goes on where the first was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

Finished = TypeVar("Finished")


class FinishedRuns(Generic[Finished]):
    """The finished runs by key, in memory and in a file of JSON lines.

    Args:
        path: the file; None keeps the runs in memory alone.
        kind: the type of a run.
        key: returns what tells a run from others.
    """

    def __init__(
        self, path: Path | None, kind: type[Finished], key: Callable[[Finished], Hashable]
    ) -> None:
        self._path, self._key = path, key
        self.known: dict[Hashable, Finished] = {}
        if path is None or not path.exists():
            return
        for number, text in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                run = msgspec.convert(json.loads(text), kind)
                self.known[key(run)] = run
            except (ValueError, KeyError, msgspec.MsgspecError) as error:
                raise ValueError(
                    f"{path}, line {number} is no finished run ({error!r}): delete that line"
                ) from error

    def keep(self, run: Finished) -> None:
        """Keep a run that has just finished."""
        self.known[self._key(run)] = run
        if self._path is None:
            return
        # Python's own JSON: a run that diverged has values that are no numbers.
        line = json.dumps(msgspec.to_builtins(run)) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:  # one write: an interrupted call leaves whole lines
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
