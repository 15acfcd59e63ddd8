import multiprocessing
import os
import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

from gossipdp.runtime.crew import Ending
from gossipdp.runtime.forked_worker import ERROR, ForkedWorker


class Killed:
    """Stands in for a process that was killed while it wrote why it failed."""

    pid = 1 << 30
    exitcode = -signal.SIGKILL

    def __init__(self, kwargs: dict[str, Connection], **_: Any) -> None:
        self._writer = kwargs["writer"]

    def start(self) -> None:
        text = ERROR + pickle.dumps(("raised ValueError", "no good"))
        os.write(self._writer.fileno(), text[:-5])

    def join(self) -> None:
        pass

    close = join


class Context:
    Process = Killed


def test_a_worker_killed_while_it_tells_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: Context)
    worker = ForkedWorker(0, b"", {}, None, 1)
    assert worker.ending() == Ending(True, "died of signal 9 (SIGKILL)")
    worker.close()
