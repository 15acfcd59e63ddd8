"""Which tests reach which lines of the library: recorded by coverage.py, a context for each test.

The record lies in ``runs/mutants``. It is of one state of ``src``, and of what records it: after
another, all is recorded anew. Of the tests only files that have changed are. What a test starts is
recorded as its own: by ``COVERAGE_PROCESS_START`` coverage.py begins with each interpreter, and
with what a fork server forks. Nothing is of a process that was killed.
"""

import ast
import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from drawn_faults import Fault
from tested_copies import FAILED, NO_TESTS, PASSED, ROOT, SOURCE, Copy, run_tests

FOLDERS = ("unit", "property", "simulation", "integration")
"""Those of the tests that are recorded, the nearest to a line first."""
RECORD = ROOT / "runs/mutants/reached_lines.json"
COMPILED = {"gossipdp/dynamics/update_loops.py": "gossipdp/dynamics/machine_code.py"}
"""Files that run as machine code, which no tracer sees, with the files that call them."""
MARKED = ("-m", "not long")
"""The tests that are recorded and run."""
# So long may a share of the tests take while the tracer runs, and one of them.
RECORDING_S, SLOWEST_S = 7200.0, 300.0
SHARES_PER_JOB = 4
FILE_S = 0.5
"""What the import of one more file of tests takes."""


@dataclass(frozen=True)
class Reaching:
    """What one test reaches: by file, the lines as bits; ``seconds`` is how long it took.

    starts: whether it starts real processes.
    """

    name: str
    has_passed: bool
    seconds: float
    starts: bool
    lines: dict[str, int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


class Recorder:
    """Plugin of pytest that writes what the tests of a process reach to ``output``."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._skipped: set[str] = set()
        self._starting: set[str] = set()
        self._lines: dict[str, dict[str, int]] = defaultdict(partial(defaultdict, int))

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """Let the processes of tests record, too; what conftest.py imports copies the variables."""
        self._source = Path.cwd() / SOURCE
        self._children = self._output.with_suffix(".children")
        self._children.mkdir()
        settings = self._output.with_suffix(".ini")
        settings.write_text(
            f"[run]\nsource = {self._source / 'gossipdp'}\ndata_file = {self._children / 'data'}\n"
            "parallel = true\nconcurrency = multiprocessing, thread\n"
            "disable_warnings = no-data-collected, trace-changed, module-not-imported\n"
        )
        os.environ["COVERAGE_PROCESS_START"] = str(settings)

    def pytest_configure(self) -> None:
        import coverage

        file, source = self._output.with_suffix(".sqlite"), [str(self._source / "gossipdp")]
        self._coverage = coverage.Coverage(data_file=str(file), config_file=False, source=source)
        self._coverage.set_option("run:disable_warnings", ["trace-changed"])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Put down what is reached to this test.

        Some tests set trace functions of their own, so the tracer begins anew with each.
        """
        if item.get_closest_marker("processes"):
            self._starting.add(item.nodeid)
        self._coverage.start()
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.stop()
            self._take_children(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)
        if report.skipped:
            self._skipped.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        data = self._coverage.get_data()
        for path in data.measured_files():
            for line, contexts in data.contexts_by_lineno(path).items():
                for name in contexts:
                    self._lines[name][self._file(path)] |= 1 << line
        tests = [
            Reaching(
                name,
                name not in self._failed,
                round(self._seconds[name], 3),
                name in self._starting,
                dict(self._lines[name]),
            )
            for name in sorted(self._seconds.keys() - self._skipped)
        ]
        self._output.write_text(json.dumps([asdict(test) for test in tests]))

    def _take_children(self, name: str) -> None:
        """Put down to a test what its processes have reached, as they have ended."""
        import coverage

        for path in self._children.glob("data.*"):
            data = coverage.CoverageData(str(path))
            with suppress(coverage.CoverageException):  # it was killed while it wrote
                data.read()
                for measured in data.measured_files():
                    for line in data.lines(measured) or ():
                        self._lines[name][self._file(measured)] |= 1 << line
            path.unlink(missing_ok=True)

    def _file(self, path: str) -> str:
        return Path(path).relative_to(self._source).as_posix()


class Chosen:
    """Plugin of pytest that runs these tests in this order.

    A fault may change the names of cases: one that ``known`` lacks runs where its test does.
    """

    def __init__(self, names: Sequence[str], known: Sequence[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        for name in reversed(names):
            self._places[name.partition("[")[0]] = self._places[name]
        self._known = frozenset(known)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, Any, Any]:
        """Choose and sort, when all others have."""
        result = yield
        places = {id(item): self._place(item.nodeid) for item in items}
        chosen = [item for item in items if places[id(item)] is not None]
        items[:] = sorted(chosen, key=lambda item: places[id(item)] or 0)
        return result

    def _place(self, name: str) -> int | None:
        if name in self._places or name in self._known:
            return self._places.get(name)
        return self._places.get(name.partition("[")[0])


class Record:
    """The tests that are recorded, by name."""

    def __init__(self, tests: Sequence[Reaching]) -> None:
        self._tests = sorted(tests, key=lambda test: test.name)

    def tests_for(self, fault: Fault) -> list[Reaching]:
        """Return those that reach a fault, the nearest first.

        They are those of one process, the unit tests of the same name before unit, property,
        simulation and integration; among equals the one that reaches the fewest lines. Lines at the
        top of a file run in whichever test imports it first, so all who reach a function of the
        file count.
        """
        file = COMPILED.get(fault.file, fault.file)
        if fault.is_in_function and file == fault.file:
            bits = _bits(*fault.lines)
        else:
            bits = _body_bits(file)
        found = [test for test in self._tests if test.has_passed and test.lines.get(file, 0) & bits]
        return sorted(found, key=lambda test: _distance(test, fault))

    def known_of(self, files: Sequence[str]) -> list[str]:
        return [test.name for test in self._tests if test.file in files]


def within(tests: Sequence[Reaching], seconds: float) -> list[Reaching]:
    """Return those of the tests, in their order, that fit into the time; at least the first.

    Those that start processes have as much time again.
    """
    chosen: list[Reaching] = []
    files: set[str] = set()
    left_s = {False: seconds, True: seconds}
    for test in tests:
        needed_s = test.seconds + (FILE_S if test.file not in files else 0.0)
        if not chosen or needed_s <= left_s[test.starts]:
            chosen.append(test)
            files.add(test.file)
            left_s[test.starts] -= needed_s
    return chosen


def files_of_tests(only: Sequence[str]) -> list[str]:
    """Return the files of tests, or those that are ``only`` or below it."""
    paths = [path for folder in FOLDERS for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    files = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    if not only:
        return files
    places = [Path(each) for each in only]
    return [file for file in files if any(Path(file).is_relative_to(place) for place in places)]


def record(files: Sequence[str], jobs: int) -> Record:
    """Return what the tests of these files reach; record what is not recorded yet."""
    tools = Path(__file__), Path(__file__).with_name("tested_copies.py")
    source = _digest(*tools, *sorted((ROOT / SOURCE / "gossipdp").rglob("*.py")))
    kept: dict[str, Any] = {"source": source, "files": {}}
    if RECORD.exists() and (last := json.loads(RECORD.read_text()))["source"] == source:
        kept = last
    digests = {file: _digest(ROOT / file) for file in files}
    new = [file for file in files if kept["files"].get(file, {}).get("digest") != digests[file]]
    if new:
        began = time.monotonic()
        print(f"recording which lines the tests of {len(new)} files reach", flush=True)
        number = min(len(new), SHARES_PER_JOB * jobs)
        shares = [new[start::number] for start in range(number)]
        with ThreadPoolExecutor(jobs) as pool:
            for share, found in zip(shares, pool.map(_recorded, shares), strict=True):
                for file in share:
                    own = [test for test in found if test["name"].partition("::")[0] == file]
                    kept["files"][file] = {"digest": digests[file], "tests": own}
                RECORD.parent.mkdir(parents=True, exist_ok=True)
                part = RECORD.with_suffix(".part")
                part.write_text(json.dumps(kept))
                part.replace(RECORD)
        print(f"recorded in {time.monotonic() - began:.0f} s: {RECORD}", flush=True)
    tests = [Reaching(**test) for file in files for test in kept["files"][file]["tests"]]
    for test in tests:
        if not test.has_passed:
            print(f"left out, since it does not pass without a fault: {test.name}")
    return Record(tests)


def _recorded(files: Sequence[str]) -> list[dict[str, Any]]:
    """Run the tests of these files and return their records."""
    with Copy() as root:
        output = root / "reached.json"
        code, text = run_tests(
            files,
            root,
            RECORDING_S,
            test_timeout_s=SLOWEST_S,
            options=MARKED,
            plugins=[Recorder(output)],
        )
        # After an error in one file while tests are collected pytest runs none of the others.
        if code not in (PASSED, FAILED, NO_TESTS) or not output.exists():
            sys.exit(f"not all was recorded (status {code}):\n{text}")
        if code == FAILED:
            print(text)
        tests: list[dict[str, Any]] = json.loads(output.read_text())
        return tests


@cache
def _body_bits(file: str) -> int:
    """Return the lines of all functions of a file of the library."""
    bits = 0
    for node in ast.walk(ast.parse((ROOT / SOURCE / file).read_text())):
        if isinstance(node, ast.FunctionDef):
            bits |= _bits(node.body[0].lineno, node.end_lineno or node.lineno)
    return bits


def _bits(first: int, last: int) -> int:
    return (1 << (last + 1)) - (1 << first)


def _distance(test: Reaching, fault: Fault) -> tuple[bool, bool, int, int, str]:
    file, source = Path(test.file), Path(fault.file)
    is_namesake = file.stem == f"test_{source.stem}" and file.parent.name == source.parent.name
    folder = FOLDERS.index(file.parts[1]) if file.parts[1] in FOLDERS else len(FOLDERS)
    num_lines = sum(bits.bit_count() for bits in test.lines.values())
    return test.starts, not is_namesake, folder, num_lines, test.name


def _digest(*paths: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
