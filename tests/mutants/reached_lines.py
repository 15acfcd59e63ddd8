"""Which tests reach which lines of the library: recorded by coverage.py, a context for each test.

The record lies in ``runs/mutants``. It is of one state of ``src``: after another, all is recorded
anew. Of the tests only files that have changed are.
"""

import ast
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawn_faults import Fault
from tested_copies import PASSED, ROOT, SOURCE, Copy, run_tests

FOLDERS = ("unit", "property", "simulation", "integration")
"""Those of the tests that are recorded, the nearest to a line first."""
RECORD = ROOT / "runs/mutants/reached_lines.json"
COMPILED = {"gossipdp/dynamics/update_loops.py": "gossipdp/dynamics/machine_code.py"}
"""Files that run as machine code, which no tracer sees, with the files that call them."""
MARKED = ("-m", "not processes and not long")
"""The tests that are recorded and run: the tracer does not see other processes."""
# So long may a share of the tests take while the tracer runs, and one of them.
RECORDING_S, SLOWEST_S = 7200.0, 300.0
SHARES_PER_JOB = 4
FILE_S = 0.5
"""What the import of one more file of tests takes."""


@dataclass(frozen=True)
class Reaching:
    """What one test reaches: by file, the lines as bits; ``seconds`` is how long it took."""

    name: str
    has_passed: bool
    seconds: float
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

    def pytest_configure(self) -> None:
        import coverage

        self._source = Path.cwd() / SOURCE
        file, source = self._output.with_suffix(".sqlite"), [str(self._source / "gossipdp")]
        self._coverage = coverage.Coverage(data_file=str(file), config_file=False, source=source)
        self._coverage.set_option("run:disable_warnings", ["trace-changed"])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Put down what is reached to this test.

        Some tests set trace functions of their own, so the tracer begins anew with each.
        """
        self._coverage.start()
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.stop()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)
        if report.skipped:
            self._skipped.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        data = self._coverage.get_data()
        names = self._seconds.keys() - self._skipped
        lines: dict[str, dict[str, int]] = {name: defaultdict(int) for name in sorted(names)}
        for path in data.measured_files():
            file = Path(path).relative_to(self._source).as_posix()
            for line, contexts in data.contexts_by_lineno(path).items():
                for name in lines.keys() & contexts:
                    lines[name][file] |= 1 << line
        tests = [
            Reaching(name, name not in self._failed, round(self._seconds[name], 3), dict(reached))
            for name, reached in lines.items()
        ]
        self._output.write_text(json.dumps([asdict(test) for test in tests]))


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

        They are the unit tests of the same name, then unit before property, simulation and
        integration; among equals the one that reaches the fewest lines. Lines at the top of a file
        run in whichever test imports it first, so all who reach a function of the file count.
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
    """Return those of the tests, in their order, that fit into the time; at least the first."""
    chosen: list[Reaching] = []
    files: set[str] = set()
    for test in tests:
        needed_s = test.seconds + (FILE_S if test.file not in files else 0.0)
        if not chosen or needed_s <= seconds:
            chosen.append(test)
            files.add(test.file)
            seconds -= needed_s
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
    source = _digest(*sorted((ROOT / SOURCE / "gossipdp").rglob("*.py")))
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
        if not output.exists():
            sys.exit(f"nothing was recorded (status {code}):\n{text}")
        if code != PASSED:
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


def _distance(test: Reaching, fault: Fault) -> tuple[bool, int, int, str]:
    file, source = Path(test.file), Path(fault.file)
    is_namesake = file.stem == f"test_{source.stem}" and file.parent.name == source.parent.name
    folder = FOLDERS.index(file.parts[1]) if file.parts[1] in FOLDERS else len(FOLDERS)
    num_lines = sum(bits.bit_count() for bits in test.lines.values())
    return not is_namesake, folder, num_lines, test.name


def _digest(*paths: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
