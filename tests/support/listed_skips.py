"""A plugin for pytest: each skip must be on a list, and nothing may be expected to fail."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest


class ListedSkips:
    """Turns a skip that the list lacks, and whatever is marked ``xfail``, into a failure.

    It does so in the process that makes the report, so it is the same under ``-n`` and ``-k``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries = read_list(path.read_text())

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # sees what the marks have made of the report
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        return self._checked((yield))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self) -> Iterator[Any]:
        """Look at each report of a module, which may have skipped itself."""
        return self._checked((yield))

    def _checked(self, report: Any) -> Any:
        if hasattr(report, "wasxfail"):
            report.outcome = "failed"
            report.longrepr = "xfail: mend the test, or what it tests, or delete it"
            del report.wasxfail
        elif report.outcome == "skipped":
            reason = report.longrepr[2].removeprefix("Skipped: ")
            names = names_of(report.nodeid)
            if not any(name in names and fnmatchcase(reason, why) for name, why in self.entries):
                report.outcome = "failed"
                report.longrepr = f"skipped, which {self._path.name} does not list: {reason}"
        return report


def names_of(nodeid: str) -> set[str]:
    """Return the names under which a list may have a test: its case, the test and its file."""
    test = nodeid.partition("[")[0]
    return {nodeid, test, test.partition("::")[0]}


def read_list(text: str) -> list[tuple[str, str]]:
    """Return (file or test, pattern of the reason) of each line."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, why) for name, _, why in (line.partition(" | ") for line in lines)]
