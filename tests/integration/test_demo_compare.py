"""``gossipdp demo --compare`` with real processes, from its arguments to JSON and picture."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from gossipdp_lab.demo.command import run
from gossipdp_lab.demo.compare import Verdict
from gossipdp_lab.demo.options import DemoArguments

pytestmark = pytest.mark.processes


def test_both_train_the_same_and_the_sentence_is_that_of_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    arguments = DemoArguments(
        compare=True, workers=2, samples=320, output=tmp_path / "run", json=results
    )
    assert run(arguments) == 0
    found = json.loads(results.read_text())
    assert found.keys() == {"verdict", "times_as_fast", "worse_by", "allreduce", "a2cid2"}
    runs = [found["allreduce"], found["a2cid2"]]
    for method, one in zip(("allreduce", "a2cid2"), runs, strict=True):
        assert one["slow_worker"] == {"rank": 1, "factor": 4.0, "by": "waiting"}
        assert one["configuration"]["method"] == method
        assert 0 < one["validation_bits_per_byte"] < 8
    # By gossip a worker learns the total when the news reaches it.
    assert runs[0]["samples"] == 320
    assert runs[1]["samples"] >= 320
    assert len({worker["gradient_steps"] for worker in runs[0]["workers"]}) == 1
    times = [one["train_seconds"] for one in runs]
    losses = [one["validation_bits_per_byte"] for one in runs]
    verdict = Verdict("a2cid2", (1, 4.0), 320, *times, *losses)
    assert found["verdict"] == str(verdict)
    assert found["times_as_fast"] == times[0] / times[1]
    assert " ".join(str(verdict).split()) in " ".join(capsys.readouterr().out.split())
    assert imread(tmp_path / "run" / "comparison.png").shape[1] >= 1200
    for method in ("allreduce", "a2cid2"):
        assert (tmp_path / "run" / method / "report.html").is_file()
