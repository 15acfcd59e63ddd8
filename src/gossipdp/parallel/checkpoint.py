"""The checkpoints of a run: their format, and the state from which a run goes on.

Read on in :mod:`.checkpoint_files` (one file, whole or absent), :mod:`.packing` (the training state
in it) and :mod:`.checkpointer` (the moments at which a worker saves). One file a worker and step:

    DIRECTORY/worker-RANK/step-NNNNNNNN.safetensors

A file holds ``model/NAME`` (the module's parameters, with what exchanges brought and the next step
adds, and its persistent buffers; float32 where the module has 16 bits), ``c/NAME`` (the momentum),
and the training state: its layout and its tensors by number; in its metadata its :class:`Facts`.

**The rule.** If as many workers start as have saved, each goes on from its own newest whole file,
bit for bit. If their number differs, all of them start from one mean over the newest whole files of
all workers, with c = 0; so does a worker that has no file. Optimizer states
are never averaged: a worker takes the one in its own file, or, without a file, another worker's.

A worker that died long before its run ended left a checkpoint of the point where it died. A run
that resumes from it, or averages it with the others', is thrown back. So each checkpoint names the
lives that had ended by then, and a checkpoint of a life that a newer one calls ended is passed
over. A worker that was taken for dead by mistake, or started again, goes on under a higher
incarnation: its later checkpoints are not of the life that ended.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from gossipdp.dynamics.chunks import working_dtype
from gossipdp.launcher.environment import Environment
from gossipdp.logs import OF_RUN
from gossipdp.parallel import packing
from gossipdp.parallel.checkpoint_files import (
    DamagedFileError,
    in_use,
    read_metadata,
    read_tensors,
)
from gossipdp.parallel.options import Checkpoints
from gossipdp.parallel.shards import Replica
from gossipdp.protocol.actions import Notice
from gossipdp.protocol.members import Member, ProgressEntry, Status

logger = logging.getLogger("gossipdp")

FORMAT = "gossipdp checkpoint 7"
_FILE_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_DIRECTORY_NAME = re.compile(r"worker-(\d+)")

ENDS_WITHIN_S = 10.0
"""The longest time from the end of a run's first worker, if the whole run is ended, until the last
one is asked to end."""
BEFORE_THIS_RUN = -1
"""In place of an incarnation: the lives that a rank had before its run was last resumed."""

EndedLife: TypeAlias = tuple[int, int]
"""A rank, and the highest of its incarnations that have ended."""
Layout: TypeAlias = dict[str, str]
"""Type and shape of every tensor of a model, by name."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about a checkpoint, as JSON in its metadata.

    ``step`` numbers this worker's gradient steps and names the file; ``steps`` and ``samples`` are
    this worker's own, in all of its lives. ``progress`` holds every life that it knew of, which
    together make the progress of the run. ``run_id`` and ``incarnation`` name the life that saved,
    and ``ended`` those that it knew to have ended. ``num_means`` counts how often the run has
    started from a mean; a worker that joins does not know it and says 0. ``base`` is the digest of
    the frozen base, which no file holds; "" if there is none.
    """

    rank: int
    world_size: int
    step: int
    steps: int
    samples: int
    progress: tuple[ProgressEntry, ...]
    gossipdp: str
    run_id: str
    incarnation: int = 0
    ended: tuple[EndedLife, ...] = ()
    num_means: int = 0
    base: str = ""


# Of this module, so that the importing thread builds the types: see observe/status.py.
_decode_facts = msgspec.json.Decoder(Facts).decode


class Counts(NamedTuple):
    """A worker's counts; see :class:`Facts`."""

    step: int = 0
    steps: int = 0
    samples: int = 0


# One file.


def file_path(directory: Path, rank: int, step: int) -> Path:
    return directory / f"worker-{rank}" / f"step-{step:08d}.safetensors"


def encode(
    tensors: Mapping[str, Tensor], facts: Facts, state: Any
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file; those of ``state`` are copied."""
    layout, flats = packing.pack(state)
    training = {f"training/{n}": flat.to("cpu", copy=True) for n, flat in enumerate(flats)}
    training["training/layout"] = torch.frombuffer(bytearray(layout), dtype=torch.uint8)
    metadata = {"format": FORMAT, "facts": msgspec.json.encode(facts).decode()}
    return {**tensors, **training}, metadata


def read(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read a whole file: the tensors by kind and name, as ``c/NAME``, and the training state."""
    tensors, _ = read_tensors(path)
    # Out of the file's memory map, which lasts as long as a tensor of it does.
    training = {
        name: tensors.pop(name).clone() for name in list(tensors) if name.startswith("training/")
    }
    numbers = itertools.count()
    try:
        layout = training["training/layout"].numpy().tobytes()
        state = packing.unpack(layout, lambda _: training[f"training/{next(numbers)}"])
        return tensors, state
    except (ValueError, KeyError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error


# A directory.


def saved_steps(directory: Path, rank: int) -> list[int]:
    """Return the steps of one worker's files by their names, the newest first."""
    paths = (directory / f"worker-{rank}").glob("step-*.safetensors")
    names = (_FILE_NAME.fullmatch(path.name) for path in paths)
    return sorted((int(name[1]) for name in names if name), reverse=True)


def saved_by(directory: Path, rank: int, *, warns: bool = True) -> list[Facts]:
    """Return the facts of one worker's files that can be read, the newest first."""
    found = []
    for step in saved_steps(directory, rank):
        try:
            found.append(_facts(file_path(directory, rank, step)))
        except DamagedFileError as error:
            if warns:
                logger.warning("a checkpoint is passed over: %s", error)
    return found


def _facts(path: Path) -> Facts:
    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT:
        raise DamagedFileError(
            f"{path} is of format {metadata.get('format')!r}, and this version reads {FORMAT!r}: "
            "go on with the version that wrote it, or move it away"
        )
    try:
        return _decode_facts(metadata.get("facts", ""))
    except msgspec.MsgspecError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error


def saved_in(directory: Path) -> dict[int, list[Facts]]:
    """Return the facts of all workers' files by rank, the newest first.

    Those from before the run last started from a mean are left out: they are in that mean.
    """
    names = (_DIRECTORY_NAME.fullmatch(path.name) for path in directory.glob("worker-*"))
    ranks = sorted(int(name[1]) for name in names if name)
    by_rank = {rank: saved_by(directory, rank) for rank in ranks}
    every = [facts for saved in by_rank.values() for facts in saved]
    latest = max((facts.num_means for facts in every), default=0)
    run_ids = {facts.run_id for facts in every if facts.num_means == latest}
    return {
        rank: counted
        for rank, saved in by_rank.items()
        if (counted := [facts for facts in saved if facts.run_id in run_ids])
    }


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a module's tensors by their own names, in the precision of a file."""
    return {
        name: f"{str(working_dtype(tensor.dtype)).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
    }


# Files that the run has left behind.


def ended_lives(
    members: Iterable[Member], notices: Iterable[Notice], now_s: float
) -> tuple[EndedLife, ...]:
    """Return the lives that ended more than ``ENDS_WITHIN_S`` ago, as one worker knows them.

    When a whole run is ended, the workers that save last have seen the others die: such deaths do
    not count.

    Args:
        notices: what it noticed, oldest first.
        now_s: the time, on the notices' clock, or when this worker was asked to end; infinity after
            the average, which is complete without the dead.
    """
    died_s = {notice.rank: notice.at_s for notice in notices if notice.kind == "lost"}
    return tuple(
        (member.rank, incarnation)
        for member in members
        if (incarnation := member.incarnation - (member.status is not Status.DEAD)) >= 0
        and now_s - died_s.get(member.rank, -math.inf) >= ENDS_WITHIN_S
    )


def outlived(newest: Mapping[int, Facts]) -> set[int]:
    """Return the ranks whose newest checkpoint is of a life that the run has outlived."""
    return {
        rank
        for rank, facts in newest.items()
        if any(
            _run_samples(other) > _run_samples(facts)
            and _is_ended(facts, other)
            # Two halves of a cut network call each other dead; both trained on, and both count.
            and not (facts.run_id == other.run_id and _is_ended(other, facts))
            for other in newest.values()
        )
    }


def _run_samples(facts: Facts) -> int:
    return sum(entry.samples for entry in facts.progress)


def _is_ended(facts: Facts, other: Facts) -> bool:
    """Return whether ``other``, of the same run or a later one, says that its life ended."""
    if facts.run_id != other.run_id:
        return any(rank == facts.rank for rank, _ in other.ended)
    return any(rank == facts.rank and facts.incarnation <= last for rank, last in other.ended)


# Going on.


@dataclass
class Resumption:
    """The state from which a worker starts when its run goes on.

    Attributes:
        num_means: goes into the files of this run; see :class:`Facts`.
        base: the digest of the frozen base on which the files were trained.
        start: says how the run starts, for all workers to compare.
        counts: those from which this worker goes on.
        progress: the lives that count in the run's progress.
        tensors: by kind and name, as ``model/NAME``; see the module.
        training: the training state, until the first step.
        is_own: whether this worker goes on with its own share of the data.
        ended: goes into the files of this run: the lives of earlier runs that have ended.
    """

    num_means: int
    base: str
    start: str
    counts: Counts
    progress: tuple[ProgressEntry, ...]
    tensors: dict[str, Tensor]
    training: Any
    is_own: bool
    ended: tuple[EndedLife, ...]


def find_resumption(
    saving: Checkpoints, layout: Layout, averaged: Collection[str], replica: Replica
) -> Resumption | None:
    r"""Return the state from which a worker starts, by this module's rule; None: a fresh start.

    The one mean, in rank order, so that all workers have the same bits, is

    .. math:: z = \frac1n \sum_j (x_j + c_j/2),

    which exchanges conserve. A fresh optimizer state would not do: AdamW's first steps are as large
    as the learning rate in every element.

    All processes of a replica go on from one step: a process that was killed may have written one
    checkpoint more, or less, than the others.

    Args:
        saving: says where this process saves, and from where it goes on.
        layout: of this worker's model.
        averaged: the names in it of what workers average; all else comes from one file.
        replica: of this process, with its rank in the run that starts now.

    Raises:
        ValueError: there is nothing where there should be, the directory holds another run's
            checkpoints, or they are of another model.
        DamagedFileError: all checkpoints are damaged, or of another version.
        RefusedError: another run is alive in the directory.
    """
    directory = None if saving.directory is None else Path(saving.directory)
    newest_step = math.inf
    # A run that lives would remove files meanwhile, so it is looked for; this one has no name yet.
    with contextlib.nullcontext() if directory is None else in_use(directory, ""):
        while True:
            found = _find(saving, layout, averaged, replica.environment, newest_step)
            (steps,) = replica.gather(-1 if found is None else found.counts.step)
            if len(set(steps)) == 1:
                return found
            newest_step = min(steps)


def _find(
    saving: Checkpoints,
    layout: Layout,
    averaged: Collection[str],
    environment: Environment,
    newest_step: float,
) -> Resumption | None:
    """Return the state from which this worker starts, of ``newest_step`` at the latest."""
    place = saving.directory if saving.resume == "auto" else saving.resume
    source = None if place is None else Path(place)
    by_rank = _files_to_go_on_from(saving, source)
    if source is None or by_rank is None:
        return None
    rank, first = environment.rank, next(iter(by_rank.values()))[0]
    is_same_number = environment.world_size == first.world_size
    num_means = max(facts.num_means for saved in by_rank.values() for facts in saved)
    if is_same_number and rank in by_rank:
        by_rank[rank] = [facts for facts in by_rank[rank] if facts.step <= newest_step]
        if not by_rank[rank]:
            raise ValueError(
                f"worker {rank} has no checkpoint in {source} of step {newest_step:g} or before, "
                "where another process of its replica has its newest: start afresh in another "
                "directory"
            )
    newest = {each: saved[0] for each, saved in by_rank.items()}
    left_behind = sorted(outlived(newest))
    for each in left_behind:
        logger.warning(
            "%s is passed over: its worker died while the others went on",
            file_path(source, each, newest[each].step),
            extra=OF_RUN,
        )
    ranks = sorted(by_rank.keys() - left_behind)
    missing = sorted(set(range(first.world_size)).difference(ranks))
    if missing:
        logger.warning(
            "no checkpoint of %s %s: the average of the others stands in",
            "worker" if len(missing) == 1 else "workers",
            ", ".join(map(str, missing)),
            extra=OF_RUN,
        )
    # Its own file, or that of its rank modulo their number, or the next one that is whole.
    turn = ranks.index(rank) if rank in ranks else rank % len(ranks)
    for base in ranks[turn:] + ranks[:turn]:
        if good := _newest_good(source, base, by_rank[base], layout):
            break
    else:
        raise DamagedFileError(f"no checkpoint in {source} is whole")
    facts, tensors, training = good
    step, is_own = facts.step, is_same_number and base == rank
    used = [facts]
    if not is_own:
        goods = (
            good if each == base else _newest_good(source, each, by_rank[each], layout)
            for each in ranks
        )
        tensors, used = _mean_of_z(tensors, averaged, (each for each in goods if each))
        # The files that it will write must be the newest.
        step = int(min(newest_step, max(each.step for each in newest.values())))
    logger.info("worker %d resumes from worker %d's step %d in %s", rank, base, facts.step, source)
    return Resumption(
        num_means=num_means + (not is_same_number),
        base=facts.base,
        start=f"from {'' if is_same_number else 'the mean of '}checkpoints of {first.world_size} "
        "workers",
        counts=Counts(step, facts.steps, facts.samples) if base == rank else Counts(step),
        progress=_progress(newest | {each.rank: each for each in used}, ranks),
        tensors=tensors,
        training=training,
        is_own=is_own,
        # One that had joined goes on in no run of as many as began: its file is of the past.
        ended=tuple(
            (each, BEFORE_THIS_RUN)
            for each in sorted(by_rank)
            if each in left_behind or (is_same_number and each >= first.world_size)
        ),
    )


def warn_of_older(known_samples: Mapping[int, int]) -> None:
    """Name the workers whose checkpoints know of less than 0.9 of the newest one's samples.

    It happens if hosts that share no directory stopped at different times.
    """
    newest = max(known_samples, key=known_samples.__getitem__)
    most = known_samples[newest]
    older = [f"worker {rank}'s of {n:,}" for rank, n in known_samples.items() if n < 0.9 * most]
    if older:
        logger.warning(
            "older checkpoints pull the newer ones back: that of worker %d knows of %s samples of "
            "the run, %s. To drop the older ones, stop the run, put a copy of the folder worker-%d "
            "in their place, and start again",
            newest,
            f"{most:,}",
            ", ".join(older),
            newest,
            extra=OF_RUN,
        )


def _files_to_go_on_from(saving: Checkpoints, source: Path | None) -> dict[int, list[Facts]] | None:
    """Return the readable files of ``source`` by rank; None for a fresh start."""
    directory = None if saving.directory is None else Path(saving.directory)
    goes_on_there = (
        source is not None and directory is not None and source.resolve() == directory.resolve()
    )
    if directory is not None and not goes_on_there and _holds_files(directory):
        raise ValueError(
            f"{str(directory)!r} holds checkpoints of another run; go on from them with "
            "resume='auto', or choose another directory"
        )
    if source is None:
        return None
    if by_rank := saved_in(source):
        return by_rank
    if _holds_files(source):
        raise DamagedFileError(f"no checkpoint in {source} is whole")
    if saving.resume == "auto":
        return None
    what = "holds no checkpoint" if source.is_dir() else "is no directory"
    raise ValueError(
        f"resume={str(source)!r} {what}: name the directory of the run to go on from (here it is "
        f"{str(source.absolute())!r}), or leave resume out to start afresh; with a directory of "
        "one's own, resume='auto' does either"
    )


def _holds_files(directory: Path) -> bool:
    return any(directory.glob("worker-*/step-*.safetensors"))


def _progress(known: Mapping[int, Facts], alive: Collection[int]) -> tuple[ProgressEntry, ...]:
    """Return the progress of every process; for its own, the record of a rank that goes on counts.

    Others may have heard of steps that it made after its checkpoint: these are lost, and it makes
    them again.
    """
    own = {
        (entry.rank, entry.process_id)
        for rank in alive
        for entry in known[rank].progress
        if entry.rank == rank
    }
    return tuple(
        entry
        for rank, facts in sorted(known.items())
        for entry in facts.progress
        if entry.rank == rank or (entry.rank, entry.process_id) not in own
    )


def _newest_good(
    source: Path, rank: int, candidates: Iterable[Facts], layout: Layout
) -> tuple[Facts, dict[str, Tensor], Any] | None:
    """Read the newest file of one worker that is whole."""
    for facts in candidates:
        path = file_path(source, rank, facts.step)
        try:
            tensors, training = read(path)
        except DamagedFileError as error:
            logger.warning("%s; the checkpoint before it is taken, if there is one", error)
            continue
        names = [name for name in tensors if name.startswith("model/")]
        found = layout_of({name.removeprefix("model/"): tensors[name] for name in names})
        for name in sorted(found | layout):
            there, here = (each.get(name, "absent or frozen") for each in (found, layout))
            if there != here:
                raise ValueError(
                    f"{path} is of another model: {name!r} is {there} there and {here} here"
                )
        return facts, tensors, training
    return None


@torch.no_grad()
def _mean_of_z(
    base: Mapping[str, Tensor],
    averaged: Collection[str],
    files: Iterable[tuple[Facts, Mapping[str, Tensor], Any]],
) -> tuple[dict[str, Tensor], list[Facts]]:
    """Average z = x + c/2 over files, one at a time; take what is not averaged from the base.

    Return with it the facts of all that are in it.
    """
    kept = {name: tensor for name, tensor in base.items() if name.startswith("model/")}
    sums = {
        name: torch.zeros_like(tensor, dtype=torch.float64)
        for name, tensor in kept.items()
        if name.removeprefix("model/") in averaged
    }
    used = []
    for facts, tensors, _ in files:
        used.append(facts)
        for name, total in sums.items():
            for kind, share in (("model", 1.0), ("c", 0.5)):
                part = tensors.get(name.replace("model", kind, 1))
                if part is not None:
                    total.add_(part, alpha=share)
    mean = {name: (total / len(used)).to(kept[name].dtype) for name, total in sums.items()}
    return kept | mean, used
