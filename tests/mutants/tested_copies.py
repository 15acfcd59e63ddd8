"""Copies of the tree in which tests are run, each run in a process of its own.

They are forked from a server that has imported torch and pytest, and nothing of the library.
"""

import importlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import Phase, settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What tests need of the tree.
COPIED = (
    *("src", "tests", "tools", "examples", "docs"),
    *("README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml", "pyproject.toml"),
)
SOURCE = Path("src")
EQUIVALENT = HERE / "equivalent.toml"  # of random_faults.py, no part of the catalogue
# One test may take this long; what it waits for may never come.
TEST_TIMEOUT_S, LONGEST_WAIT_S = 60.0, 20.0
PASSED, FAILED, NO_TESTS = 0, 1, 5
PRELOADED = ["torch", "numba", "networkx", "scipy", "cryptography.x509", "hypothesis", "pytest"]
# Tests with real processes start a server of their own.
OPTIONS = ("-x", "-m", "not processes")

servers = multiprocessing.get_context("forkserver")
servers.set_forkserver_preload(PRELOADED)


class Copy:
    """A copy of the tree for as long as it is needed; with what Python and we have compiled."""

    def __enter__(self) -> Path:
        self._directory = tempfile.TemporaryDirectory(prefix="gossipdp-mutant-")
        root = Path(self._directory.name).resolve()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name)
            else:
                shutil.copy2(ROOT / name, root / name)
        waiting = root / "tests/support/waiting.py"
        longest, count = re.subn(
            r"(?m)^LONGEST_S = .*", f"LONGEST_S = {LONGEST_WAIT_S}", waiting.read_text()
        )
        assert count == 1, f"{waiting} sets no LONGEST_S"
        waiting.write_text(longest)
        return root

    def __exit__(self, *_: object) -> None:
        """Kill what a fault has let go on, in whichever group it is."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("PYTHONPATH", "").startswith(self._directory.name):
                    process.kill()
        self._directory.cleanup()


class FirstFailure:
    """Plugin of pytest: a property ends with the first example that fails.

    To shrink the example may take minutes.
    """

    def pytest_configure(self) -> None:
        phases = Phase.explicit, Phase.generate
        settings.register_profile("first failure", settings(), phases=phases)
        settings.load_profile("first failure")


def run_tests(
    tests: Sequence[str],
    root: Path,
    timeout_s: float,
    *,
    test_timeout_s: float = TEST_TIMEOUT_S,
    options: Sequence[str] = OPTIONS,
    plugins: Sequence[object] = (),
) -> tuple[int | None, str]:
    """Run tests of the tree at ``root``; return the status and what they wrote.

    The status is None if they were not over within ``timeout_s``. ``plugins``: of pytest; they are
    pickled.
    """
    if not tests:
        return PASSED, ""
    output = root / "output"
    words = [*options, f"--timeout={test_timeout_s:g}", *tests]
    process = servers.Process(target=_run_there, args=(words, root, output, plugins))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None, f"{output.read_text()}\nnot over within {timeout_s:g} s"
    return process.exitcode, output.read_text()


def first_failure(output: str) -> tuple[str, bool]:
    """Return the first test that failed, by what pytest wrote, and whether one hung; else ""."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return failed[1] if failed else "", "Timeout (>" in output


def _run_there(words: Sequence[str], root: Path, output: Path, plugins: Sequence[object]) -> None:
    """Leave this process with the status of the tests."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root / "src")
    # Workers look there for tests.conftest, too.
    sys.path[:0] = [str(root / "src"), str(root)]
    library = importlib.import_module("gossipdp")
    assert Path(str(library.__file__)).is_relative_to(root), f"{library.__file__} is no copy"
    usual = ["-q", "--tb=short", "--assert=plain", "-n", "0", "-p", "no:cacheprovider"]
    status = int(pytest.main([*usual, *words], [FirstFailure(), *plugins]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that a failed test left behind may never end
