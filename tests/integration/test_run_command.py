"""``gossipdp run``, the real command line: what is shown, and what is left."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

# Both begin; then worker 0 fails, and worker 1 goes on.
FAILING = """
import os, sys, time
from gossipdp.launcher.reports import Report, send_report

send_report(Report(begins=True))
if os.environ["RANK"] == "1":
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    raise ValueError("no good")
time.sleep(1)
print("went on")
"""


def test_after_the_start_a_failure_ends_no_other_and_is_shown_at_the_end(
    tmp_path: Path, without_torch: dict[str, str]
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    words = ["-m", "gossipdp.cli.main", "run", "-n", "2", str(script), str(tmp_path / "begun")]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=without_torch, check=False
    )
    assert done.stderr.startswith("gossipdp: starting 2 workers; importing torch takes")
    assert done.returncode == 1
    assert done.stdout == "went on\n"
    assert "gossipdp: worker 0 ended with exit code 1; the others go on" in done.stderr
    traceback, _, last = done.stderr.rpartition("gossipdp: ")
    assert traceback.count("ValueError: no good") == 1
    assert last == "at the end: worker 0 ended with exit code 1\n"


def test_a_full_disk_under_its_own_lines_ends_no_run(
    tmp_path: Path, without_torch: dict[str, str]
) -> None:
    script, lines = tmp_path / "train.py", tmp_path / "lines"
    lines.mkdir()
    script.write_text(
        "import os, sys\nopen(sys.argv[1] + '/' + os.environ['RANK'], 'w').write('to the end')\n"
    )
    words = ["-m", "gossipdp.cli.main", "run", "-n", "2", str(script), str(lines)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, *words], stdout=full, stderr=full, env=without_torch, check=False
        )
    assert done.returncode == 0
    assert [path.read_text() for path in lines.iterdir()] == ["to the end"] * 2
