"""Spare interpreters: each becomes a worker, as a new interpreter would."""

import json
import os
import signal
import sys
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock, call

import pytest
from run_processes import VARIABLES, run_python, runs
from waiting import wait_until

from gossipdp.launcher import local, spare_interpreter
from gossipdp.launcher.local import ScriptWorker, Spares
from gossipdp.launcher.processes import Ending
from gossipdp.launcher.reports import Report

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
    "argv": sys.argv, "command": sys.orig_argv, "names": sorted(set(globals()) - {"seen"}),
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for scripts in (tmp_path / "scripts", tmp_path / "scripts" / "package"):
        scripts.mkdir()
        (scripts / "train.py").write_text(SCRIPT)
    (scripts / "__init__.py").touch()
    monkeypatch.chdir(tmp_path / "scripts")
    return tmp_path


class Kept(Spares):
    """Spares of a script, for workers that write what they see into a file."""

    def __init__(
        self, folder: Path, variables: dict[str, str], number: int, *words: str, file: str = "seen"
    ) -> None:
        super().__init__(list(words or ["train.py"]), variables, number)
        self.file, self.variables = folder / file, variables | {"FILE": str(folder / file)}
        self.prepare()

    def seen_by(self, worker: ScriptWorker) -> dict[str, object]:
        wait_until(lambda: worker.poll() is not None, "the script ends")
        assert worker.poll() == Ending("ended with exit code 7")
        assert self.file.with_name(f"{self.file.name}-end").exists(), "what runs at exit did not"
        assert worker.reports.take() == [Report(says="a sentence")]
        worker.discard()
        return dict(json.loads(self.file.read_text()))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["train.py", "--lr", "0.1", "-m"], "torch"),
        (["-m", "package.train", "a b"], ""),
        (["./train.py"], ""),
        (["train.py"], "safe"),
    ],
)
def test_a_script_sees_what_it_would_in_a_new_interpreter(folder, without_torch, words, options):
    """A spare imports an empty torch, in no time, unless ``torch`` is asked for."""
    (folder / "sitecustomize.py").write_text(AHEAD)
    common = dict(VARIABLES if "torch" in options else without_torch) | {"ONE": "1", "TWO": "2"}
    del common["PYTHONWARNINGS"]  # torch warns on import
    common |= {"PYTHONSAFEPATH": "1"} if "safe" in options else {}
    both = []
    for number in (0, 1):
        with closing(Kept(folder, common, number, *words, file=f"seen-{number}")) as spares:
            worker = spares.start(spares.variables | {"RANK": "3", "TWO": "\udc80 ö"})
        both.append(spares.seen_by(worker))
        variables = both[-1].pop("variables")
        assert [variables[name] for name in ("ONE", "TWO", "RANK")] == ["1", "\udc80 ö", "3"]
    new, spare = both
    # Else it was no spare, but a new interpreter in its place.
    assert (new.pop("torch"), spare.pop("torch")) == (False, True)
    assert spare == new
    assert "safe" not in options or str(folder / "scripts") not in str(new["path"])
    assert (new["input"], new["has_input"]) == ("", False)
    assert new["main"] is new["own"] is new["group"] is new["reports"] is True


def test_as_many_as_are_wanted_are_kept_and_end_with_the_run(folder, without_torch):
    # A spare that were to run without being told would leave this file.
    spares = Kept(folder, without_torch | {"FILE": str(folder / "unused")}, 2)
    spares.prepare()
    first, second = spares._waiting
    worker = spares.start(spares.variables)
    assert worker is first
    assert spares._waiting == [second]
    spares.prepare()
    assert spares._waiting[0] is second
    third = spares._waiting[1]
    spares.close()
    assert not any(runs(each.pid) for each in (second, third))
    spares.seen_by(worker)
    assert not list(folder.glob("unused*"))


def test_one_that_has_died_is_not_used_and_no_other_is_kept(folder, without_torch):
    spares = Kept(folder, without_torch, 1)

    def kill() -> ScriptWorker:
        (spare,) = spares._waiting
        os.kill(spare.pid, signal.SIGKILL)
        wait_until(lambda: spare.poll() is not None, "it has died")
        return spare

    dead = kill()
    worker = spares.start(spares.variables)
    assert worker is not dead
    spares.seen_by(worker)
    spares.prepare()
    kill()
    spares.prepare()
    assert spares._waiting == []


def test_variables_that_do_not_fit_into_the_pipe_take_a_new_interpreter(folder, without_torch):
    spares = Kept(folder, without_torch, 1)
    (spare,) = spares._waiting
    os.kill(spare.pid, signal.SIGSTOP)  # it takes nothing out
    worker = spares.start(spares.variables | {"LONG": "x" * 100_000})
    assert worker is not spare
    assert not runs(spare.pid)
    spares.seen_by(worker)


def test_a_system_without_another_process_keeps_its_workers(monkeypatch):
    no_more = Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable"))
    monkeypatch.setattr(local, "ScriptWorker", no_more)
    lines: list[str] = []
    Spares(["."], {}, 1, lines.append).prepare()  # no file of Python: it has none
    spares = Spares(["train.py"], {}, 1, lines.append)
    for _ in range(2):
        spares.prepare()
    assert len(lines) == 1
    assert "no spare interpreter is kept any more: BlockingIOError" in lines[0]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("words", [["of_spare.py", "-m"], ["-m", "of_spare", "a"]])
def test_a_spare_that_cannot_import_begins_anew(folder, monkeypatch, capfd, words, fails):
    """In this process: what the imports write is lost, and without a message nothing happens."""
    (folder / "scripts" / "of_spare.py").write_text("import sys\nseen = __name__, sys.argv[1:]")
    main, anew = ModuleType("spare"), Mock(side_effect=SystemExit)
    sgd = Mock(side_effect=ImportError if fails else lambda *_, lr: os.write(2, b"lost"))
    stdin = Mock(**{"buffer.read.side_effect": [b"", b'{"ONE": "1"}']})
    changes = {"os.execv": anew, "torch.optim.SGD": sgd, "gc.freeze": Mock(), "sys.stdin": stdin}
    changes |= {"sys.argv": ["-c", *words], "sys.orig_argv": ["py"], "sys.path": ["", *sys.path]}
    for place, value in changes.items():
        monkeypatch.setattr(place, value)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setenv("ONE", "0")
    spare_interpreter.main()
    assert (os.environ["ONE"], vars(main).get("seen")) == ("0", None)
    with suppress(SystemExit):
        spare_interpreter.main()
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"
    assert (os.environ["ONE"], sys.path[0]) == ("1", str(folder / "scripts"))
    assert anew.mock_calls == fails * [call(sys.executable, [sys.executable, *words])]
    assert fails or (main.seen, sys.orig_argv) == (("__main__", words[-1:]), ["py", *words])


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
