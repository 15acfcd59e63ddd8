from dataclasses import replace
from typing import Any

import pytest

from gossipdp_lab.demo import DemoArguments
from gossipdp_lab.demo.command import check
from gossipdp_lab.demo.compare import ALLREDUCE_RATE, SECONDS, WORKLOAD, Verdict, both, judge
from gossipdp_lab.demo.training import Training
from gossipdp_lab.report.run_log import RunLog

BETTER = Verdict("a2cid2", 40.0, 1, 12_000, 36_000, 3.0, 2.7)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"gossip_loss": 3.03}, "3.0 times as many as all-reduce (12,000), and both models are as"),
        ({"gossip_loss": 3.3}, "3.0 times as many as all-reduce (12,000), but its model is 10.0%"),
        ({"gossip_samples": 12_100}, "as many as all-reduce (12,000), and its model is 10.0% bett"),
        ({"gossip_samples": 6_000}, "0.5 times as many as all-reduce (12,000), but its model is"),
        ({"gossip_samples": 6_000, "gossip_loss": 3.3}, "0.5 times as many as all-reduce (12,000), "
         "and its model is 10.0% worse"),
        ({"num_kills": 2}, "although 2 workers were killed in its run alone, 3.0 times"),
        ({"num_kills": 0}, "trained on 36,000 samples, 3.0 times as many"),
    ],
)  # fmt: skip
def test_the_words_follow_from_the_figures(figures, words):
    assert words in str(replace(BETTER, **figures))


def test_the_two_trainings_differ_in_method_place_and_kills_alone(tmp_path):
    arguments = DemoArguments(compare=True, method="gossip", output=tmp_path, seed=3)
    allreduce, gossip = both(arguments).values()
    assert (allreduce.method, gossip.method) == ("allreduce", "gossip")
    assert not allreduce.compare
    assert allreduce.task == WORKLOAD
    assert (allreduce.seconds, allreduce.num_samples, allreduce.least_s) == (SECONDS, None, SECONDS)
    assert allreduce.seed == 3
    for own in (allreduce, gossip):
        assert own.directory == tmp_path / own.method
        check(own)
    assert gossip.faults == f"{allreduce.faults}; kill 0 at 20s"
    assert (allreduce.restart, gossip.restart) == (False, True)
    assert (allreduce.learning_rate, gossip.learning_rate) == (ALLREDUCE_RATE, None)
    other = {"method": "gossip", "output": gossip.output, "faults": gossip.faults, "restart": True}
    assert replace(allreduce, learning_rate=None, **other) == gossip


def test_only_kills_that_happened_are_counted():
    def training(loss: float, samples: int, *faults: dict[str, Any]) -> Training:
        summary = {"bits": loss, "samples": samples, "faults": faults}
        return Training("bits", RunLog(), summary, [])

    kill, slow = {"kind": "kill", "rank": 0}, {"kind": "slow", "rank": 1}
    found = {
        "allreduce": training(3.0, 12_000, slow),
        "a2cid2": training(2.7, 36_000, slow, kill, {**kill, "missed": "it was not there"}),
    }
    gossip = both(DemoArguments(compare=True))["a2cid2"]
    assert judge(gossip, found) == BETTER
