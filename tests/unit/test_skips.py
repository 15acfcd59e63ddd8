"""A skip that is not listed fails the run, and so does an expected failure."""

import os
import re
from pathlib import Path

import listed_skips
from listed_skips import read_list
from run_processes import run_python

TESTS = Path(__file__).parents[1]

CONFTEST = """
from pathlib import Path
from listed_skips import ListedSkips

def pytest_configure(config):
    config.pluginmanager.register(ListedSkips(Path(__file__).parent / "skips.txt"))
"""
LISTED = """
test_here.py::test_listed | no moon*
test_here.py::test_unlisted_reason | no moon
"""
HERE = """
import pytest

@pytest.mark.parametrize("value", ["a", "b[::]"])
@pytest.mark.skipif(True, reason="no moon today")
def test_listed(value): pass

def test_not_on_the_list(): pytest.skip("no moon")

def test_unlisted_reason(): pytest.skip("no sun")

@pytest.mark.xfail
def test_expected_to_fail(): assert False

@pytest.mark.xfail
def test_that_passes_unexpectedly(): pass
"""
MODULE = "import pytest\npytest.skip('no moon', allow_module_level=True)\n"


def test_what_is_not_listed_fails(tmp_path):
    """In a process of xdist's, which makes the reports."""
    files = {
        "conftest.py": CONFTEST,
        "skips.txt": LISTED,
        "pytest.ini": f"[pytest]\npythonpath = {Path(listed_skips.__file__).parent}\n",
        "test_here.py": HERE,
        "test_there.py": MODULE,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = ["-q", "-ra", "-p", "no:cacheprovider", "-p", "xdist", "-n", "1"]
    words += ["--continue-on-collection-errors"]
    variables = {**os.environ, "COLUMNS": "200", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_python("-m", "pytest", *words, environment=variables, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, lines
    assert re.match("4 failed, 2 skipped, 1 errors? in ", lines[-1]), lines
    skipped = "skipped, which skips.txt does not list: no "
    expected = "xfail: mend the test, or what it tests, or delete it"
    said = {line.split("::")[-1] for line in lines if line.startswith(("FAILED", "ERROR "))}
    assert said == {
        f"test_expected_to_fail - {expected}",
        f"test_not_on_the_list - {skipped}moon",
        f"test_unlisted_reason - {skipped}sun",
        f"test_that_passes_unexpectedly - {expected}",
        f"ERROR test_there.py - {skipped}moon",
    }


def test_the_lists_name_tests_that_are_there_and_skips_their_reasons():
    skips, long = (read_list((TESTS / name).read_text()) for name in ("skips.txt", "long.txt"))
    assert skips
    for name, reason in [*skips, *long]:
        path, _, test = name.partition("[")[0].partition("::")
        text = (TESTS.parent / path).read_text()
        assert not test or f"def {test}(" in text, name
        assert (name, reason) in long or (reason and "skip" in text), name
