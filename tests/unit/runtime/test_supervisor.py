import errno
import fcntl
import importlib
import io
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from run_processes import runs

from gossipdp.errors import RendezvousError
from gossipdp.runtime.script_worker import (
    MAX_LINE_BYTES,
    PIPE_BYTES,
    Outlet,
    Relay,
    error_tail,
)
from gossipdp.runtime.supervisor import Supervisor
from gossipdp.runtime.team import HostingTeam, Team


def relay(*writes: bytes) -> tuple[Relay, io.BytesIO]:
    target = io.BytesIO()
    read, write = os.pipe()
    with open(write, "wb", buffering=0) as source:
        outlet = Outlet(target, "standard output", io.BytesIO())
        passed = Relay(open(read, "rb"), outlet, b"[3] ")  # noqa: SIM115 (closed by the test)
        for data in writes:
            source.write(data)
            assert passed.take_in()
    assert not passed.take_in()
    passed.flush()
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
        passed = Relay(pipe, Outlet(target, "standard output", io.BytesIO()), b"[3] ")
        source.write(b"again\n")
        assert passed.take_in()
        assert target.getvalue() == b"[3] again\n"
        source.write(b"x" * 9000 + b"\n")
        passed.drain()  # of a worker that has ended, while its child goes on
        assert PIPE_BYTES <= target.tell() < 2 * PIPE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="sets the size of a pipe")
def test_all_that_an_ended_worker_wrote_is_shown() -> None:
    read, write = os.pipe()
    lines = b"line\n" * (MAX_LINE_BYTES // 2)
    with open(write, "wb", buffering=0) as source, open(read, "rb") as pipe:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4 * MAX_LINE_BYTES)
        assert source.write(lines + b"last") == len(lines) + 4
        target = io.BytesIO()
        passed = Relay(pipe, Outlet(target, "standard output", io.BytesIO()), b"")
        passed.drain()
        passed.flush()
        assert target.getvalue() == lines + b"last\n"


def test_the_error_tail_is_the_last_traceback_with_its_cause() -> None:
    first = ["Traceback (most recent call last):", "KeyError: 1", ""]
    marker = ["During handling of the above exception, another exception occurred:", ""]
    second = ["Traceback (most recent call last):", "ValueError: no"]
    assert error_tail(["noise", *first, *marker, *second]) == "\n".join(first + marker + second)
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


def test_a_full_disk_under_the_log_loses_lines_and_says_so_once() -> None:
    disk, other = Disk(), io.BytesIO()
    outlet = Outlet(disk, "standard output", other)
    for line, is_full in ((b"1\n", False), (b"2\n", True), (b"3\n", True), (b"4\n", False)):
        disk.is_full = is_full
        outlet.write(line)
    assert disk.getvalue() == b"1\n4\n"
    told = "gossipdp: standard output fails (No space left on device): lines are lost, the run goes"
    assert other.getvalue().decode() == f"{told} on\n"


def test_nobody_can_be_told_where_both_streams_fail() -> None:
    disk = Disk()
    disk.is_full = True
    Outlet(disk, "standard error", disk).write(b"1\n")


def supervise(code: str, n: int, **options: object) -> tuple[int, Supervisor, str]:
    output = io.BytesIO()
    supervisor = Supervisor(
        [sys.executable, "-c", code], n, output=output, errors=io.BytesIO(), **options
    )
    return supervisor.run(), supervisor, output.getvalue().decode()


@pytest.mark.processes
def test_output_variables_and_success() -> None:
    importlib.import_module("torch")  # else the store's thread may still do so at the end
    code = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)"
    status, supervisor, output = supervise(code, 3)
    assert status == 0
    assert sorted(output.splitlines()) == ["[0] 0 3", "[1] 1 3", "[2] 2 3"]
    assert supervisor.report() == ""
    assert not [thread for thread in threading.enumerate() if "gossipdp" in thread.name]


@pytest.mark.processes
def test_identical_errors_are_reported_once_and_the_rest_is_ended() -> None:
    code = (
        "import os, time\n"
        "if os.environ['RANK'] in '12': raise ValueError('no good')\n"
        "time.sleep(60)"
    )
    before = time.monotonic()
    status, supervisor, _ = supervise(code, 4)
    assert status == 1
    assert time.monotonic() - before < 20
    report = supervisor.report()
    assert report.startswith("workers 1, 2 ended with exit code 1:\nTraceback")
    assert report.count("ValueError: no good") == 1
    assert "worker 0" not in report


@pytest.mark.processes
def test_a_worker_killed_by_a_signal_is_reported_as_such() -> None:
    status, supervisor, _ = supervise("import os; os.kill(os.getpid(), 9)", 1)
    assert status == 1
    assert supervisor.report() == "worker 0 died of signal 9 (SIGKILL)"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_workers_and_what_they_started(number: int, tmp_path: Path) -> None:
    # The worker ignores the signal, so SIGKILL must follow, for its own child too.
    code = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"name = {str(tmp_path)!r} + '/' + os.environ['RANK']\n"
        "open(name + '.part', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(name + '.part', name)\n"
        "time.sleep(60)\n"
    )
    sent_at: list[float] = []

    def interrupt() -> None:
        while len([path for path in tmp_path.iterdir() if not path.suffix]) < 2:
            time.sleep(0.05)
        sent_at.append(time.monotonic())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    status, supervisor, _ = supervise(code, 2)
    thread.join()
    assert status == 128 + number
    assert time.monotonic() - sent_at[0] < 3
    assert supervisor.report() == ""
    pids = [int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if runs(pid)]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only there a spare waits")
def test_what_a_dead_worker_left_behind_is_no_zombie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its next life looks for the child of the first, which was killed with it.
    path, opened = tmp_path / "child", tmp_path / "opened"
    team = HostingTeam(1, "127.0.0.1", 0, None)
    monkeypatch.setattr(team, "open", opened.touch)  # comes after the start of the spare
    code = (
        "import os, subprocess, sys, time\n"
        "from gossipdp.runtime.reports import Report, send_report\n"
        "if os.environ.get('GOSSIPDP_RESTARTS') is None:\n"
        "    send_report(Report(begins=True))\n"
        f"    while not os.path.exists({str(opened)!r}): time.sleep(0.01)\n"
        f"    open({str(path)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
        "    os._exit(1)\n"
        f"child = open({str(path)!r}).read()\n"
        "deadline = time.monotonic() + 10\n"
        "while os.path.exists('/proc/' + child):\n"
        "    assert time.monotonic() < deadline\n"
        "    time.sleep(0.01)\n"
    )
    errors = io.BytesIO()
    command = [sys.executable, "-u", "-c", code]
    options = {"team": team, "output": io.BytesIO(), "errors": errors}
    status = Supervisor(command, 1, max_restarts=1, **options).run()
    assert path.exists()
    assert status == 0, errors.getvalue().decode()


class OthersToBegin(Team):
    """Of a launched run: our worker has begun, another has not, and may be awaited."""

    run_id = secret = None
    others_elsewhere = True

    def __init__(self) -> None:
        self.awaited: list[set[int]] = []
        self.told: list[str] = []

    def rank(self, local_rank: int) -> int:
        return local_rank

    def variables(self, local_rank: int) -> dict[str, str]:
        return {}

    def rejoin_variables(self, local_rank: int, rank: int | None) -> dict[str, str]:
        return {}

    def open(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        pass

    def has_begun(self, begun: set[int]) -> bool:
        if begun:
            self.awaited.append(set(begun))
        return False

    def check(self) -> None:
        return

    def tell_failed(self, reason: str) -> None:
        self.told.append(reason)

    def begin_anew(self) -> None:
        raise AssertionError

    def published_addresses(self) -> dict[int, tuple[str, int]]:
        return {}


@pytest.mark.processes
def test_a_signal_does_not_wait_until_the_others_have_begun() -> None:
    team = OthersToBegin()
    supervisor = Supervisor(["sleep", "60"], 1, team=team, output=io.BytesIO(), errors=io.BytesIO())
    supervisor._begun.add(0)
    assert supervisor.run() == 128 + signal.SIGTERM
    assert team.awaited == []
    assert team.told == ["another host's launcher was interrupted"]


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"^port {port} on 127.0.0.1 is in use; choose another"
        ):
            HostingTeam(1, "127.0.0.1", port, None)


def test_no_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match="-n is 0; start at least one worker"):
        Supervisor(["true"], 0)
