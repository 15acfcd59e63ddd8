import errno
import fcntl
import io
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from run_processes import wait_until_gone
from waiting import wait_until

from gossipdp.launcher.local import (
    MAX_LINE_BYTES,
    PIPE_BYTES,
    Relay,
    ScriptWorker,
    error_tail,
)
from gossipdp.launcher.supervisor import Supervisor, describe
from gossipdp.launcher.team import Team


def relay(*writes: bytes) -> tuple[Relay, io.BytesIO]:
    target = io.BytesIO()
    read, write = os.pipe()
    with open(write, "wb", buffering=0) as source:
        passed = Relay(open(read, "rb"), target, "3")  # noqa: SIM115 (closed by the test)
        for data in writes:
            source.write(data)
            assert passed.take_in()
    assert not passed.take_in()
    passed.pipe.close()
    return passed, target


def test_whole_lines_are_passed_on_with_the_rank() -> None:
    passed, target = relay(b"one\ntw", b"o\n\nlast")
    assert target.getvalue() == b"[3] one\n[3] two\n[3] \n[3] last\n"
    assert list(passed.tail) == ["one", "two", "", "last"]


def test_of_a_progress_bar_the_last_state_is_passed_on() -> None:
    _, target = relay(b"10%\r50%\r", b"100%\r\nnext\n")
    assert target.getvalue() == b"[3] 100%\n[3] next\n"


class Refilled(io.BytesIO):
    """Who is read here writes again at once, as much as was read."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._pipe = pipe

    def write(self, data: bytes) -> int:  # type: ignore[override]
        assert self.tell() < 2 * PIPE_BYTES, "would be read for ever"
        os.write(self._pipe, data[len(b"[3] ") :])
        return super().write(data)


def test_a_worker_that_prints_without_pause_is_left_for_the_others() -> None:
    read, write = os.pipe()
    with open(write, "wb", buffering=0) as source, open(read, "rb") as pipe:
        target = Refilled(write)
        passed = Relay(pipe, target, "3")
        source.write(b"again\n")
        assert passed.take_in()
        assert target.getvalue() == b"[3] again\n"
        source.write(b"x" * 9000 + b"\n")
        passed.drain()  # of a worker that has ended, while its child goes on
        assert PIPE_BYTES <= target.tell() < 2 * PIPE_BYTES


def test_all_that_an_ended_worker_wrote_is_shown() -> None:
    read, write = os.pipe()
    lines = b"line\n" * (MAX_LINE_BYTES // 2)
    with open(write, "wb", buffering=0) as source, open(read, "rb") as pipe:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4 * MAX_LINE_BYTES)
        assert source.write(lines + b"last") == len(lines) + 4
        target = io.BytesIO()
        passed = Relay(pipe, target, "3")
        passed.drain()
        assert target.getvalue() == b"[3] line\n" * (MAX_LINE_BYTES // 2) + b"[3] last\n"


def test_the_error_tail_is_the_last_traceback() -> None:
    first = ["Traceback (most recent call last):", "KeyError: 1", ""]
    second = ["Traceback (most recent call last):", "ValueError: no"]
    assert error_tail(["noise", *first, "more", *second]) == "\n".join(second)
    assert error_tail(["[rank2]: " + line for line in second]) == "\n".join(second)
    assert error_tail([str(line) for line in range(50)]).split() == [str(i) for i in range(30, 50)]


class Disk(io.BytesIO):
    """Full at times."""

    is_full = False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_a_full_disk_under_the_log_loses_lines_and_ends_nothing() -> None:
    read, write = os.pipe()
    disk = Disk()
    with open(write, "wb", buffering=0) as source, open(read, "rb") as pipe:
        passed = Relay(pipe, disk, "3")
        for line, is_full in ((b"1\n", False), (b"2\n", True), (b"3\n", True), (b"4\n", False)):
            disk.is_full = is_full
            source.write(line)
            assert passed.take_in()
    assert disk.getvalue() == b"[3] 1\n[3] 4\n"


def supervise(code: str, n: int, **options: object) -> tuple[int | None, Supervisor, str]:
    """Run ``python -c code`` as ``n`` workers: the signal that ended them, and what they said."""
    output = io.BytesIO()
    team = Team.on_one_host(n)

    def start(rank: int, own: dict[str, str]) -> ScriptWorker:
        command = [sys.executable, "-u", "-c", code]
        return ScriptWorker(command, {**os.environ, **own}, str(rank), output, io.BytesIO())

    supervisor = Supervisor(team, start, **options)
    return supervisor.run(), supervisor, output.getvalue().decode()


@pytest.mark.processes
def test_output_variables_and_success() -> None:
    code = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)"
    status, supervisor, output = supervise(code, 3)
    assert (status, supervisor.failures) == (None, [])
    assert sorted(output.splitlines()) == ["[0] 0 3", "[1] 1 3", "[2] 2 3"]


@pytest.mark.processes
def test_identical_errors_are_reported_once_and_the_rest_is_ended() -> None:
    code = (
        "import os, time\n"
        "if os.environ['RANK'] in '12': raise ValueError('no good')\n"
        "time.sleep(3600)"
    )
    _, supervisor, _ = supervise(code, 4)
    report = describe(supervisor.failures)
    assert report.startswith("workers 1, 2 ended with exit code 1:\nTraceback")
    assert report.count("ValueError: no good") == 1
    assert "worker 0" not in report


@pytest.mark.processes
def test_a_worker_killed_by_a_signal_is_reported_as_such() -> None:
    _, supervisor, _ = supervise("import os; os.kill(os.getpid(), 9)", 1)
    assert describe(supervisor.failures) == "worker 0 died of signal 9 (SIGKILL)"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_workers_and_what_they_started(number: int, tmp_path: Path) -> None:
    # The worker ignores the signal, so SIGKILL must follow, for its own child too.
    code = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '3600'])\n"
        f"name = {str(tmp_path)!r} + '/' + os.environ['RANK']\n"
        "open(name + '.part', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(name + '.part', name)\n"
        "time.sleep(3600)\n"
    )

    def interrupt() -> None:
        wait_until(
            lambda: len([path for path in tmp_path.iterdir() if not path.suffix]) == 2,
            "both workers ignore signals",
        )
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    status, supervisor, _ = supervise(code, 2)
    thread.join()
    assert status == number
    assert supervisor.failures == []
    pids = [int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()]
    assert len(pids) == 4
    wait_until_gone(pids)


@pytest.mark.processes
def test_what_a_dead_worker_left_behind_ends_with_it(tmp_path: Path) -> None:
    # Its next life looks for the child of the first.
    path = tmp_path / "child"
    code = (
        "import os, subprocess, sys, time\n"
        "from gossipdp.launcher.team import Report, send_report\n"
        "if os.environ.get('GOSSIPDP_RESTARTS') is None:\n"
        "    send_report(Report(begins=True))\n"
        f"    open({str(path)!r}, 'w').write(str(subprocess.Popen(['sleep', '3600']).pid))\n"
        "    os._exit(1)\n"
        f"print(open({str(path)!r}).read())\n"
    )
    ended_by, supervisor, output = supervise(code, 1, max_restarts=1)
    assert (ended_by, supervisor.failures) == (None, [])
    wait_until_gone([int(output.removeprefix("[0] "))])
