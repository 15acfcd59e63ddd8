import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from run_processes import free_port, wait_until_gone
from waiting import FOR_EVER_S, LONGEST_S, wait_until

from gossipdp.errors import WorkerFailedError
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.rendezvous import Rendezvous, Settings
from gossipdp.launcher.reports import Report, ReportChannel, send_report

pytestmark = pytest.mark.processes


def all_reduce_before_a_rendezvous() -> tuple:
    told = {name.lower(): int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE")}
    dist.init_process_group("gloo", **told)  # as by mp.spawn: the environment has no rank
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    environment = Environment.read()
    rendezvous = Rendezvous.open(environment, timeout_s=30)
    settings = Settings((), "a2cid2", "ring", "1", "float32")
    meeting = rendezvous.meet(("127.0.0.1", 1000 + environment.rank), settings)
    rendezvous.mark_ready()
    dist.barrier()  # the group goes on working after the meeting
    dist.destroy_process_group()
    return total.item(), dict(meeting.addresses), meeting.secret


def test_without_a_launcher_workers_meet_beside_the_users_own_process_group(workers):
    """At the store that worker 0 hosts."""
    by_hand = {"TORCHELASTIC_USE_AGENT_STORE": "", "MASTER_PORT": str(free_port())}
    results = workers(all_reduce_before_a_rendezvous, 3, environment=by_hand)
    assert {total for total, *_ in results} == {3.0}
    addresses = {rank: ("127.0.0.1", 1000 + rank) for rank in range(3)}
    assert all(found == addresses for _, found, _ in results)
    assert [len(secret) for secret in {secret for *_, secret in results}] == [32]


class Local:
    """Found by no import: instances travel by value, both ways."""

    def __init__(self, value: bytes) -> None:
        self.value = value


def test_arguments_and_closures_travel_and_a_large_result_comes_back(workers, monkeypatch):
    """Variables of another launcher do not travel."""
    word = "hello"
    for name, value in {"GOSSIPDP_JOIN": "127.0.0.1:9", "GOSSIPDP_RESTARTS": "1"}.items():
        monkeypatch.setenv(name, value)

    def describe(given: Local) -> tuple[str, str, str, str, bool, Local]:
        method, joins = multiprocessing.get_start_method(), Environment.read().is_joining
        large = Local(20_000_000 * given.value)
        return os.environ["RANK"], os.environ["COLOUR"], word, method, joins, large

    results = workers(describe, 2, (Local(b"x"),), environment={"COLOUR": "red"})
    # Processes of a worker's data loader start as in a script.
    method = multiprocessing.get_start_method()
    for rank, (*said, large) in zip("01", results, strict=True):
        assert said == [rank, "red", word, method, False]
        assert isinstance(large, Local)
        assert len(large.value) == 20_000_000


def fail_on_worker_1() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("no such thing")
    time.sleep(FOR_EVER_S)


def test_a_failure_before_the_start_ends_the_others_and_names_the_rank(workers):
    with pytest.raises(WorkerFailedError, match=r"^worker 1 raised KeyError:\nTraceback") as raised:
        workers(fail_on_worker_1, 3)
    assert "in fail_on_worker_1" in str(raised.value)
    assert "launcher/local" not in str(raised.value)


@pytest.mark.parametrize("status", [None, 0])
def test_sys_exit_ends_a_worker_as_it_ends_a_script(workers, status):
    assert workers(sys.exit, 2, (status,)) == [None, None]


@pytest.mark.parametrize(("status", "code"), [("no data", 1), (3, 3)])
def test_sys_exit_with_a_status_is_a_failure(workers, status, code):
    said = rf"^worker 0 ended with exit code {code}:\n{status}$"
    with pytest.raises(WorkerFailedError, match=said):
        workers(sys.exit, 1, (status,))


def test_time_runs_out(workers):
    with pytest.raises(WorkerFailedError, match="timeout_s=1 passed, but of 2 workers 0, 1 still"):
        workers(time.sleep, 2, (FOR_EVER_S,), timeout_s=1)


def count_sockets_of_the_fork_server() -> int:
    return sum("socket" in os.readlink(each) for each in Path(f"/proc/{os.getppid()}/fd").iterdir())


def test_the_fork_server_holds_no_socket_but_its_own(workers, monkeypatch):
    """Nor does the launcher hold the end of a channel that its worker has."""
    ends, take = set[int](), ReportChannel.take
    monkeypatch.setattr(ReportChannel, "take", lambda it: ends.add(it.sender.fileno()) or take(it))
    assert (workers(count_sockets_of_the_fork_server, 1), ends) == ([1], {-1})


def stay(directory: str) -> None:
    def end(number: int, frame: object) -> None:
        time.sleep(0.1)  # as a save takes time
        Path(directory, f"saved-{os.environ['RANK']}").touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    child = subprocess.Popen(["sleep", "3600"])
    path = Path(directory, os.environ["RANK"])
    path.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".part").rename(path)
    while True:
        time.sleep(0.1)


def pids_in(directory: Path) -> set[int]:
    """Return those of two workers and their children, once all are known; empty before."""
    if not all((directory / rank).exists() for rank in "01"):
        return set()
    return {int(pid) for rank in "01" for pid in (directory / rank).read_text().split()}


def test_nothing_is_left_after_ctrl_c(workers, tmp_path):
    sent: list[int] = []

    def signal_when_all_stay() -> None:
        if pids_in(tmp_path) and not sent:
            sent.append(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        workers(stay, 2, (str(tmp_path),), on_poll=signal_when_all_stay)
    wait_until_gone(pids_in(tmp_path))
    assert not multiprocessing.process._children, "nor a descriptor of theirs"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_last_checkpoint_that_could_not_be_saved_is_logged(workers, caplog):
    assert workers(lambda: send_report(Report(unsaved="no room")), 2) == [True] * 2
    assert caplog.messages == ["worker 0: no room", "worker 1: no room"]


def calling(directory: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that launches two workers, and wait until both stay."""
    script = directory / "caller.py"
    script.write_text(
        "import os, signal, subprocess, time\nfrom pathlib import Path\n"
        f"from gossipdp.launcher.local import launch\n{inspect.getsource(stay)}\n"
        f"if __name__ == '__main__':\n    launch(stay, 2, ({str(directory)!r},))\n"
    )
    words = [sys.executable, str(script)]
    caller = subprocess.Popen(words, stderr=subprocess.PIPE, **options)
    wait_until(lambda: pids_in(directory) or caller.poll() is not None, "both workers stay")
    return caller


def test_a_signal_to_the_caller_s_group_reaches_the_workers_through_the_caller_alone(tmp_path):
    """The fork server is the parent of all: if it got the signal too, it would take them along."""
    with calling(tmp_path, start_new_session=True) as caller:
        os.killpg(caller.pid, signal.SIGTERM)
        caller.wait(LONGEST_S)
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_nothing_is_left_when_the_caller_is_killed(tmp_path):
    """But the workers have the time to save."""
    with calling(tmp_path) as caller:
        pids = pids_in(tmp_path)
        fork_server = psutil.Process(min(pids)).ppid()
        caller.kill()
        wait_until_gone(pids | {fork_server})
    assert len(list(tmp_path.glob("saved-*"))) == 2
