"""A run's end whose right result is known: each worker's input to the average is in a file.

Exchanges move values between workers, so what a worker holds is its input only once all stand
still: then each makes what it holds its whole state (pending and momentum are dropped), keeps a
copy, and takes part in ``consolidate()``.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gossipdp import Consolidated, GossipDataParallel

# Without an exchange anywhere before a run counts as standing still.
QUIET_S = 2.0
PATIENCE_S = 300.0
ROUNDING = 2.0**-24  # of float32
# Sums in float32 of millions of squares, of which the consensus distance is made.
DISTANCE_TOLERANCE = 1e-4

State = Mapping[str, Tensor]


def consolidate_what_is_kept(
    model: GossipDataParallel, directory: Path, num_workers: int
) -> Consolidated:
    """Stand still with the others, keep this worker's input in ``directory``, and consolidate.

    All ``num_workers`` that are in the run call it, and make no step any more.
    """
    mark = directory / f"stands-{model.rank}"
    seen = -1

    def all_stand() -> bool:
        nonlocal seen
        if (exchanges := model.stats().exchanges) != seen:
            seen = exchanges
            mark.write_text(str(exchanges))
        marks = list(directory.glob("stands-*"))
        newest_s = max(each.stat().st_mtime for each in marks)
        return len(marks) == num_workers and time.time() - newest_s > QUIET_S

    _wait_until(all_stand, f"{num_workers} workers to stand still")
    state = {name: values.clone() for name, values in model.state_dict().items()}
    model.load_state_dict(state)
    unfinished = directory / f"unfinished-{model.rank}"
    torch.save(state, unfinished)
    os.replace(unfinished, directory / f"input-{model.rank}.pt")
    _wait_until(
        lambda: len(list(directory.glob("input-*.pt"))) == num_workers,
        f"the inputs of {num_workers} workers",
    )
    return model.consolidate()


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")
        time.sleep(0.05)


def inputs_in(directory: Path) -> dict[int, State]:
    """Return what each worker kept, by rank."""
    paths = directory.glob("input-*.pt")
    return {int(path.stem.split("-")[1]): torch.load(path, weights_only=True) for path in paths}


def wrong_average(inputs: Mapping[int, State], average: State) -> list[str]:
    """Return what of ``average`` is not the mean of the inputs, computed in float64.

    However n float32 values are summed, the mean is off by no more than n roundings of the mean of
    their sizes. Integers are those of the lowest rank.
    """
    problems = []
    lowest = inputs[min(inputs)]
    for name, found in average.items():
        if not found.is_floating_point():
            if not torch.equal(found, lowest[name]):
                problems.append(f"{name} is {found}, of worker {min(inputs)} {lowest[name]}")
            continue
        values = torch.stack([state[name].double() for state in inputs.values()])
        off = (found.double() - values.mean(dim=0)).abs()
        allowed = len(inputs) * ROUNDING * values.abs().mean(dim=0)
        if bool((off > allowed).any()) or not bool(found.isfinite().all()):
            share = float((off > allowed).double().mean())
            problems.append(f"{name}: {share:.0%} are not the mean, by up to {float(off.max()):g}")
    return problems


def squared_distance(inputs: Mapping[int, State], names: Sequence[str]) -> float:
    """Return the consensus distance of these parameters: (1/n) Σ ‖x_i - mean‖², in float64."""
    total = 0.0
    for name in names:
        values = torch.stack([state[name].double() for state in inputs.values()])
        total += float((values - values.mean(dim=0)).square().sum()) / len(inputs)
    return total


def wrong_end(
    inputs: Mapping[int, State],
    averages: Mapping[int, State],
    ends: Mapping[int, Consolidated],
    names: Sequence[str],
) -> list[str]:
    """Return what is wrong with a run's end: values, bits, counts, the distance.

    ``names`` are those of the trained parameters.
    """
    problems = [
        f"worker {rank} averaged {end.world_size} workers, not {len(inputs)}"
        for rank, end in ends.items()
        if end.world_size != len(inputs)
    ]
    if not (inputs.keys() == averages.keys() == ends.keys()) or not inputs:
        problems.append(f"{len(inputs)} inputs, {len(averages)} averages, {len(ends)} ends")
        return problems
    first = averages[min(averages)]
    for rank, average in averages.items():
        unlike = [name for name in first if not torch.equal(average[name], first[name])]
        if unlike:
            problems.append(f"worker {rank} holds other bits than {min(averages)} in {unlike}")
    problems += wrong_average(inputs, first)
    if len({(end.samples, end.gradient_steps) for end in ends.values()}) > 1:
        counts = {rank: (end.samples, end.gradient_steps) for rank, end in ends.items()}
        problems.append(f"workers count unlike samples and steps: {counts}")
    expected = squared_distance(inputs, names)
    for rank, end in ends.items():
        if not math.isclose(end.consensus_distance, expected, rel_tol=DISTANCE_TOLERANCE):
            problems.append(
                f"worker {rank} tells a consensus distance of {end.consensus_distance:g}, and it "
                f"is {expected:g}"
            )
    return problems


def wrong_steps(
    told: Mapping[int, int], diaries: Mapping[int, Sequence[tuple[int, int]]]
) -> list[str]:
    """Return of which ranks the steps told do not fit the diaries of their lives.

    A life is (the fewest, the most) of its steps that the others may know: of a killed one the last
    ones die with it, of one that came to the end all count.
    """
    problems = [f"steps of worker {rank}, which kept no diary" for rank in told.keys() - diaries]
    for rank, lives in diaries.items():
        least, most = (sum(each) for each in zip(*lives, strict=True))
        if not least <= told.get(rank, 0) <= most:
            problems.append(f"{told.get(rank, 0)} steps of worker {rank}, not {least} to {most}")
    return problems


def errors_in(lines: list[str]) -> list[str]:
    """Return the lines of a run's output that tell of an error.

    One error is no worker's: a data loader whose worker is killed in the moment in which it hands
    a descriptor over prints what Python's own ``resource_sharer`` then raises.
    """
    found, is_of_sharer = [], False
    for line in lines:
        if "Traceback (most recent call last)" in line:
            is_of_sharer = False
        is_of_sharer |= "multiprocessing/resource_sharer.py" in line
        if ("Error" in line or "Too many open files" in line) and not is_of_sharer:
            found.append(line)
        if "Error" in line:
            is_of_sharer = False
    return found
