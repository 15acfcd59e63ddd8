import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from matplotlib.image import imread
from waiting import LONGEST_S

from gossipdp.launcher import faults
from gossipdp.launcher.faults import FaultInjector
from gossipdp.launcher.processes import SupervisedWorker
from gossipdp_lab.demo import DemoArguments
from gossipdp_lab.demo import training as demo_training
from gossipdp_lab.demo.command import run
from gossipdp_lab.demo.compare import Verdict
from gossipdp_lab.demo.training import DIGEST
from gossipdp_lab.report.run_log import RunLog

pytestmark = pytest.mark.processes


def train_until_all_are_back(
    arguments: DemoArguments, least_s: float, configuration: dict[str, Any]
) -> None:
    """Train as the demo does, but until the test says that those who were gone take part again."""
    # In the demo samples alone decide, and it asks no _until; under --compare time alone does.
    assert least_s == (arguments.seconds or 0.0)
    until = demo_training._until

    def until_back(is_over: Callable[[], bool], loader: Any) -> Any:
        return until(lambda: is_over() and (arguments.directory / "all-back").exists(), loader)

    demo_training._until = until_back
    demo_training.train_worker(arguments, least_s or 1e-3, configuration)


def end_once_all_are_back(monkeypatch: pytest.MonkeyPatch, run: Path, *others: int) -> None:
    deadline_s = time.monotonic() + 2 * LONGEST_S

    def witnesses(rank: int, what: str) -> set[int]:
        logs = RunLog.read(run).workers
        seen = {other: [(each.rank, each.kind) for each in logs[other].noticed] for other in logs}
        return {other for other, notices in seen.items() if (rank, what) in notices}

    class Watching(FaultInjector):
        """Lets the run end once the others have noticed the death and that the worker is back."""

        def step(self, workers: Sequence[SupervisedWorker]) -> None:
            assert time.monotonic() < deadline_s, self.records
            trains = self.first_step_s is not None and run.is_dir()
            if trains and witnesses(0, "lost") >= {*others} and witnesses(0, "restarted"):
                (run / "all-back").touch()
            super().step(workers)

    monkeypatch.setattr(faults, "FaultInjector", Watching)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(demo_training, "train_worker", train_until_all_are_back)


def test_a_kill_is_noticed_and_the_worker_comes_back(tmp_path, monkeypatch):
    end_once_all_are_back(monkeypatch, tmp_path / "run", 1, 2)
    # Samples enough for the accuracy below, however slow the machine is.
    options = {"workers": 3, "faults": "kill 0 at 1s", "samples": 12_800, "restart": True}
    paths = {"output": tmp_path / "run", "json": tmp_path / "results.json"}
    assert run(DemoArguments(**paths, **options)) == 0
    assert not list((tmp_path / "run").glob("averaged_model-*"))
    results = json.loads((tmp_path / "results.json").read_text())
    (kill,) = results["faults"]
    assert (kill["rank"], kill["kind"]) == (0, "kill")
    assert kill["at_s"] >= 1.0
    assert kill["detected_s"].keys() >= {"1", "2"}
    assert kill["rejoined_s"] > min(kill["detected_s"].values()) > 0
    assert results["test_accuracy"] >= 0.95
    run_log = RunLog.read(tmp_path / "run")
    assert [len(worker.lives) for worker in run_log.workers.values()] == [2, 1, 1]
    (process_end,) = run_log.workers[0].process_ends
    assert process_end.reason == "died of signal 9 (SIGKILL)"
    ends = [worker.end for worker in run_log.workers.values()]
    assert len({worker.last_values()[DIGEST] for worker in run_log.workers.values()}) == 1
    assert {end.num_averaged for end in ends if end} == {3}


def test_both_train_as_long_and_the_sentence_is_that_of_their_figures(
    tmp_path, monkeypatch, capsys
):
    end_once_all_are_back(monkeypatch, tmp_path / "run" / "a2cid2", 1)
    results, plan = tmp_path / "results.json", "slow 4x 1 at 0s for 0.5s; kill 0 at 0.2s"
    options = {"compare": True, "workers": 2, "seconds": 3.0, "output": tmp_path / "run"}
    assert run(DemoArguments(json=results, faults=plan, **options)) == 0
    found = json.loads(results.read_text())
    assert found.keys() == {"verdict", "times_the_samples", "worse_by", "allreduce", "a2cid2"}
    runs = [found[method] for method in ("allreduce", "a2cid2")]
    for method, one in zip(("allreduce", "a2cid2"), runs, strict=True):
        assert one["configuration"]["method"] == method
        assert one["train_seconds"] >= 3.0
        assert 0 < one["validation_bits_per_byte"] < 8
        kinds = [fault["kind"] for fault in one["faults"]]
        assert kinds.count("kill") == (method == "a2cid2")
        assert (tmp_path / "run" / method / "report.html").is_file()
    # Under all-reduce rank 0's clock ends the run for both with the same step.
    assert len({worker["gradient_steps"] for worker in runs[0]["workers"]}) == 1
    samples = [one["samples"] for one in runs]
    losses = [one["validation_bits_per_byte"] for one in runs]
    kills = sum(each["kind"] == "kill" and "missed" not in each for each in runs[1]["faults"])
    verdict = Verdict("a2cid2", 3.0, kills, *samples, *losses)
    assert found["verdict"] == str(verdict)
    assert found["times_the_samples"] == samples[1] / samples[0]
    assert " ".join(str(verdict).split()) in " ".join(capsys.readouterr().out.split())
    assert imread(tmp_path / "run" / "comparison.png").shape[1] >= 1200
