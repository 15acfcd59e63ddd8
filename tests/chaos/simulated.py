"""``make chaos``, first part: the real protocol under random faults, on a virtual clock.

    .venv/bin/python tests/chaos/simulated.py                     1,000 schedules
    .venv/bin/python tests/chaos/simulated.py --schedules 100 --first 5000
    .venv/bin/python tests/chaos/simulated.py --seed 17           one, shown; --log: every action

A schedule that breaks an invariant is printed with the command that runs it again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gossipdp.simulate.batch import run_all
from gossipdp.simulate.fault_draws import draw_schedule
from gossipdp.simulate.fault_run import Outcome, run_schedule

SCRIPT = Path(__file__).resolve().relative_to(Path(__file__).resolve().parents[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--largest", type=int, default=64, help="most workers at first")
    parser.add_argument("--processes", type=int, help="default: one a core")
    parser.add_argument("--seed", type=int, help="run this one alone, and show it")
    parser.add_argument("--log", action="store_true", help="with --seed: show every action")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _replay(arguments.seed, arguments.largest, is_logged=arguments.log)
    seeds = range(arguments.first, arguments.first + arguments.schedules)
    tasks = [(seed, arguments.largest) for seed in seeds]
    began = time.monotonic()
    columns = (TextColumn("schedules"), BarColumn(), "{task.percentage:>5.1f}%")
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

        outcomes = run_all(
            _run,
            tasks,
            processes=arguments.processes,
            costs=[_cost(*task) for task in tasks],
            on_progress=show,
        )
    return _report(outcomes, time.monotonic() - began)


def _run(task: tuple[int, int], progress: object) -> Outcome:
    seed, largest = task
    outcome = run_schedule(draw_schedule(seed, largest=largest))
    if outcome.broken:
        _explain(outcome, largest)  # here and now, from whatever process this is
    return outcome


def _cost(seed: int, largest: int) -> float:
    return float(draw_schedule(seed, largest=largest).num_workers) ** 2


def _report(outcomes: list[Outcome], took_s: float) -> int:
    failed = [outcome for outcome in outcomes if outcome.broken]
    sizes = Counter(outcome.num_workers for outcome in outcomes)
    print(f"{len(outcomes)} schedules in {took_s:.0f} s, workers: {dict(sorted(sizes.items()))}")
    print(
        f"{sum(outcome.num_inputs for outcome in outcomes)} inputs checked, "
        f"{sum(outcome.num_exchanges for outcome in outcomes)} exchanges, "
        f"{sum(outcome.num_torn for outcome in outcomes)} torn, "
        f"{sum(outcome.num_refreshed for outcome in outcomes)} took over parameters"
    )
    seeds = ", ".join(str(outcome.seed) for outcome in failed)
    print(f"{len(failed)} broke an invariant{': seeds ' + seeds if seeds else ''}")
    return 1 if failed else 0


def _explain(outcome: Outcome, largest: int) -> None:
    print(f"\nFAILED: {outcome.details}\n{draw_schedule(outcome.seed, largest=largest)}")
    again = f"{sys.executable} {SCRIPT} --seed {outcome.seed} --largest {largest} --log"
    print(f"again: {again}", flush=True)


def _replay(seed: int, largest: int, *, is_logged: bool) -> int:
    schedule = draw_schedule(seed, largest=largest)
    print(schedule)
    outcome = run_schedule(schedule, log=print if is_logged else None)
    print(outcome)
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
