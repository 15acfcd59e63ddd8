import os
import sys
from pathlib import Path

import pytest
from run_processes import wait_until_gone

from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.local import ScriptWorker
from gossipdp.launcher.supervisor import Supervisor, describe


def supervise(code: str, n: int, **options: object) -> tuple[int | None, Supervisor]:
    """Run ``python -c code`` as ``n`` workers, and return the signal that ended them."""
    plan = LaunchPlan.on_one_host(n)

    def start(own: dict[str, str]) -> ScriptWorker:
        return ScriptWorker([sys.executable, "-c", code], {**os.environ, **own})

    supervisor = Supervisor(plan, start, **options)
    return supervisor.run(), supervisor


@pytest.mark.processes
def test_failures_are_named_once_and_the_rest_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, time\n"
        "if os.environ['RANK'] in '12': raise ValueError('no good')\n"
        "if os.environ['RANK'] == '3': os.kill(os.getpid(), 9)\n"
        "time.sleep(3600)"
    )
    _, supervisor = supervise(code, 4)
    assert sorted(describe(supervisor.failures).split("\n\n")) == [
        "worker 3 died of signal 9 (SIGKILL)",
        "workers 1, 2 ended with exit code 1",
    ]
    assert capfd.readouterr().err.count("ValueError: no good") == 2


@pytest.mark.processes
def test_what_a_dead_worker_left_behind_ends_with_it(tmp_path: Path) -> None:
    # Worker 1 dies; its next life, and worker 0, end when the child of the first is noted.
    path, end = tmp_path / "child", tmp_path / "end"
    code = (
        "import os, subprocess, time\n"
        "from gossipdp.launcher.reports import Report, send_report\n"
        "if os.environ.get('GOSSIPDP_RESTARTS'):\n"
        f"    open({str(end)!r}, 'w').close()\n"
        "send_report(Report(begins=True, addresses={0: ('127.0.0.1', 9)}))\n"
        "if os.environ['RANK'] == '1' and not os.environ.get('GOSSIPDP_RESTARTS'):\n"
        f"    open({str(path)!r}, 'w').write(str(subprocess.Popen(['sleep', '3600']).pid))\n"
        "    os._exit(1)\n"
        f"while not os.path.exists({str(end)!r}):\n"
        "    time.sleep(0.01)\n"
    )
    ended_by, supervisor = supervise(code, 2, max_restarts=1)
    assert (ended_by, supervisor.failures) == (None, [])
    wait_until_gone([int(path.read_text())])
