"""``gossipdp demo --compare``: words that follow from figures, trainings that differ in method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossipdp_lab.demo.compare import AS_GOOD, WORKLOAD, Verdict, both
from gossipdp_lab.demo.options import DEFAULT_SAMPLES, DemoArguments

FASTER = Verdict("a2cid2", (2, 4.0), 48_000, 40.0, 16.0, 2.6, 2.61)


def test_the_verdict_in_one_sentence() -> None:
    assert str(FASTER) == (
        "While worker 2 was 4 times slower, a2cid2 took 16.0 s and all-reduce 40.0 s for the same "
        "48,000 samples, so a2cid2 was 2.5 times as fast, and both models are as good: 2.610 and "
        "2.600 bits per byte (lower is better)."
    )


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"gossip_loss": 2.73}, "2.5 times as fast, but its model is 5.0% worse: 2.730 and 2.600"),
        ({"gossip_loss": 2.47}, "2.5 times as fast, and its model is 5.0% better: 2.470"),
        ({"allreduce_s": 16.4}, "a2cid2 was not faster, but both models are as good"),
        ({"allreduce_s": 16.4, "gossip_loss": 2.47}, "not faster, but its model is 5.0% better"),
        ({"allreduce_s": 8.0, "gossip_loss": 2.73}, "slower, and its model is 5.0% worse"),
        ({"slow_worker": (0, 2.5)}, "While worker 0 was 2.5 times slower, a2cid2 took"),
    ],
)
def test_the_words_follow_from_the_figures(figures: dict[str, Any], words: str) -> None:
    assert words in str(replace(FASTER, **figures))


@pytest.mark.parametrize("share", [-1, 1])
def test_the_limit_of_a_model_that_is_as_good(share: int) -> None:
    at = replace(FASTER, gossip_loss=FASTER.allreduce_loss * (1 + share * 0.999 * AS_GOOD))
    beyond = replace(FASTER, gossip_loss=FASTER.allreduce_loss * (1 + share * 1.001 * AS_GOOD))
    assert "as good" in str(at)
    assert "as good" not in str(beyond)


def test_the_two_trainings_differ_in_method_and_place_alone(tmp_path: Path) -> None:
    arguments = DemoArguments(compare=True, method="gossip", output=tmp_path, seed=3)
    allreduce, gossip = both(arguments).values()
    assert (allreduce.method, gossip.method) == ("allreduce", "gossip")
    assert not allreduce.compare
    assert allreduce.num_samples == DEFAULT_SAMPLES[WORKLOAD]
    assert (allreduce.slow_worker, allreduce.seed) == ((2, 4.0), 3)
    for own in (allreduce, gossip):
        assert own.directory == tmp_path / own.method
    assert replace(allreduce, method="gossip", output=gossip.output) == gossip


def test_the_slow_worker_exists_and_may_be_chosen() -> None:
    two = DemoArguments(compare=True, workers=2)
    assert {own.slow_worker for own in both(two).values()} == {(1, 4.0)}
    chosen = replace(two, faults="slow 2x 0")
    assert {own.slow_worker for own in both(chosen).values()} == {(0, 2.0)}
