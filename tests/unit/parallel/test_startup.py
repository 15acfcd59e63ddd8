"""Waiting at the start of a run."""

from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace

import pytest

from gossipdp.parallel import startup
from gossipdp.parallel.startup import wait_while_it_advances


def test_each_advance_gives_it_the_whole_time_again(monkeypatch):
    """On the test's clock a look takes 1 s, the limit is 5 s, and something comes every fourth."""
    now_s = count()
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=lambda: float(next(now_s))))
    monkeypatch.setattr(startup, "LOOK_AT_PROGRESS_EVERY_S", 0.0)
    ended: Future[None] = Future()
    looks = count()

    def advance() -> int:
        number = next(looks)
        if number == 40:
            ended.set_result(None)
        return number // 4

    wait_while_it_advances(ended, advance, timeout_s=5.0)
    assert ended.done()


def test_one_that_stands_still_is_not():
    with pytest.raises(TimeoutError):
        wait_while_it_advances(Future(), lambda: 7, timeout_s=0.001)


def test_what_ended_with_an_error_raises_it():
    ended: Future[None] = Future()
    ended.set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        wait_while_it_advances(ended, lambda: 0, timeout_s=1.0)
