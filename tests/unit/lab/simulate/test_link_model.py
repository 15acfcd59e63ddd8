"""What links are like: times of messages and of exchanges."""

from __future__ import annotations

import math
from statistics import fmean, pstdev
from typing import Any

import pytest

from gossipdp_lab.simulate.scenario import Link, LinkModel


def test_an_exchange_takes_its_bytes() -> None:
    transfer_s = LinkModel(Link(0.01, bytes_per_s=1e6)).begin(0, model_bytes=5e5)
    assert transfer_s(0, 1) == 0.5
    assert LinkModel().begin(0, model_bytes=1e12)(0, 1) == 0.0


def test_some_links_are_different_both_ways() -> None:
    links = LinkModel(Link(0.01, 1e6), {(2, 1): Link(0.2, 1e3)})
    transfer_s = links.begin(0, model_bytes=1e3)
    for sender, receiver in ((1, 2), (2, 1)):
        assert links.latency_s(sender, receiver) == 0.2
        assert transfer_s(sender, receiver) == 1.0
    assert links.latency_s(0, 1) == 0.01
    assert transfer_s(0, 1) == 1e-3


def test_jitter_spreads_the_times_about_the_same_mean() -> None:
    transfer_s = LinkModel(Link(0.0, 1e6), jitter=0.5).begin(0, model_bytes=1e6)
    times_s = [transfer_s(0, 1) for _ in range(20_000)]
    assert fmean(times_s) == pytest.approx(1.0, rel=0.02)
    assert pstdev(math.log(time_s) for time_s in times_s) == pytest.approx(0.5, rel=0.02)


def test_measured_durations_are_of_the_whole_exchange() -> None:
    links = LinkModel(Link(0.1), durations_s=[0.05, 0.3, 0.6])
    transfer_s = links.begin(0, model_bytes=1.0)
    drawn_s = {round(transfer_s(0, 1), 9) for _ in range(100)}
    assert drawn_s == {0.0, 0.2, 0.5}


def test_a_run_draws_by_its_seed() -> None:
    links = LinkModel(Link(0.0, 1.0), jitter=1.0)
    first, again, other = (
        [draw(0, 1) for _ in range(5)]
        for draw in (links.begin(1, 1.0), links.begin(1, 1.0), links.begin(2, 1.0))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jitter": -1.0}, "jitter is -1.0"),
        ({"jitter": math.nan}, "jitter is nan"),
        ({"durations_s": [0.1, -0.1]}, "-0.1 is no duration"),
        ({"overrides": {(0, 1): Link(), (1, 0): Link()}}, "given twice"),
        ({"overrides": {(1, 1): Link()}}, "joins a rank with itself"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinkModel(**settings)


@pytest.mark.parametrize("latency_s", [-1.0, math.inf, math.nan])
def test_bad_latencies_are_refused(latency_s: float) -> None:
    with pytest.raises(ValueError, match="latency_s is"):
        Link(latency_s)


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, math.nan])
def test_bad_speeds_are_refused(bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s is"):
        Link(bytes_per_s=bytes_per_s)
