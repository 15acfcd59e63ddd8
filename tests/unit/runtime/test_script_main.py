"""A script run by ``run_words`` cannot tell the difference from ``python SCRIPT``."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SHOW = """
'''What the script sees.'''
import sys, beside
print(__name__, __doc__, __file__, __spec__ and __spec__.name, __package__, __cached__)
print(sys.argv, sys.path[0], type(__loader__).__name__, sorted(globals()))
print(sys.modules["__main__"].__dict__ is globals(), beside.VALUE)
"""
FAIL = """
def fail():
    raise ValueError("no")
try:
    1 / 0
except ArithmeticError:
    fail()
"""

PROGRAM = """
import sys
if not sys.flags.safe_path:
    del sys.path[0]
from gossipdp.runtime.script_main import run_words
run_words(sys.argv[1:])
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for folder in (tmp_path, tmp_path / "package"):
        folder.mkdir(exist_ok=True)
        (folder / "beside.py").write_text("VALUE = 3")
        (folder / "show.py").write_text(SHOW)
        (folder / "__main__.py").write_text(SHOW)
    (tmp_path / "fail.py").write_text(FAIL)
    (tmp_path / "exit.py").write_text("import atexit, sys; atexit.register(print, 1); sys.exit(7)")
    (tmp_path / "interrupt.py").write_text(
        "import atexit; atexit.register(print, 'bye'); raise KeyboardInterrupt"
    )
    (tmp_path / "message.py").write_text("raise SystemExit('sorry')")
    (tmp_path / "syntax.py").write_text("x = = 1")
    (tmp_path / "link.py").symlink_to(tmp_path / "package" / "show.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(tmp_path / "beside.py", "beside.py")
        archive.write(tmp_path / "show.py", "__main__.py")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["show.py", "--lr", "0.1"],
        ["package/show.py"],
        ["./link.py"],
        ["package"],
        ["app.zip"],
        ["-m", "show", "-x"],
        ["-m", "package.beside"],
        ["-c", "import sys; print(sys.argv, sys.path[0], sorted(globals()))", "a"],
        ["fail.py"],
        ["exit.py"],
        ["interrupt.py"],
        ["message.py"],
        ["syntax.py"],
        ["-m", "no_such_module"],
    ],
    ids=" ".join,
)
def test_as_by_the_interpreter(directory: Path, words: list[str]) -> None:
    fresh, ours = (
        subprocess.run(
            [sys.executable, *start, *words],
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
        for start in ([], ["-c", PROGRAM])
    )
    assert ours.stdout == fresh.stdout
    assert ours.stderr == fresh.stderr
    assert ours.returncode == fresh.returncode
