import io
import logging
import math
import os
import sys

import pytest
from run_processes import run_python

import gossipdp
from gossipdp.cli import run as run_command
from gossipdp.cli.main import COMMANDS, main
from gossipdp.cli.run import RunArguments, split_script
from gossipdp.errors import RefusedError, RendezvousError


def test_help_fits_on_a_screen_and_names_every_command():
    variables = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    words = ["-m", "gossipdp", "--help"]
    shown = run_python(*words, environment=variables, check=True, encoding="utf-8").stdout
    assert all(command in shown for command in COMMANDS)
    rows = sum(max(1, math.ceil(len(line) / 80)) for line in shown.splitlines())
    assert rows <= 23, shown  # of 24: the last is the prompt's


def test_the_version_is_shown(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gossipdp {gossipdp.__version__}\n"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunArguments, int]]:
    """Note the arguments of ``gossipdp run`` and the level of the log, instead of a run."""
    seen: list[tuple[RunArguments, int]] = []

    def run(arguments: RunArguments) -> int:
        seen.append((arguments, logging.getLogger("gossipdp").getEffectiveLevel()))
        return 0

    monkeypatch.setattr(run_command, "run", run)
    return seen


@pytest.mark.parametrize("option", ["-n4", "-n=4", "-n 4", "--nproc-per-node 4", "--workers=4"])
def test_the_number_of_workers_may_be_written_as_elsewhere(option, ran):
    assert main(["run", *option.split(), "train.py"]) == 0
    ((arguments, _),) = ran
    assert (arguments.workers, arguments.script) == (4, ("train.py",))


def test_everything_after_the_script_is_the_scripts(ran):
    script = ["train.py", "--lr", "0.1", "-n", "2", "--log-level", "debug", "--help"]
    assert main(["run", "--spares", "5", "-n", "4", "--log-level", "info", *script]) == 0
    # An option of all commands may stand before the command too.
    assert main(["--log-level", "error", "run", "--spares", "5", "-n", "4", *script]) == 0
    assert [level for _, level in ran] == [logging.INFO, logging.ERROR]
    for arguments, _ in ran:
        assert (arguments.workers, arguments.spares) == (4, 5)
        assert arguments.script == tuple(script)


@pytest.mark.parametrize(
    ("words", "options", "script"),
    [
        ("-n 4 -m pkg.mod --x 1", "-n 4", "-m pkg.mod --x 1"),
        ("-n 4 -- a.py", "-n 4", "a.py"),
        ("--help", "--help", ""),
        ("-n", "-n", ""),
    ],
)
def test_options_end_where_the_script_begins(words, options, script):
    assert split_script(words.split()) == (options.split(), script.split())


@pytest.mark.parametrize(
    ("command", "error", "status"),
    [
        ("run", RefusedError("graph differs"), 1),
        ("run", RendezvousError("port 5 is in use"), 2),
        ("run", FileNotFoundError("no file x"), 2),
        ("run", KeyboardInterrupt(), 130),
        ("run", BrokenPipeError(), 1),
        ("run", ValueError("from beneath us"), None),  # a bug, as this module is not gossipdp's
        ("run", ModuleNotFoundError(name="matplotlib"), None),
        ("report", ModuleNotFoundError(name="gossipdp_lab.gone"), None),
        ("report", ModuleNotFoundError(name="matplotlib.pyplot"), 2),
    ],
)
def test_an_error_is_one_line(command, error, status, monkeypatch):
    def fail(arguments: object) -> int:
        raise error

    options = ["logs"] if command == "report" else ["-n", "2", "x.py"]
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    monkeypatch.setattr(f"{COMMANDS[command]}.run", fail)
    if status is None:
        with pytest.raises(type(error)):
            main([command, *options])
        return
    assert main([command, *options]) == status
    if isinstance(error, BrokenPipeError):
        assert shown.closed, "nor does Python say at exit that it cannot write"
        return
    assert shown.getvalue().count("\n") == 1
    assert command == "run" or " matplotlib is not installed: pip" in shown.getvalue()
    if isinstance(error, RefusedError):
        with pytest.raises(RefusedError):
            main([command, "--log-level", "debug", *options])
