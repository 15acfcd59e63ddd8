"""A skip that is not listed fails the run, and so does an expected failure."""

import os
import subprocess
import sys
from pathlib import Path

import listed_skips
import pytest
from listed_skips import read_list

TESTS = Path(__file__).parents[1]

CONFTEST = """
from pathlib import Path
from listed_skips import ListedSkips

def pytest_configure(config):
    config.pluginmanager.register(ListedSkips(Path(__file__).parent / "skips.txt"))
"""
LISTED = """
test_here.py::test_listed | no moon*
test_here.py::test_from_a_fixture | no moon
test_whole_file.py | no moon
"""
HERE = """
import pytest

@pytest.mark.parametrize("value", ["a", "b[::]"])
@pytest.mark.skipif(True, reason="no moon today")
def test_listed(value): pass

@pytest.fixture
def moon(): pytest.skip("no moon")

def test_from_a_fixture(moon): pass

def test_passes(): pass
"""
UNLISTED = """
import pytest

def test_not_on_the_list(): pytest.skip("no moon")

def test_listed(): pytest.skip("no sun")

@pytest.mark.xfail
def test_expected_to_fail(): assert False

@pytest.mark.xfail
def test_that_passes_unexpectedly(): pass

@pytest.mark.xfail(run=False)
def test_not_even_run(): pass
"""
MODULE = "import pytest\npytest.skip('no moon', allow_module_level=True)\n"


def run(directory: Path, *words: str) -> tuple[int, list[str]]:
    """Return the exit status of pytest there, and the last words of what it says."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "skips.txt").write_text(LISTED)
    (directory / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {Path(listed_skips.__file__).parent}\n"
    )
    words = ("-q", "-ra", "-p", "no:cacheprovider", "-p", "xdist", *words)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=directory,
        env={**os.environ, "COLUMNS": "200", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_is_listed_is_skipped(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_here.py").write_text(HERE)
    (tmp_path / "test_whole_file.py").write_text(MODULE)
    code, lines = run(tmp_path, "-n", processes)
    assert code == 0, lines
    assert lines[-1].startswith("1 passed, 4 skipped")
    code, lines = run(tmp_path, "-n", processes, "-k", "listed or passes")
    assert code == 0, lines


@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_is_not_listed_fails(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_here.py").write_text(HERE + UNLISTED.replace("test_listed", "test_passes"))
    code, lines = run(tmp_path, "-n", processes)
    assert code == 1, lines
    assert lines[-1].startswith("4 failed, 3 skipped, 1 error")
    skipped = "skipped, which skips.txt does not list: no "
    expected = "xfail: mend the test, or what it tests, or delete it"
    said = [line.split("::")[-1] for line in lines if line.startswith(("FAILED", "ERROR "))]
    assert sorted(said) == [
        f"test_expected_to_fail - {expected}",
        f"test_not_even_run - {expected}",
        f"test_not_on_the_list - {skipped}moon",
        f"test_passes - {skipped}sun",
        f"test_that_passes_unexpectedly - {expected}",
    ]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_module_that_skips_itself_fails(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_there.py").write_text(MODULE)
    (tmp_path / "test_here.py").write_text(HERE)
    code, lines = run(tmp_path, "-n", processes)
    assert code != 0
    assert any("which skips.txt does not list: no moon" in line for line in lines)


def test_every_line_of_the_list_names_a_test_and_a_reason_that_are_there() -> None:
    entries = read_list((TESTS / "skips.txt").read_text())
    assert entries
    for name, reason in entries:
        assert reason
        path, _, test = name.partition("::")
        text = (TESTS.parent / path).read_text()
        assert f"def {test}" in text, name
        assert "skip" in text, name


def test_each_test_that_is_listed_as_long_is_there() -> None:
    for name, _ in read_list((TESTS / "long.txt").read_text()):
        path, _, test = name.partition("[")[0].partition("::")
        text = (TESTS.parent / path).read_text()
        assert not test or f"def {test}(" in text, name
