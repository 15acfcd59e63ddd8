"""``make chaos``, second part: real workers under kill -9, stops, restarts, cut and dead links.

    .venv/bin/python tests/chaos/processes.py                  two minutes of faults, new each time
    .venv/bin/python tests/chaos/processes.py --seed 17 --seconds 40

The plan of faults follows from the seed, which is drawn unless it is given; both are printed, with
the command that runs them again.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import psutil
from broken_links import cut, drawn_link, keep_down

from gossipdp.errors import WorkerFailedError
from gossipdp.launcher.fault_plan import Clause, FaultPlan
from gossipdp.launcher.faults import NOT_BACK_YET, FaultInjector
from gossipdp.launcher.local import launch
from gossipdp.launcher.supervisor import Failure
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.log import worker_file
from gossipdp_lab.demo import training as demo_training
from gossipdp_lab.demo.options import DemoArguments
from gossipdp_lab.demo.training import (
    averaged_together,
    not_back,
    own_average_file,
    read_results,
    train_worker,
)
from gossipdp_lab.demo.watch import WorkerProgress, fault_results
from gossipdp_lab.report.run_log import RunLog, RunLogTail
from gossipdp_lab.tasks import make_workload

NUM_WORKERS = 6
# After the last fault, for the last restart and a little training.
QUIET_S = 10.0
# The time-out, and a second.
NOTICED_AFTER_S = 6.0
LATEST_NOTICE_S = 60.0  # how soon it was is printed: that depends on how busy the machine is
# From the end of training to the end of the run, on a busy machine.
PATIENCE_S = 60.0
SCRIPT = "tests/chaos/processes.py"
# Made once all who were killed train again. Nobody ends before: on a busy machine a process that is
# slow to import would find nobody left to join.
ALL_BACK = "all-back"


@dataclass(frozen=True)
class LinkFault:
    """A drawn link is down for so long; if ``for_s`` is None, its connections are cut, once."""

    at_s: float
    for_s: float | None = None

    def __str__(self) -> str:
        return f"link {f'down for {self.for_s:g}s' if self.for_s else 'cut'} at {self.at_s:g}s"


@dataclass(frozen=True)
class Plan:
    """The events of a run; times count from the first gradient steps."""

    seed: int
    faults: FaultPlan
    links: tuple[LinkFault, ...]
    duration_s: float

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.duration_s:g} s with {NUM_WORKERS} workers; to run it again:",
                f"    python {SCRIPT} --seed {self.seed} --seconds {self.duration_s:g}",
                *(f"    {fault}" for fault in (*self.faults.clauses, *self.links)),
            ]
        )


def draw_plan(seed: int, duration_s: float) -> Plan:
    """Faults every 2 to 4 seconds; at least half of the workers run at any moment.

    Rank 0 is killed first. Everybody who is killed comes back.
    """
    random = Random(seed)
    faults: list[Clause] = []
    links: list[LinkFault] = []
    away_until_s = dict.fromkeys(range(NUM_WORKERS), 0.0)
    at_s = 2.0
    while at_s < duration_s - QUIET_S:
        present = [rank for rank, until_s in away_until_s.items() if until_s <= at_s]
        kind = random.choice(["kill", "stop", "cut", "link"]) if faults else "kill"
        if kind == "cut":
            links.append(LinkFault(at_s))
        elif kind == "link":
            links.append(LinkFault(at_s, round(random.uniform(1, 8), 1)))
        elif len(present) > NUM_WORKERS // 2:
            rank = random.choice(present) if faults else 0
            longest_s = duration_s - QUIET_S - at_s
            for_s = None if kind == "kill" else round(min(random.uniform(1, 9), longest_s), 1)
            faults.append(Clause("kill" if kind == "kill" else "stop", rank, at_s, for_s=for_s))
            away_until_s[rank] = at_s + (for_s or 0.0) + 8
        at_s = round(at_s + random.uniform(2, 4), 1)
    return Plan(seed, FaultPlan(tuple(faults)), tuple(links), duration_s)


def train_until_all_are_back(arguments: DemoArguments, least_s: float) -> None:
    """Run the demo's worker until all who were killed train again, too."""
    until = demo_training._until

    def until_all_are_back(is_over: Callable[[], bool], loader: Any) -> Iterator[Any]:
        return until(lambda: is_over() and (arguments.directory / ALL_BACK).exists(), loader)

    demo_training._until = until_all_are_back
    train_worker(arguments, least_s, {})


@dataclass(frozen=True)
class Outcome:
    """The end of a run; ``problems`` lists what went wrong."""

    accuracy: float
    faults: list[dict[str, Any]]
    num_samples: int
    seconds: float
    problems: list[str]


def run_plan(plan: Plan | None, directory: Path, *, samples: int = 12_800) -> Outcome:
    """Train under a plan, or undisturbed, and look at everything that is left."""
    faults = plan.faults if plan else FaultPlan()
    arguments = DemoArguments(
        workers=NUM_WORKERS, graph="ring", samples=samples, output=directory / "run"
    )
    arguments.directory.mkdir(parents=True)
    temporary = directory / "tmp"
    temporary.mkdir()
    listening = _listening()
    workers = [WorkerProgress() for _ in range(NUM_WORKERS)]
    tails = [RunLogTail(worker_file(arguments.directory, rank)) for rank in range(NUM_WORKERS)]
    injector = FaultInjector(faults, NUM_WORKERS, seed=plan.seed if plan else 0)
    num_kills = sum(clause.kind == "kill" for clause in faults.clauses)
    problems: list[str] = []
    links, random = list(plan.links) if plan else [], Random(plan.seed if plan else 0)

    def break_link(fault: LinkFault) -> None:
        children = [each.pid for each in psutil.Process().children(recursive=True)]
        link = drawn_link(children, random)
        if link is None or (fault.for_s is None and not cut(*link)):
            problems.append(f"it was not done: {fault}")
        elif fault.for_s is not None:
            threading.Thread(target=keep_down, args=(*link, fault.for_s)).start()

    def poll() -> None:
        began_s = injector.first_step_s
        while links and began_s is not None and since_boot_s() >= began_s + links[0].at_s:
            break_link(links.pop(0))
        for worker, tail in zip(workers, tails, strict=True):
            for record in tail.read_new():
                worker.take(record)
        kills = [each for each in injector.records if each.kind == "kill"]
        killed = Counter(each.rank for each in kills if each.missed is None)
        all_back = all(worker.num_lives > killed[rank] for rank, worker in enumerate(workers))
        if len(kills) == num_kills and all_back:
            (arguments.directory / ALL_BACK).touch()

    def note(failure: Failure) -> None:
        if not failure.is_injected:
            problems.append(f"worker {failure.rank} {failure.ending.reason}")

    began = time.monotonic()
    try:
        launch(
            train_until_all_are_back,
            world_size=NUM_WORKERS,
            args=(arguments, plan.duration_s if plan else 0.0),
            environment={"TMPDIR": str(temporary)},
            timeout_s=(plan.duration_s if plan else 60.0) + PATIENCE_S,
            on_poll=poll,
            max_restarts=len(faults.clauses),
            on_failure=note,
            faults=injector,
        )
    except WorkerFailedError as error:
        problems.append(str(error))
    seconds = time.monotonic() - began
    # Who is slow to come back takes no fault meanwhile; not_back() judges it by the first one.
    missed = [each for each in injector.records if each.missed not in (None, NOT_BACK_YET)]
    problems += map(str, missed)
    run_log = RunLog.read(arguments.directory)
    faults = fault_results(injector.records, run_log)
    befallen = {each.rank for each in injector.records}
    problems += _taken_for_dead(run_log, befallen)
    results = read_results(run_log)
    together = averaged_together(results)
    if len(together) < NUM_WORKERS or {each.num_averaged for each in together} != {NUM_WORKERS}:
        found = [(each.rank, each.num_averaged, each.average_digest) for each in results]
        problems.append(f"not all workers hold one average of all: {found}")
    for log in run_log.workers.values():
        problems += [
            f"process {life.process_id} is left"
            for life in log.lives
            if psutil.pid_exists(life.process_id)
        ]
    if _listening() != listening:
        problems.append(f"ports are left: {_listening() - listening}")
    if list(temporary.iterdir()):
        problems.append(f"files are left: {list(temporary.iterdir())}")
    return Outcome(
        accuracy=_accuracy(own_average_file(arguments.directory, together[0].rank)),
        faults=faults,
        num_samples=sum(each.samples for each in results),
        seconds=seconds,
        problems=problems,
    )


def _taken_for_dead(run_log: RunLog, befallen: set[int]) -> list[str]:
    """Return deaths that a worker noticed while it trained, of others that were neither killed
    nor stopped: a link that is down is no death.

    After that processes end, and one that dials them may find them gone before it hears why.
    """
    found = []
    for witness, log in run_log.workers.items():
        # Not its last step record: one is written now and then while it waits for others, too.
        trained_s = log.consolidating.time_s if log.consolidating else log.last_s
        ended_s = log.start.started_s + trained_s
        found += [
            f"worker {witness} took worker {notice.rank} for dead, to which nothing was done"
            for notice in log.notices
            if notice.what == "lost" and notice.rank not in befallen and notice.at_s < ended_s
        ]
    return found


def _listening() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def _accuracy(path: Path) -> float:
    import torch

    workload = make_workload("digits")
    net = workload.make_model()
    net.load_state_dict(torch.load(path, weights_only=True))
    return workload.evaluate(net)


def late_notices(faults: Sequence[dict[str, Any]], kind: str, limit_s: float) -> list[str]:
    """Return who noticed a fault later than it should, or never."""
    return [
        f"worker {witness} noticed after {detected_s} s that worker {fault['rank']} was gone"
        for fault in faults
        if fault["kind"] == kind
        for witness, detected_s in fault["detected_s"].items()
        if detected_s is None or detected_s > limit_s
    ]


def late_stops(plan: Plan, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return who did not notice that a worker stood still for longer than the time-out."""
    stops = [clause for clause in plan.faults.clauses if clause.kind == "stop"]
    long_enough = [
        result
        for clause, result in zip(
            sorted(stops, key=lambda clause: clause.time_s),
            [result for result in results if result["kind"] == "stop"],
            strict=True,
        )
        if clause.for_s is not None and clause.for_s >= NOTICED_AFTER_S + 0.5
    ]
    return late_notices(long_enough, "stop", LATEST_NOTICE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, help="of the plan; default: drawn")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training under faults")
    arguments = parser.parse_args()
    seed = secrets.randbelow(10**9) if arguments.seed is None else arguments.seed
    plan = draw_plan(seed, arguments.seconds)
    print(plan, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        undisturbed = run_plan(None, Path(temporary, "undisturbed"))
        print(f"undisturbed: test accuracy {undisturbed.accuracy:.4f}", flush=True)
        outcome = run_plan(plan, Path(temporary, "faults"))
    problems = [*undisturbed.problems, *outcome.problems]
    problems += late_notices(outcome.faults, "kill", LATEST_NOTICE_S)
    problems += late_stops(plan, outcome.faults) + not_back(outcome.faults)
    if outcome.accuracy < undisturbed.accuracy - 0.01:
        problems.append(f"test accuracy {outcome.accuracy:.4f}, undisturbed more by over 0.01")
    for fault in outcome.faults:
        print(f"    {fault}")
    print(
        f"with faults: test accuracy {outcome.accuracy:.4f}, {outcome.num_samples:,} samples, "
        f"{outcome.seconds:.0f} s; {len(problems)} problems"
    )
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    if problems:
        command = [".venv/bin/python", SCRIPT, "--seed", str(plan.seed)]
        print("again: " + shlex.join([*command, "--seconds", f"{plan.duration_s:g}"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
