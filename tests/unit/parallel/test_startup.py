"""Waiting at the start of a run, and learning rates that differ there."""

import math
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gossipdp.launcher.rendezvous import Habits
from gossipdp.parallel import startup
from gossipdp.parallel.startup import (
    learning_rates,
    wait_while_it_advances,
    warn_of_unlike_rates,
)


def test_each_advance_gives_it_the_whole_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_that_stands_still_is_not() -> None:
    with pytest.raises(TimeoutError):
        wait_while_it_advances(Future(), lambda: 7, timeout_s=0.001)


def test_what_ended_with_an_error_raises_it() -> None:
    ended: Future[None] = Future()
    ended.set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        wait_while_it_advances(ended, lambda: 0, timeout_s=1.0)


def test_the_rate_before_a_scheduler_warms_up_is_compared() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, math.nan)]
    first = torch.optim.SGD(groups, lr=1.0)
    torch.optim.lr_scheduler.LinearLR(first, start_factor=0.01)
    second = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.25))
    assert learning_rates([first, second]) == (0.1, 0.0, 0.25)
    assert len(learning_rates([first] * 100)) == startup.MAX_RATES


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ((0.01, 0.001), ""),
        ((0.01005, 0.001), ""),  # within what a manual schedule does in a few steps
        ((0.01,), ""),
        ((), ""),
        ((0.03, 0.001), "worker 2 begins with a learning rate of 0.03, and worker 0 with 0.01"),
        ((0.01, 0.002), "worker 2 begins with a learning rate of 0.002, and worker 0 with 0.001"),
    ],
)
def test_unlike_rates_get_one_warning(
    theirs: tuple[float, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = (0.01, 0.001)
    rates = {0: own, 3: theirs, 2: theirs, 1: own}
    warn_of_unlike_rates({rank: Habits(each) for rank, each in rates.items()})
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text
