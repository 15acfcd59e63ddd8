import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from gossipdp.cli.main import main
from gossipdp.cli.run import RunArguments, _common_variables, _join_line, _plan, run, stopped_line
from gossipdp.launcher import launch_plan, local
from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.processes import Ending
from gossipdp.launcher.supervisor import Failure, Supervisor

TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(1)")
    return str(path)


def test_the_line_on_joining_names_all_that_a_joiner_needs():
    arguments = RunArguments(
        workers=2, secret_file=Path("secret"), tls=Path("tls"), log_dir=Path("runs/mine")
    )
    assert _join_line(arguments, [("10.0.0.1", 4)]) == (
        "to add a worker: gossipdp run --join 10.0.0.1:4 --secret-file secret --tls tls "
        "--log-dir runs/mine SCRIPT"
    )
    assert _join_line(RunArguments(workers=4), [("10.0.0.1", 4), ("::1", 5)]) == (
        "to add a replica: gossipdp run --join 10.0.0.1:4,[::1]:5 --nproc-per-replica 2 SCRIPT"
    )


@pytest.mark.parametrize(
    ("steps", "num_workers", "has_ended", "line"),
    [
        ([], 2, True, "stopped after the end of the run; nothing more was saved"),
        ([7, 7], 2, False, "stopped at step 7; start"),
        ([9, 7], 2, True, "stopped at steps 7 to 9; start"),
        ([7], 2, False, "stopped at step 7, which 1 of 2 workers saved; start"),
    ],
)
def test_the_line_on_a_stop_says_who_saved_which_steps(steps, num_workers, has_ended, line):
    saved = dict(enumerate(zip(steps, "ba", strict=False)))
    places = "a, b" if len(steps) > 1 else "b"
    whole = f'{line} it again with resume="auto" to go on from {places}' if steps else line
    assert stopped_line(saved, num_workers, has_ended=has_ended) == whole


def test_a_host_of_several_meets_the_others_at_the_rendezvous():
    place = {"rendezvous": "10.0.0.1:5", "host": "10.0.0.2", "nnodes": 3, "node_rank": 1}
    plan = _plan(RunArguments(workers=2, **place), 2, None, 16 * "s")
    assert plan == LaunchPlan.on_hosts(2, ("10.0.0.1", 5), 16 * "s", num_hosts=3, host_rank=1)


@pytest.mark.parametrize("option", ["--nnodes", "--node-rank"])
def test_the_launcher_s_own_choices_are_refused(script, option, capsys, monkeypatch):
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    assert main(["run", option, "2", script]) == 2
    assert "need -n" in capsys.readouterr().err


def test_the_cores_are_shared_with_the_launchers_other_workers(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in (TOLD | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "100000"}).items():
        monkeypatch.setenv(name, value)
    assert _common_variables(RunArguments(), 1) == {"OMP_NUM_THREADS": "1"}
    assert _common_variables(RunArguments(join="b:1"), 1) == {}  # it hears who is there
    given = RunArguments(workers=2, tls=Path("tls"), log_dir=Path("log"), status_port=0)
    found = _common_variables(given, 2)
    paths = found["GOSSIPDP_TLS"], found["GOSSIPDP_LOG_DIR"]
    assert paths == (str(Path.cwd() / "tls"), str(Path.cwd() / "log"))
    assert found["GOSSIPDP_STATUS_PORT"] == "0"


@pytest.mark.parametrize("options", [{}, {"join": "b:1"}, {"rendezvous": "b:1"}, {"workers": None}])
def test_workers_that_others_reach_are_told_the_address_that_was_given(options):
    arguments = RunArguments(**({"workers": 2, "host": "a"} | options))
    assert (_common_variables(arguments, 2).get("GOSSIPDP_HOST") == "a") is bool(options)


def test_a_worker_inherits_nothing_of_another_launcher(script, monkeypatch):
    for name in launch_plan.NOT_INHERITED:
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("GOSSIPDP_SECRET")
    monkeypatch.setenv("MY_OWN", "7")

    def start(command: list[str], variables: Mapping[str, str]) -> None:
        sevens = {name for name, value in variables.items() if value == "7"}
        assert sevens == {"MY_OWN"}
        assert variables["RANK"] == "0"
        raise NotImplementedError  # the test goes no further

    make, kept = local.Spares, list[int]()
    monkeypatch.setattr(local, "Spares", lambda *of: kept.append(of[2]) or make(*of))
    monkeypatch.setattr(local, "ScriptWorker", start)
    options = {"workers": 4, "nproc_per_replica": 2, "max_restarts": 3}
    for spares in (2, 5):
        with pytest.raises(NotImplementedError):
            run(RunArguments(**options, spares=spares, script=(script,)))
    assert kept == [4, 6], "one for each process of two replicas, and of three, as are restarts"


DIED = "worker 1 died; that was --faults, and "
COUNTED = "faults: 0 done, 0 missed; not all workers here had made a gradient step"
LOST = "no worker is left, and no checkpoint was saved: all that they trained is lost"
STOPPED, AT_THE_END = "stopped; nothing more was saved", "at the end: worker 1 died"
STAYS = "staying until the other workers have ended: torchrun would end them with this"
JOINS = "to add a worker: gossipdp run --join 10.0.0.1:4 SCRIPT"


@pytest.mark.parametrize(
    "case",
    [
        (None, {}, 1, [AT_THE_END, LOST, STAYS]),
        (signal.SIGTERM, {}, 143, [STOPPED, AT_THE_END]),
        (signal.SIGINT, {0: "no room"}, 1, [STOPPED, AT_THE_END, "worker 0: no room", STAYS]),
        (None, {}, None, []),  # an error before the run has begun
    ],
)
def test_all_that_fails_is_told_and_a_full_disk_under_it_changes_nothing(
    case, script, tmp_path, monkeypatch
):
    ended_by, unsaved, code, said = case

    def end(supervisor: Supervisor, look: Callable[[], None]) -> int | None:
        supervisor.begun, supervisor.unsaved = code is not None, unsaved
        supervisor.failures.append(Failure(1, (Ending("died"),), 7, is_injected=True))
        supervisor._on_failure(supervisor.failures[0])
        plan = supervisor._plan
        plan.join_infos[0].addresses |= {1: ("10.0.0.1", 5), 0: ("10.0.0.1", 4)}
        for number in (0, 0, 1):  # said once, and again when all have met again
            plan.num_meetings = number
            look()
        supervisor.close()
        if code is None:
            raise NotImplementedError
        return ended_by

    disk, out = (Mock(flush=Mock(side_effect=OSError)) for _ in range(2))
    left, noted = Mock(), list[object]()
    monkeypatch.setattr(Supervisor, "run", end)
    monkeypatch.setattr(LaunchPlan, "under_torchrun", True)
    monkeypatch.setattr(LaunchPlan, "leave", lambda plan, wait: [3, 4])
    monkeypatch.setattr(local.Spares, "close", lambda spares: noted.append("no spare is left"))
    monkeypatch.setattr("gossipdp.observe.log.write_process_end", lambda *of: noted.append(of))
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))
    monkeypatch.setattr(os, "_exit", left)
    monkeypatch.setattr(sys, "stderr", disk)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("GOSSIPDP_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("GOSSIPDP_SECRET", 16 * "s")
    arguments = RunArguments(workers=2, faults="stop 1s", script=(script,))
    with nullcontext() if code else pytest.raises(NotImplementedError):
        assert run(arguments) == code
    assert (out.flush.call_count, left.mock_calls) == ((1, [call(code)]) if code else (0, []))
    then = "no other worker runs here" if code else "the run had not begun, so all are ended"
    lost = "not waiting for the end of workers 3, 4: nothing is heard of them"
    lines = [f"gossipdp: {line}\n" for line in (DIED + then, JOINS, JOINS, COUNTED, *said, lost)]
    assert [each.args[0] for each in disk.write.call_args_list[1:]] == lines
    assert noted == [(tmp_path / "worker-1.jsonl", 7, "died"), *4 * ["no spare is left"]]
