"""``make chaos``: the demo with faults, as docs/faults.md gives it, and with one of nobody's wish.

.venv/bin/python -m pytest -s tests/chaos/demo.py
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gossipdp.observe.log import RunLog
from gossipdp_lab.demo.command import run
from gossipdp_lab.demo.options import DEFAULT_SAMPLES, DemoArguments
from gossipdp_lab.demo.watch import FaultInjector

pytestmark = pytest.mark.processes


@pytest.mark.timeout(300)
def test_the_demo_outlives_two_kills_and_a_stop(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    faults = ["--kill", "0@5s,3@9s", "--stop", "4@5s:8s", "--restart"]
    command = [sys.executable, "-m", "gossipdp.cli.main", "demo", "--workers", "6", *faults]
    command += ["--output", str(tmp_path / "run"), "--json", str(results)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=280)
    found = json.loads(results.read_text())
    print(f"test accuracy {found['test_accuracy']}", *found["faults"], sep="\n    ")
    assert found["test_accuracy"] >= 0.97
    for fault in found["faults"]:
        assert None not in fault["detected_s"].values()
        assert fault["rejoined_s"] is not None


def test_a_death_that_nobody_asked_for_is_an_error_though_the_worker_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poll = FaultInjector.poll
    killed: list[int] = []

    def poll_and_kill(self: FaultInjector) -> None:
        poll(self)
        process_id = self._workers[1].process_id
        if self.injections[0].happened_s is not None and process_id is not None and not killed:
            killed.append(process_id)
            os.kill(process_id, signal.SIGKILL)

    monkeypatch.setattr(FaultInjector, "poll", poll_and_kill)
    # The late stop keeps the run going until both are back, imports and all.
    monkeypatch.setitem(DEFAULT_SAMPLES, "digits", 6400)
    results = tmp_path / "results.json"
    code = run(
        DemoArguments(
            output=tmp_path / "run",
            json=results,
            workers=3,
            kill="0@1s",
            stop="2@12s:0.5s",
            restart=True,
        )
    )
    assert code == 1
    assert json.loads(results.read_text())["faults"][0]["rejoined_s"] is not None
    lives = RunLog.read(tmp_path / "run").workers[1].lives
    assert len(lives) == 2
    assert "worker 1 died of signal 9 (SIGKILL), by itself" in capsys.readouterr().out
