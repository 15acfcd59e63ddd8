"""``gossipdp demo`` with faults: from the command's arguments to its JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from gossipdp.cli import demo_watch
from gossipdp.cli.demo import DEFAULT_SAMPLES, DemoArguments, run
from gossipdp.cli.demo_training import DIGEST
from gossipdp.observe.log import RunLog

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the faults decide how long the run takes."""
    monkeypatch.setitem(DEFAULT_SAMPLES, "digits", 3200)


def demo(directory: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    results = directory / "results.json"
    code = run(DemoArguments(output=directory / "run", json=results, **options))
    assert not list((directory / "run").glob("averaged_model-*"))
    return code, json.loads(results.read_text())


def test_kills_and_a_stop_are_noticed_and_those_killed_come_back(tmp_path: Path) -> None:
    # The death is known before the stop: whoever asks a stopped worker about it waits for longer.
    code, results = demo(tmp_path, workers=4, kill="0@1s", stop="2@2.5s:6s", restart=True)
    assert code == 0
    kill, stop = results["faults"]
    assert (kill["rank"], kill["kind"], stop["rank"], stop["kind"]) == (0, "kill", 2, "stop")
    assert 1.0 <= kill["at_s"] < 2.0
    assert kill["detected_s"].keys() == {"1", "2", "3"}
    assert all(0 < time_s < 1.0 for time_s in kill["detected_s"].values())
    assert stop["detected_s"].keys() >= {"1", "3"}
    assert all(3.0 < time_s < 6.0 for time_s in stop["detected_s"].values())
    assert kill["rejoined_s"] is not None
    assert stop["rejoined_s"] > 6.0
    assert results["test_accuracy"] >= 0.95
    run_log = RunLog.read(tmp_path / "run")
    assert [len(worker.lives) for worker in run_log.workers.values()] == [2, 1, 1, 1]
    ends = [worker.end for worker in run_log.workers.values()]
    assert len({worker.last_values()[DIGEST] for worker in run_log.workers.values()}) == 1
    assert {end.num_averaged for end in ends if end} == {4}


def test_killing_all_but_one_leaves_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_watch, "AFTER_S", 2.0)
    code, results = demo(tmp_path, workers=3, kill="0@0.5s,2@1s")
    assert code == 0
    assert [worker["metric_before_average"] is None for worker in results["workers"]] == [
        True,
        False,
        True,
    ]
    assert results["faults"][1]["detected_s"].keys() == {"1"}
    assert results["faults"][1]["rejoined_s"] is None
    assert results["test_accuracy"] >= 0.95


def test_a_fault_that_comes_too_late_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, results = demo(tmp_path, workers=2, kill="1@300s", samples=640)
    assert code == 1
    assert results["faults"][0]["missed"] == "the run had ended by then"
    assert "did not kill worker 1 at 300 s: the run had ended by then" in capsys.readouterr().out
