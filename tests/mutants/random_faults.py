"""``make mutants RANDOM=N SEED=S``: how many of N random faults in the library the tests notice.

    make mutants RANDOM=400 SEED=7                               N faults of all packages
    make mutants RANDOM=30 SEED=7 ARGS="--packages dynamics"     of some packages
    make mutants RANDOM=30 SEED=7 ARGS="--only 4 --only 17"      the 4th and the 17th of them
    make mutants RANDOM=400 SEED=7 ARGS="--second"               who else kills them?
    make mutants-coverage                                        the record, and no more

The faults are drawn by :mod:`drawn_faults`. For each, the tests that reach its lines run in a
fresh copy of the tree, the nearest first, up to the first failure; :mod:`reached_lines` records
once which tests those are. A fault is killed if a test fails or hangs. Tests for which
``--seconds`` are too few are left out: a fault that survives "within the limit" may be killed by
one of them. A fault that no test reaches survives too. If a test with real processes kills a fault,
it runs once more without the fault: if it fails again, the fault counts as a survivor.

``equivalent.toml`` has the faults that were judged to change nothing that anybody could notice.
They are drawn, but neither run nor counted.

With ``--second`` each fault that was killed runs again, without the file of the test that killed
it. At the end stands, for each file of tests, how many faults die by it alone. A file with none,
over many faults, tests what others test too.

Of the tools that exist (mutmut, irradiate, cosmic-ray, poodle, pytest-gremlins, mutatest) some
leave out code that is decorated or outside functions, and some run all tests for each fault. None
swaps arguments, returns early, or drops a statement, a lock, a wait or a ``finally``.
"""

import argparse
import json
import random
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import reached_lines
from drawn_faults import Fault, draw
from reached_lines import MARKED, Chosen, Reaching, Record, within
from tested_copies import EQUIVALENT, PASSED, ROOT, SOURCE, Copy, first_failure, run_tests

RESULTS = ROOT / "runs/mutants"
# A fault may make tests slower; a test that takes so much longer than without it hangs.
SLOWER, LEAST_S = 5.0, 20.0
KILLED, LATE, SURVIVED, CUT = "killed", "killed (time-out)", "SURVIVED", "SURVIVED within the limit"
UNREACHED, EXEMPT = "SURVIVED unreached", "equivalent"
DOUBTFUL = "SURVIVED by doubt"
"""A test with real processes failed, with the fault and without."""


@dataclass(frozen=True)
class Equivalent:
    """An entry of ``equivalent.toml``, which has the form of a mutant."""

    file: str
    why: str
    old: str
    new: str

    def is_of(self, fault: Fault, text: str) -> bool:
        edited = text.replace(self.old, self.new)
        return fault.file == self.file and fault.apply(text) == edited


@dataclass(frozen=True)
class Outcome:
    """The fate of a fault: the verdict, what killed it, and how many tests reach it and ran."""

    number: int
    fault: Fault
    diff: str
    verdict: str
    by: str = ""
    reach: int = 0
    ran: int = 0
    seconds: float = 0.0

    @property
    def place(self) -> str:
        return f"{self.fault.file}:{self.fault.lines[0]}"


def load_equivalents(path: Path = EQUIVALENT) -> list[Equivalent]:
    return [
        Equivalent(file, why, **entry)
        for file, entries in tomllib.loads(path.read_text()).items()
        for why, entry in entries.items()
    ]


def read_texts(packages: Sequence[str] = (), root: Path = ROOT) -> dict[str, str]:
    """Return the files of the library to draw from, with their text."""
    source = root / SOURCE
    return {
        path.relative_to(source).as_posix(): path.read_text()
        for path in sorted((source / "gossipdp").rglob("*.py"))
        if not packages or path.relative_to(source).parts[1] in packages
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("number", type=int, help="faults to draw; 0: only record the lines")
    parser.add_argument("--seed", type=int, help="of the draw; the default is another at each time")
    parser.add_argument("--packages", default="", help="draw from these, with commas between")
    parser.add_argument("--tests", action="append", help="run these tests alone: files or folders")
    parser.add_argument("--only", type=int, action="append", help="this fault; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests for a fault, at most")
    parser.add_argument("--list", action="store_true", help="show the faults, and no more")
    parser.add_argument("--second", action="store_true", help="leave out the file that killed it")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    texts = read_texts(list(filter(None, arguments.packages.split(","))))
    if not texts:
        parser.error(f"no package of {arguments.packages} is in {SOURCE / 'gossipdp'}")
    faults = dict(enumerate(draw(arguments.number, seed, texts), start=1))
    if arguments.only:
        faults = {number: fault for number, fault in faults.items() if number in arguments.only}
    if arguments.list:
        for number, fault in faults.items():
            print(f"{number} {fault.kind}\n{fault.diff(texts[fault.file])}\n")
        return 0
    files = reached_lines.files_of_tests(arguments.tests or ())
    record = reached_lines.record(files, arguments.jobs)
    if not faults:
        return 0
    path = RESULTS / f"random-{arguments.number}-{seed}.json"
    killers: dict[int, str] = {}
    if arguments.second:
        if not path.exists():
            parser.error(f"--second needs {path.relative_to(ROOT)}: run the same without it first")
        killers = read_killers(path)
        faults = {number: fault for number, fault in faults.items() if number in killers}
        path = path.with_suffix(".second.json")
    began = time.monotonic()
    print(f"{len(faults)} faults by seed {seed}", flush=True)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        run_one = partial(run, record=record, seconds=arguments.seconds)
        jobs = [
            pool.submit(run_one, number, fault, texts[fault.file], without=killers.get(number, ""))
            for number, fault in faults.items()
        ]
        for job in jobs:
            outcomes.append(outcome := job.result())
            print(
                f"[{outcome.number:3}/{arguments.number}] {outcome.verdict:25} "
                f"{outcome.seconds:5.1f} s  {outcome.place} {outcome.fault.kind}  {outcome.by}",
                flush=True,
            )
    _write(outcomes, path, seed)
    show(outcomes, time.monotonic() - began)
    if arguments.second:
        show_killers(outcomes, killers)
    return 0


def read_killers(path: Path) -> dict[int, str]:
    """Return the file of the test that killed each fault, of an earlier run."""
    rows = json.loads(path.read_text())["faults"]
    return {row["number"]: row["by"].partition("::")[0] for row in rows if "::" in row["by"]}


def show_killers(outcomes: Sequence[Outcome], killers: Mapping[int, str]) -> None:
    """Print how many faults each file of tests killed, and how many of them no other kills."""
    alone = Counter(killers[each.number] for each in outcomes if each.verdict.startswith(SURVIVED))
    print("\nkilled  by it alone")
    for file, number in Counter(killers[each.number] for each in outcomes).most_common():
        print(f"{number:6}  {alone[file]:11}  {file}")


def run(
    number: int, fault: Fault, text: str, record: Record, *, seconds: float, without: str = ""
) -> Outcome:
    """Run the tests that reach a fault in a file with this text. without: a file of tests."""
    began = time.monotonic()
    diff = fault.diff(text)
    if any(each.is_of(fault, text) for each in load_equivalents()):
        return Outcome(number, fault, diff, EXEMPT)
    reaching = [test for test in record.tests_for(fault) if test.file != without]
    if not reaching:
        return Outcome(number, fault, diff, UNREACHED)
    chosen = within(reaching, seconds)
    run_them = partial(_run, record=record, file=fault.file, seconds=seconds)
    code, output = run_them(chosen, text=fault.apply(text))
    by, is_late = first_failure(output)
    killer = [test for test in chosen if test.name == by and test.starts]
    if code == PASSED:
        verdict, by = SURVIVED if len(chosen) == len(reaching) else CUT, ""
    elif killer and run_them(killer, text=text)[0] != PASSED:
        verdict = DOUBTFUL
    else:
        verdict, by = LATE if code is None or is_late else KILLED, by or f"status {code}"
    took = round(time.monotonic() - began, 1)
    return Outcome(number, fault, diff, verdict, by, len(reaching), len(chosen), took)


def _run(
    tests: Sequence[Reaching], *, record: Record, file: str, text: str, seconds: float
) -> tuple[int | None, str]:
    """Run tests, up to the first failure, in a copy of the tree in which a file has this text."""
    files = list(dict.fromkeys(test.file for test in tests))
    longest_s = max(test.seconds for test in tests)
    with Copy() as root:
        (root / SOURCE / file).write_text(text)
        return run_tests(
            files,
            root,
            SLOWER * (2 * seconds + longest_s) + LEAST_S,
            test_timeout_s=SLOWER * longest_s + LEAST_S,
            options=("-x", *MARKED),
            plugins=[Chosen([test.name for test in tests], record.known_of(files))],
        )


def show(outcomes: Sequence[Outcome], seconds: float) -> None:
    """Print what survived, then the score of each package."""
    for outcome in outcomes:
        if outcome.verdict.startswith(SURVIVED):
            print(
                f"\n{outcome.number}: {outcome.verdict}, {outcome.fault.kind}: {outcome.ran} of "
                f"{outcome.reach} tests that reach it ran\n{outcome.diff}"
            )
    survivors = [each.number for each in outcomes if each.verdict.startswith(SURVIVED)]
    if survivors:
        print(f'\nthese again: ARGS="{" ".join(f"--only {number}" for number in survivors)}"')
    print(f"\n{'package':14} {'killed':>6} {'of':>4} {'score':>6}  unreached  cut  equivalent")
    packages = sorted({outcome.fault.package for outcome in outcomes})
    for package in [*packages, "all"]:
        here = [each for each in outcomes if package in (each.fault.package, "all")]
        number = Counter(each.verdict for each in here)
        killed, counted = number[KILLED] + number[LATE], len(here) - number[EXEMPT]
        score = f"{100 * killed / counted:5.1f}%" if counted else "-"
        print(
            f"{package:14} {killed:6} {counted:4} {score:>6}  {number[UNREACHED]:9}  "
            f"{number[CUT]:3}  {number[EXEMPT]:10}"
        )
    num_cut = sum(outcome.ran < outcome.reach for outcome in outcomes)
    print(f"{seconds:.0f} s; for {num_cut} faults tests were left out, to stay within the limit")


def _write(outcomes: Sequence[Outcome], path: Path, seed: int) -> None:
    """Write all outcomes, with the commit that they are of."""
    words = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    rows = [
        asdict(each) | {"package": each.fault.package, "place": each.place} for each in outcomes
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"seed": seed, "commit": commit.stdout.strip(), "faults": rows}, indent=1)
    path.write_text(text)
    print(f"\nwritten: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
