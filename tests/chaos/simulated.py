"""``make chaos``, first part: the real protocol under random faults, on a virtual clock.

    .venv/bin/python tests/chaos/simulated.py                     1,000 schedules, new each time
    .venv/bin/python tests/chaos/simulated.py --schedules 100 --first 5000
    .venv/bin/python tests/chaos/simulated.py --seed 17           one, shown; --log: every action
    .venv/bin/python tests/chaos/simulated.py --ending 7          one frame of consolidation
    .venv/bin/python tests/chaos/simulated.py --adversary 17      one in which a worker lies

The first seed is drawn and printed. After the random schedules the link, the sender and the
receiver of each of the first 120 frames of consolidation are lost in turn. Then, in 200 schedules,
one of eight workers lies.

A schedule that breaks an invariant is printed with the command that runs it again.
"""

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from simulated_faults.adversary import Cost, draw_adversary, run_adversary
from simulated_faults.draws import draw_schedule
from simulated_faults.run import Outcome, run_schedule
from simulated_faults.schedule import EndingFault, EndingKind, FaultSchedule

from gossipdp_lab.simulate.study import run_all

NUM_FRAMES = 120
NUM_ADVERSARIES = 200
SCRIPT = Path(__file__).resolve().relative_to(Path(__file__).resolve().parents[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, help="the first seed; default: drawn, and printed")
    parser.add_argument("--adversaries", type=int, default=NUM_ADVERSARIES, help="how many")
    parser.add_argument("--largest", type=int, default=64, help="most workers at first")
    parser.add_argument("--processes", type=int, help="default: one a core")
    parser.add_argument("--seed", type=int, help="run this one alone, and show it")
    parser.add_argument("--ending", type=int, help="lose this frame of consolidation, and show it")
    parser.add_argument("--adversary", type=int, help="run this one alone, and show it")
    parser.add_argument("--log", action="store_true", help="with --seed: show every action")
    arguments = parser.parse_args()
    log, largest = print if arguments.log else None, arguments.largest
    if arguments.adversary is not None:
        adversary = draw_adversary(arguments.adversary)
        print(adversary)
        cost = run_adversary(adversary, log)
        print(cost)
        return 1 if cost.broken else 0
    if arguments.seed is not None:
        seeds, frames = range(arguments.seed, arguments.seed + 1), range(0)
    elif arguments.ending is not None:
        seeds, frames = range(0), range(arguments.ending, arguments.ending + 1)
    else:
        first = secrets.randbelow(10**9) if arguments.first is None else arguments.first
        print(f"schedules from --first {first} on", flush=True)
        seeds = range(first, first + arguments.schedules)
        frames = range(NUM_FRAMES)
    tasks = [
        *(
            _Task(f"--seed {seed} --largest {largest}", draw_schedule(seed, largest=largest))
            for seed in seeds
        ),
        *(_Task(f"--ending {frame}", schedule) for frame in frames for schedule in _lost(frame)),
    ]
    if len(seeds) + len(frames) == 1:
        return max(_replay(task, log) for task in tasks)
    began = time.monotonic()
    costs = [float(task.schedule.num_workers) ** 2 for task in tasks]
    outcomes = _run_all("schedules", _run, tasks, costs, arguments.processes)
    broken = _report(outcomes, time.monotonic() - began)
    liars = [seeds.start + number for number in range(arguments.adversaries)]
    began = time.monotonic()
    prices = _run_all("adversaries", _run_liar, liars, [1.0] * len(liars), arguments.processes)
    return max(broken, _report_liars(liars, prices, time.monotonic() - began))


def _run_all(
    label: str,
    function: Callable[[Any, object], Any],
    tasks: Sequence[Any],
    costs: Sequence[float],
    processes: int | None,
) -> list[Any]:
    """Run every task over processes, with a bar, or a line at each tenth."""
    began = time.monotonic()
    columns = (TextColumn(label), BarColumn(), "{task.percentage:>5.1f}%")
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        shown = bar.add_task("", total=1.0)
        tenths = iter(range(1, 11))
        tenth = next(tenths)

        def show(share: float) -> None:
            nonlocal tenth
            bar.update(shown, completed=share)
            while not bar.console.is_terminal and share >= tenth / 10:
                print(f"{tenth * 10}% after {time.monotonic() - began:.0f} s", flush=True)
                tenth = next(tenths, 100)

        return run_all(function, tasks, processes=processes, costs=costs, on_progress=show)


def _run_liar(seed: int, progress: object) -> Cost:
    cost = run_adversary(draw_adversary(seed))
    if cost.broken:
        print(f"\nFAILED: {cost.broken}\n{draw_adversary(seed)}")
        print(f"again: {sys.executable} {SCRIPT} --adversary {seed} --log", flush=True)
    return cost


def _report_liars(seeds: list[int], prices: list[Cost], took_s: float) -> int:
    if not prices:
        return 0
    failed = [seed for seed, cost in zip(seeds, prices, strict=True) if cost.broken]
    print(
        f"{len(prices)} schedules in which one of eight lies, in {took_s:.0f} s: honest workers "
        f"paused for {max(cost.pause_s for cost in prices):.2f} s at most and left within "
        f"{max(cost.end_s for cost in prices):.1f} s (virtual; the time-out is 1 s), held "
        f"{max(cost.num_items for cost in prices):,} items and sent "
        f"{max(cost.messages_per_s for cost in prices):.0f} messages/s at most"
    )
    print(f"{len(failed)} were stopped or had to pay too much{f': {failed}' if failed else ''}")
    return 1 if failed else 0


@dataclass(frozen=True)
class _Task:
    again: str  # the arguments that run it again
    schedule: FaultSchedule


def _lost(frame: int) -> list[FaultSchedule]:
    kinds: tuple[EndingKind, ...] = get_args(EndingKind)
    endings = [EndingFault(frame, kind) for kind in kinds]
    return [FaultSchedule(seed=frame, faulty_s=2.0, ending=(ending,)) for ending in endings]


def _run(task: _Task, progress: object) -> Outcome:
    outcome = run_schedule(task.schedule)
    if outcome.broken:  # here and now, from whatever process this is
        print(f"\nFAILED: {outcome.details}\n{task.schedule}")
        print(f"again: {sys.executable} {SCRIPT} {task.again} --log", flush=True)
    return outcome


def _report(outcomes: list[Outcome], took_s: float) -> int:
    failed = [outcome for outcome in outcomes if outcome.broken]
    sizes = Counter(outcome.num_workers for outcome in outcomes)
    print(f"{len(outcomes)} schedules in {took_s:.0f} s, workers: {dict(sorted(sizes.items()))}")
    print(
        f"{sum(outcome.num_inputs for outcome in outcomes)} inputs checked, "
        f"{sum(outcome.num_exchanges for outcome in outcomes)} exchanges, "
        f"{sum(outcome.num_torn for outcome in outcomes)} torn, "
        f"{sum(outcome.num_taken_over for outcome in outcomes)} joined; the hungriest "
        f"demand waited {max(outcome.hungriest_s for outcome in outcomes):.2f} s (virtual)"
    )
    seeds = ", ".join(str(outcome.seed) for outcome in failed)
    print(f"{len(failed)} broke an invariant{': seeds ' + seeds if seeds else ''}")
    return 1 if failed else 0


def _replay(task: _Task, log: Callable[[str], None] | None) -> int:
    print(task.schedule)
    outcome = run_schedule(task.schedule, log=log)
    print(outcome)
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
