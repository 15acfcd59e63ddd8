"""Averages whose right result is known: each worker says what it brought to the average.

Exchanges move values between workers, so what a worker brings is known only while none is under
way. :func:`quietly` looks at a run that goes on: exchanges are held back meanwhile.
:func:`consolidate_what_is_kept` ends a run: all stand still, each makes what it holds its whole
state (pending and momentum are dropped), keeps a copy in a file, and consolidates.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from waiting import wait_until

from gossipdp import Consolidated, GossipDataParallel
from gossipdp.protocol.pairing import Idle

QUIET_S = 2.0
"""So long without an exchange anywhere, and a run stands still."""
PATIENCE_S = 300.0
ROUNDING = 2.0**-24  # of float32
DISTANCE_TOLERANCE = 1e-4
"""The relative error of float32 sums of millions of squares: the consensus distance is one."""

State = Mapping[str, Tensor]


# --- a run that goes on -------------------------------------------------------------------


def quietly(model: GossipDataParallel, meet: Callable[[str], None], look: Callable[[], Any]) -> Any:
    """Return what ``look`` finds while no worker exchanges; none trains meanwhile.

    ``meet`` waits for all workers that live, once for each word. Each worker first makes the
    exchanges that are due: if a proposal is withdrawn, the peer may have begun it, and it fails.
    """
    worker: Any = model._worker
    thread, loop, protocol = worker._thread, worker._loop, worker._protocol
    meet("trained")  # until then the others may need this one's exchanges

    def has_made_all() -> bool:
        pairing, is_due = protocol.pairing, protocol.clock.next_tick_at(loop.clock()) is not None
        return isinstance(pairing.state, Idle) and not (
            pairing.available and (is_due or pairing.backlog)
        )

    wait_until(lambda: thread.call(has_made_all).result(), "all exchanges that are due")
    meet("made")  # until then the others may need this one's answers
    thread.call(lambda: loop.perform(protocol.hold(loop.clock()))).result()
    meet("held")  # whatever is under way goes on to its end, and nothing follows it
    wait_until(
        lambda: thread.call(
            lambda: loop._exchange is None and isinstance(protocol.pairing.state, Idle)
        ).result(),
        "what is under way has ended",
    )
    found = look()
    meet("seen")
    thread.call(loop.release).result()
    return found


def z_of(model: GossipDataParallel) -> Tensor:
    """Return z of all that is averaged, in float64: what this worker would bring just now."""
    values = []
    for chunk in averaged_chunks(model):
        room = torch.empty(chunk.num_elements, dtype=chunk.pending.dtype)
        chunk.read_z(room)
        values.append(room)
    return torch.cat([each.double() for each in values])


def x_of(model: GossipDataParallel) -> Tensor:
    """Return the values that the module holds, in the order of :func:`z_of`."""
    return torch.cat([chunk.x for chunk in averaged_chunks(model)])


def averaged_chunks(model: GossipDataParallel) -> Any:
    """Return the chunks that are averaged, copied ones left out."""
    worker: Any = model._worker
    return worker._state.averaged_chunks


def assert_is_mean(average: Tensor, brought: list[Tensor]) -> None:
    """Assert that ``average`` is the rounded mean, whose sums were taken in float32 at least."""
    mean = torch.stack(brought).mean(dim=0)
    if average.dtype == torch.bfloat16:
        # A sum in float32 may end on the other side of a tie; one in bfloat16 is further off.
        last_digit = torch.exp2(torch.frexp(mean).exponent.double() - 8)
        error = (average.double() - mean).abs() / last_digit
        assert error.max() <= 0.51, f"a value is {error.max():.2f} of its last digit off"
        return
    torch.testing.assert_close(average.double(), mean, rtol=1e-6, atol=1e-6)


# --- the end of a run ---------------------------------------------------------------------


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

    wait_until(all_stand, f"{num_workers} workers stand still", longest_s=PATIENCE_S)
    state = {name: values.clone() for name, values in model.state_dict().items()}
    model.load_state_dict(state)
    unfinished = directory / f"unfinished-{model.rank}"
    torch.save(state, unfinished)
    os.replace(unfinished, directory / f"input-{model.rank}.pt")
    wait_until(
        lambda: len(list(directory.glob("input-*.pt"))) == num_workers,
        f"the inputs of {num_workers} workers are there",
        longest_s=PATIENCE_S,
    )
    return model.consolidate()


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
    """Return the ranks whose known steps do not fit the diaries of their lives.

    A life is (the fewest, the most) of its steps that the others may know. The last steps of a
    killed worker die with it; all steps of one that came to the end count.
    """
    problems = [f"steps of worker {rank}, which kept no diary" for rank in told.keys() - diaries]
    for rank, lives in diaries.items():
        least, most = (sum(each) for each in zip(*lives, strict=True))
        if not least <= told.get(rank, 0) <= most:
            problems.append(f"{told.get(rank, 0)} steps of worker {rank}, not {least} to {most}")
    return problems


def errors_in(lines: list[str]) -> list[str]:
    """Return the lines of a run's output that report an error.

    One error is not the run's: Python's own ``resource_sharer`` raises and prints it if a data
    loader's process is killed while it hands a descriptor over.
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
