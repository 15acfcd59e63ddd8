"""``make mutants``: whether the tests notice faults that are put into the library on purpose.

    make mutants                                  every mutant of the catalogue
    make mutants ARGS="--only 'away in one go'"   those with these words; may be repeated
    make mutants ARGS="--list"                    what each stands for

A mutant is an entry of a ``*.toml`` file beside this one, which has one file for each package::

    ["gossipdp/dynamics/phase.py"."What is wrong, in one sentence."]
    old = '''text that is there exactly once'''
    new = '''text that takes its place'''
    tests = ["tests/unit/dynamics/test_phase.py::test_that_must_fail"]

First all named tests are run as they are, and must pass. Then each mutant is made in a fresh copy
of the tree, and its own tests are run there: it is killed if one of them fails. It survives if all
pass; if they cannot even be run, such as by an error at import, that is an error of the catalogue.
"""

import argparse
import re
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tested_copies
from tested_copies import ROOT, SOURCE, Copy, first_failure, run_tests

# All tests of one mutant may take this long.
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Mutant:
    """One entry of the catalogue; see the module."""

    package: str
    file: str
    stands_for: str
    old: str
    new: str
    tests: list[str]

    def problem(self) -> str | None:
        """Return why it is out of step with the tree, None where it is not."""
        path = ROOT / SOURCE / self.file
        if not path.is_file():
            return f"there is no {SOURCE / self.file}"
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            return f"its old text occurs {count} times in {SOURCE / self.file}, not once"
        if self.old == self.new:
            return "it changes nothing"
        compile(text.replace(self.old, self.new), self.file, "exec")
        if not self.tests:
            return "no test is to kill it"
        for test in self.tests:
            file, *names = re.sub(r"\[.*", "", test).split("::")
            if not (ROOT / file).is_file():
                return f"there is no {file}"
            for name in names:
                if not re.search(rf"^\s*(def|class) {name}\b", (ROOT / file).read_text(), re.M):
                    return f"there is no {name} in {file}"
        return None


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
    return [
        Mutant(path.stem, file, stands_for, **entry)
        for path in sorted(set(tested_copies.HERE.glob("*.toml")) - {tested_copies.EQUIVALENT})
        for file, entries in tomllib.loads(path.read_text()).items()
        for stands_for, entry in entries.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", action="append", metavar="WORDS", help="may be repeated")
    parser.add_argument("--list", action="store_true", help="what each stands for, and no more")
    arguments = parser.parse_args()
    asked = arguments.only or [""]
    mutants = [each for each in load() if any(words in each.stands_for for words in asked)]
    for words in asked:
        if not any(words in mutant.stands_for for mutant in mutants):
            parser.error(f"no mutant has the words '{words}'; --list shows all")
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.file}: {mutant.stands_for}")
        return 0
    problems = [(each.stands_for, found) for each in mutants if (found := each.problem())]
    for stands_for, found in problems:
        print(f"'{stands_for}' is out of step with the code: {found}")
    if problems:
        return 1
    began = time.monotonic()
    outcomes = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        if not _pass_unmutated(mutants, pool, arguments.jobs):
            return 1
        for number, outcome in enumerate(pool.map(_run, mutants), start=1):
            outcomes.append(outcome)
            count = f"[{number:{len(str(len(mutants)))}}/{len(mutants)}]"
            print(f"{count} {outcome.verdict:17} {outcome.seconds:5.1f} s", end="  ")
            print(f"{outcome.mutant.file}: {outcome.mutant.stands_for}\n    {outcome.by}")
            sys.stdout.flush()
    _show(outcomes, time.monotonic() - began)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _show(outcomes: Sequence[Outcome], seconds: float) -> None:
    """Print how many of each package were killed, and which were not."""
    print()
    for package in dict.fromkeys(outcome.mutant.package for outcome in outcomes):
        here = [outcome for outcome in outcomes if outcome.mutant.package == package]
        print(f"{package:14} {sum(each.is_good for each in here):3} of {len(here)} killed")
    bad = [outcome.mutant for outcome in outcomes if not outcome.is_good]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} mutants killed in {seconds:.0f} s")
    for mutant in bad:
        print(f"not killed: {mutant.file}: {mutant.stands_for}")


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
    for code, output in runs:
        if code != tested_copies.PASSED:
            print(f"these tests must pass without any mutant:\n{output}")
            return False
    print(f"{len(tests)} tests pass unmutated, in {time.monotonic() - began:.0f} s", flush=True)
    return True


def _run(mutant: Mutant) -> Outcome:
    began = time.monotonic()
    with Copy() as root:
        path = root / SOURCE / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        code, output = run_tests(mutant.tests, root, TIMEOUT_S)
    seconds = time.monotonic() - began
    if code == tested_copies.PASSED:
        return Outcome(mutant, "SURVIVED", "", seconds)
    failed, is_late = first_failure(output)
    if code != tested_copies.FAILED or not failed:
        return Outcome(mutant, "ERROR", output, seconds)
    return Outcome(mutant, "killed (time-out)" if is_late else "killed", failed, seconds)


if __name__ == "__main__":
    sys.exit(main())
