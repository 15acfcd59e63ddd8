"""``make mutants``: whether the tests notice faults that are put into the library on purpose.

    make mutants                                    every mutant of the catalogue
    make mutants ARGS="--only stall-without-a-cap"  one of them; may be repeated
    make mutants ARGS="--list"                      what each stands for

A mutant is an entry of a ``*.toml`` file beside this one, which has one file for each package::

    [its-name]
    stands_for = "What is wrong, in one sentence."
    file = "gossipdp/dynamics/phase.py"
    old = '''text that is there exactly once'''
    new = '''text that takes its place'''
    tests = ["tests/unit/dynamics/test_phase.py::test_that_must_fail"]

First all named tests are run as they are, and must pass. Then each mutant is made in a fresh copy
of the tree, and its own tests are run there: it is killed if one of them fails. It survives if all
pass; if they cannot even be run, such as by an error at import, that is an error of the catalogue.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tested_copies
from tested_copies import ROOT, SOURCE, Copy, first_failure, run_tests

# All tests of one mutant may take this long.
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Mutant:
    """One entry of the catalogue; see the module."""

    name: str
    package: str
    stands_for: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problem(self, root: Path = ROOT) -> str | None:
        """Return why it is out of step with the tree, None where it is not."""
        path = root / SOURCE / self.file
        if not path.is_file():
            return f"there is no {SOURCE / self.file}"
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            return f"its old text occurs {count} times in {SOURCE / self.file}, not once"
        if self.old == self.new:
            return "it changes nothing"
        compile(text.replace(self.old, self.new), self.name, "exec")
        if not self.tests:
            return "no test is to kill it"
        for test in self.tests:
            file, *names = re.sub(r"\[.*", "", test).split("::")
            if not (root / file).is_file():
                return f"there is no {file}"
            for name in names:
                if not re.search(rf"^\s*(def|class) {name}\b", (root / file).read_text(), re.M):
                    return f"there is no {name} in {file}"
        return None

    def apply(self, root: Path) -> None:
        """Make it in a copy of the tree."""
        path = root / SOURCE / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


@dataclass(frozen=True)
class Outcome:
    """The fate of a mutant: ``killed``, ``killed (time-out)``, ``SURVIVED`` or ``ERROR``."""

    mutant: Mutant
    verdict: str
    by: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.verdict.startswith("killed")


def load() -> list[Mutant]:
    mutants: list[Mutant] = []
    for path in sorted(set(tested_copies.HERE.glob("*.toml")) - {tested_copies.EQUIVALENT}):
        for name, entry in tomllib.loads(path.read_text()).items():
            tests = tuple(entry.pop("tests"))
            mutants.append(Mutant(name=name, package=path.stem, tests=tests, **entry))
    return mutants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--list", action="store_true", help="what each stands for, and no more")
    arguments = parser.parse_args()
    mutants = load()
    unknown = set(arguments.only or ()) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"no mutant {', '.join(sorted(unknown))}; --list names all")
    mutants = [each for each in mutants if not arguments.only or each.name in arguments.only]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.package + '/' + mutant.name:55} {mutant.stands_for}")
        return 0
    problems = [(each.name, found) for each in mutants if (found := each.problem())]
    for name, found in problems:
        print(f"{name} is out of step with the code: {found}")
    if problems:
        return 1
    began = time.monotonic()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        if not _pass_unmutated(mutants, pool, arguments.jobs):
            return 1
        outcomes = []
        for number, outcome in enumerate(pool.map(_run, mutants), start=1):
            outcomes.append(outcome)
            count = f"[{number:{len(str(len(mutants)))}}/{len(mutants)}]"
            print(f"{count} {outcome.verdict:17} {outcome.seconds:5.1f} s  {outcome.mutant.name}")
            if not outcome.is_good:
                print(outcome.by)
            sys.stdout.flush()
    _show(outcomes, time.monotonic() - began)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _show(outcomes: Sequence[Outcome], seconds: float) -> None:
    """Print what killed each, then how many of each package were."""
    print()
    for outcome in outcomes:
        by = outcome.by if outcome.is_good else "-"
        print(f"{outcome.mutant.package:12} {outcome.mutant.name:44} {outcome.verdict:17} {by}")
    print()
    for package in dict.fromkeys(outcome.mutant.package for outcome in outcomes):
        here = [outcome for outcome in outcomes if outcome.mutant.package == package]
        print(f"{package:12} {sum(each.is_good for each in here):3} of {len(here)} killed")
    bad = [outcome.mutant.name for outcome in outcomes if not outcome.is_good]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} mutants killed in {seconds:.0f} s")
    if bad:
        print(f"not killed: {', '.join(bad)}")


def _pass_unmutated(mutants: Sequence[Mutant], pool: ThreadPoolExecutor, jobs: int) -> bool:
    """Say whether all the tests pass as long as nothing is wrong."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    began = time.monotonic()
    # By files, so that none is imported twice.
    files = sorted({test.partition("::")[0] for test in tests})
    shares = [
        [test for test in tests if test.partition("::")[0] in files[job::jobs]]
        for job in range(jobs)
    ]
    with Copy() as root:
        runs = list(pool.map(lambda share: run_tests(share, root, 10 * TIMEOUT_S), shares))
    for share, (code, output) in zip(shares, runs, strict=True):
        if share and code != tested_copies.PASSED:
            print(f"these tests must pass without any mutant:\n{output}")
            return False
    print(f"{len(tests)} tests pass unmutated, in {time.monotonic() - began:.0f} s", flush=True)
    return True


def _run(mutant: Mutant) -> Outcome:
    began = time.monotonic()
    with Copy() as root:
        mutant.apply(root)
        code, output = run_tests(mutant.tests, root, TIMEOUT_S)
    seconds = time.monotonic() - began
    if code == tested_copies.PASSED:
        return Outcome(mutant, "SURVIVED", f"    {mutant.stands_for}", seconds)
    failed, is_late = first_failure(output)
    if code != tested_copies.FAILED or not failed:
        return Outcome(mutant, "ERROR", output, seconds)
    return Outcome(mutant, "killed (time-out)" if is_late else "killed", failed, seconds)


if __name__ == "__main__":
    sys.exit(main())
