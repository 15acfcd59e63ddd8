import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

import gossipdp
from gossipdp import logs
from gossipdp.cli import main as cli
from gossipdp.cli import run as run_command
from gossipdp.cli.main import COMMANDS, main
from gossipdp.cli.run import RunArguments, split_script
from gossipdp.errors import RefusedError, RendezvousError


@pytest.fixture(autouse=True)
def logging_untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("gossipdp")
    before = logger.level, logger.propagate, list(logger.handlers)
    monkeypatch.setattr(logs, "_handler", None)
    monkeypatch.setenv("GOSSIPDP_LOG", "")
    yield
    logger.level, logger.propagate, logger.handlers = before


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gossipdp {gossipdp.__version__}\n"


def test_help_names_every_command_and_imports_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from gossipdp.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'networkx', 'scipy', 'sklearn', 'matplotlib', 'numpy', 'PIL'}\n"
        "slow &= {*sys.modules}\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_an_option_of_all_commands_stands_before_or_after_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels: list[int] = []
    level = logging.getLogger("gossipdp").getEffectiveLevel
    monkeypatch.setattr(run_command, "run", lambda arguments: levels.append(level()) or 0)
    assert main(["--log-level", "info", "run", "-n", "2", "train.py", "--lr", "1"]) == 0
    assert main(["run", "-n", "2", "--log-level", "error", "train.py", "--lr", "1"]) == 0
    assert levels == [logging.INFO, logging.ERROR]


@pytest.mark.parametrize("option", ["-n4", "-n=4", "-n 4", "--nproc-per-node 4", "--workers=4"])
def test_the_number_of_workers_may_be_written_as_elsewhere(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunArguments] = []
    monkeypatch.setattr(run_command, "run", lambda arguments: seen.append(arguments) or 0)
    assert main(["run", *option.split(), "train.py"]) == 0
    assert (seen[0].workers, seen[0].script) == (4, ("train.py",))


def test_everything_after_the_script_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunArguments] = []
    monkeypatch.setattr(run_command, "run", lambda arguments: seen.append(arguments) or 0)
    script = ["train.py", "--lr", "0.1", "-n", "2", "--log-level", "debug", "--help"]
    assert main(["run", "--port", "5", "-n", "4", "--log-level", "info", *script]) == 0
    (arguments,) = seen
    assert (arguments.workers, arguments.port) == (4, 5)
    assert arguments.script == tuple(script)
    assert logging.getLogger("gossipdp").level == logging.INFO


@pytest.mark.parametrize(
    ("words", "options", "script"),
    [
        ("-n 4 a.py -x", "-n 4", "a.py -x"),
        ("--workers=4 a.py", "--workers=4", "a.py"),
        ("-n 4 -m pkg.mod --x 1", "-n 4", "-m pkg.mod --x 1"),
        ("-n 4 -- a.py", "-n 4", "a.py"),
        ("--help", "--help", ""),
        ("-n", "-n", ""),
    ],
)
def test_options_end_where_the_script_begins(words: str, options: str, script: str) -> None:
    assert split_script(words.split()) == (options.split(), script.split())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RefusedError("graph differs"), 1),
        (RendezvousError("port 5 is in use"), 2),
        (FileNotFoundError("no file x"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_one_line(
    error: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: RunArguments) -> int:
        raise error

    monkeypatch.setattr(run_command, "run", fail)
    assert main(["run", "-n", "2", "x.py"]) == status
    assert capsys.readouterr().err.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: RunArguments) -> int:
        raise RefusedError("graph differs")

    monkeypatch.setattr(run_command, "run", fail)
    with pytest.raises(RefusedError):
        main(["run", "--log-level", "debug", "-n", "2", "x.py"])


def test_a_bug_is_not_dressed_up_as_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: RunArguments) -> int:
        raise ValueError("from beneath us")  # this module is not gossipdp's

    monkeypatch.setattr(run_command, "run", fail)
    with pytest.raises(ValueError, match="from beneath us"):
        main(["run", "-n", "2", "x.py"])


def test_every_command_follows_the_convention() -> None:
    for name in COMMANDS:
        assert callable(importlib.import_module(COMMANDS[name]).run)
        assert cli._arguments_of(name).__doc__
