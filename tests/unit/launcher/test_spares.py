"""Spare interpreters: each becomes a worker, as a new interpreter would."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from run_processes import VARIABLES, run_python, runs
from waiting import wait_until

from gossipdp.launcher import local
from gossipdp.launcher.local import ScriptWorker, Spares
from gossipdp.launcher.reports import Report
from gossipdp.launcher.spare_interpreter import PROGRAM

# Writes all of a process that a script may look at, and how it ends.
SCRIPT = """
import atexit, json, os, pickle, sys
from gossipdp.launcher.reports import Report, send_report

class Own:
    pass

def at_the_end():
    pickle.dumps(Own())
    open(file + "-end", "w").close()

file = os.environ["FILE"]
atexit.register(at_the_end)
nothing = os.stat(os.devnull)
seen = {
    "argv": sys.argv, "command": sys.orig_argv[1:], "names": sorted(set(globals()) - {"seen"}),
    "name": __name__, "file": __file__, "spec": getattr(__spec__, "name", None), "doc": __doc__,
    "loader": type(__loader__).__name__, "path": sys.path,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "own": type(pickle.loads(pickle.dumps(Own()))) is Own, "input": sys.stdin.read(),
    "has_input": os.fstat(0).st_rdev != nothing.st_rdev,
    "variables": {name: value for name, value in os.environ.items() if name != "GOSSIPDP_REPORT"},
    "group": os.getpgid(0) == os.getpid(), "package": __package__ or "",
    "reports": send_report(Report(says="a sentence")), "torch": "torch" in sys.modules,
}
with open(file + "-new", "w") as new:
    json.dump(seen, new)
os.rename(file + "-new", file)
sys.exit(7)
"""

# With an empty torch the library itself cannot be imported.
AHEAD = """
from gossipdp.launcher import spare_interpreter

def import_ahead():
    import torch
    return True

spare_interpreter.import_ahead = import_ahead
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts" / "package").mkdir(parents=True)
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "package" / "__init__.py").touch()
    (tmp_path / "scripts" / "package" / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def start(folder: Path, without_torch: dict[str, str]) -> Iterator[Callable[..., ScriptWorker]]:
    """Start a worker of these words in ``scripts``; from a spare if ``number`` is 1.

    The spare imports an empty torch, in no time, unless ``torch`` is true.
    """
    before, started = Path.cwd(), []
    os.chdir(folder / "scripts")
    (folder / "sitecustomize.py").write_text(AHEAD)

    def start(
        words: list[str], number: int, *, torch: bool = False, safe: bool = False, **changes: str
    ) -> ScriptWorker:
        common = VARIABLES if torch else without_torch
        common = common | {"ONE": "same", "TWO": "changes"}
        del common["PYTHONWARNINGS"]  # torch warns on import
        common |= {"PYTHONSAFEPATH": "1"} if safe else {}
        spares = Spares(words, common, number)
        with closing(spares):
            spares.prepare()
            started.append(spares.start(common | changes))
        return started[-1]

    yield start
    os.chdir(before)
    for each in started:
        each.discard()


def seen_by(worker: ScriptWorker, file: Path) -> dict[str, object]:
    wait_until(lambda: worker.poll() is not None, "the script ends")
    ending = worker.poll()
    assert ending is not None
    assert ending.reason == "ended with exit code 7"
    assert file.with_name(f"{file.name}-end").exists(), "what runs at exit did not"
    assert worker.reports.take() == [Report(says="a sentence")]
    return dict(json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["train.py", "--lr", "0.1", "-m"], {"torch": True}),
        (["-m", "package.train", "a b"], {}),
        (["./train.py"], {}),
        (["train.py"], {"safe": True}),
    ],
)
def test_a_script_sees_what_it_would_in_a_new_interpreter(start, folder, words, options):
    both = []
    for number in (0, 1):
        file = folder / f"seen-{number}"
        worker = start(words, number, RANK="3", TWO="\udc80 ö", FILE=str(file), **options)
        both.append(seen_by(worker, file))
        variables = both[-1].pop("variables")
        assert isinstance(variables, dict)
        assert [variables[name] for name in ("ONE", "TWO", "RANK")] == ["same", "\udc80 ö", "3"]
    new, spare = both
    # Else it was no spare, but a new interpreter in its place.
    assert (new.pop("torch"), spare.pop("torch")) == (False, True)
    assert spare == new
    assert "safe" not in options or str(folder / "scripts") not in str(new["path"])
    assert (new["input"], new["has_input"]) == ("", False)
    assert new["main"] is new["own"] is new["group"] is new["reports"] is True


def test_as_many_as_are_wanted_are_kept_and_end_with_the_run(folder, without_torch):
    # A spare that were to run without being told would leave this file.
    given = without_torch | {"FILE": str(folder / "unused")}
    spares = Spares([str(folder / "scripts" / "train.py")], given, 2)
    for _ in range(2):
        spares.prepare()
    first, second = spares._waiting
    file = folder / "seen"
    worker = spares.start(without_torch | {"FILE": str(file)})
    assert worker is first
    assert spares._waiting == [second]
    spares.prepare()
    assert spares._waiting[0] is second
    third = spares._waiting[1]
    spares.close()
    assert not any(runs(each.pid) for each in (second, third))
    seen_by(worker, file)
    worker.close()
    assert not list(folder.glob("unused*"))


def test_one_that_has_died_is_not_used_and_no_other_is_kept(folder, without_torch):
    spares = Spares([str(folder / "scripts" / "train.py")], without_torch, 1)
    spares.prepare()
    (dead,) = spares._waiting
    os.kill(dead.pid, signal.SIGKILL)
    wait_until(lambda: dead.poll() is not None, "it has died")
    file = folder / "seen"
    worker = spares.start(without_torch | {"FILE": str(file)})
    assert worker is not dead
    seen_by(worker, file)
    worker.close()
    spares.prepare()
    (other,) = spares._waiting
    os.kill(other.pid, signal.SIGKILL)
    wait_until(lambda: other.poll() is not None, "it has died")
    spares.prepare()
    assert spares._waiting == []


def test_variables_that_do_not_fit_into_the_pipe_take_a_new_interpreter(folder, without_torch):
    spares = Spares([str(folder / "scripts" / "train.py")], without_torch, 1)
    spares.prepare()
    (spare,) = spares._waiting
    os.kill(spare.pid, signal.SIGSTOP)  # it takes nothing out
    file = folder / "seen"
    worker = spares.start(without_torch | {"FILE": str(file), "LONG": "x" * 100_000})
    assert worker is not spare
    assert not runs(spare.pid)
    seen_by(worker, file)
    worker.close()


def test_a_spare_that_gets_nothing_ends_without_a_word(folder, without_torch):
    words = ["-c", PROGRAM, str(folder / "scripts" / "train.py")]
    done = run_python(*words, environment=without_torch, input="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_system_without_another_process_keeps_its_workers(monkeypatch):
    def start(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(local, "ScriptWorker", start)
    lines: list[str] = []
    spares = Spares(["train.py"], {}, 1, lines.append)
    for _ in range(2):
        spares.prepare()
    assert len(lines) == 1
    assert "no spare interpreter is kept any more: BlockingIOError" in lines[0]


def test_what_is_no_file_of_python_has_no_spare(tmp_path):
    spares = Spares([str(tmp_path)], {}, 1)
    spares.prepare()
    assert spares._waiting == []


def test_a_torch_that_cannot_be_imported_is_the_script_s_error(folder, without_torch):
    (folder / "torch" / "__init__.py").write_text("raise ImportError('broken')")
    script = folder / "scripts" / "train.py"
    script.write_text("import sys\nprint(sys.orig_argv[1:])\nimport torch")
    done = run_python("-c", PROGRAM, str(script), "a", environment=without_torch, input="{}")
    assert (done.returncode, done.stdout) == (1, f"{[str(script), 'a']}\n")
    assert done.stderr.count("ImportError: broken") == 1


def test_what_it_imports_ahead_is_what_a_script_needs():
    """The imports that an optimizer makes at first are behind a spare that waits."""
    code = (
        "import sys; from gossipdp.launcher.spare_interpreter import import_ahead; import_ahead()\n"
        "before = set(sys.modules)\n"
        "import torch; from gossipdp import GossipDataParallel\n"
        "torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())\n"
        "print(len(set(sys.modules) - before))"
    )
    # Of the plain environment: torch warns on import.
    assert int(run_python("-c", code, environment=os.environ, check=True).stdout) < 5
