"""Checkpoints of a run: one file a worker and step, and how a run goes on from them.

    DIRECTORY/worker-RANK/step-NNNNNNNN.safetensors

A file holds ``model/NAME`` (the module's parameters and persistent buffers), ``c/NAME`` (the
momentum), ``pending/NAME`` (what exchanges brought and the next step adds, where there is any),
``outer_g/NAME`` and ``outer_m/NAME`` (with an outer step: the optimizer's steps since the last one,
and its momentum), and the tensors of the training state by number; in its metadata its
:class:`Facts` and the skeleton of the training state.

A worker that died long before its run ended left a checkpoint of the point where it died. A run
that resumes from it, or averages it with the others', is thrown back. So each checkpoint says which
lives had ended by then, and one of a life that a newer checkpoint calls ended is passed over.

- A death of the last ``GRACE_S`` says nothing: when a whole run is ended (SIGTERM, a power cut),
  the workers that save last have seen the others die.
- Two halves of a cut network call each other dead; both trained on, and both count.
- A worker taken for dead by mistake, or started anew, goes on under a higher incarnation: what it
  saves then is not of the life that ended.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.gossip.snapshot import Notice
from gossipdp.parallel import skeleton
from gossipdp.parallel.checkpoint_files import DamagedFileError, read_metadata, read_tensors
from gossipdp.protocol.members import Member, ProgressEntry, Status

logger = logging.getLogger("gossipdp")

FORMAT = "gossipdp checkpoint 4"
_FILE_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_DIRECTORY_NAME = re.compile(r"worker-(\d+)")

GRACE_S = 10.0
"""From the first to the last worker of a run that is ended: at most a step, a save, a time-out."""
BEFORE_THIS_RUN = -1
"""In place of an incarnation: the lives that a rank had before its run was last resumed."""

PathLike: TypeAlias = str | os.PathLike[str]
EndedLife: TypeAlias = tuple[int, int]
"""A rank, and the highest of its incarnations that have ended."""
Layout: TypeAlias = dict[str, str]
"""Type and shape of every tensor of a model, by name."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint says of itself, as JSON in its metadata.

    ``generation`` counts the numbers of workers that the run has had: files of a lower one were
    merged into those of the next. ``step`` numbers this worker's gradient steps and names the
    file; ``steps`` and ``samples`` are what this worker has done itself, in all of its lives.
    ``progress`` holds every life that it knew of, which together make the progress of the run.
    ``run_id`` and ``incarnation`` name the life that saved, and ``ended`` those that it knew to
    have ended; allreduce has but one life a rank. ``outer`` is the outer step, in words.
    """

    rank: int
    world_size: int
    generation: int
    method: str
    step: int
    steps: int
    samples: int
    progress: tuple[ProgressEntry, ...]
    gossipdp: str
    run_id: str = ""
    incarnation: int = 0
    ended: tuple[EndedLife, ...] = ()
    outer: str = ""


class Counts(NamedTuple):
    """What a worker has counted; see :class:`Facts`."""

    step: int = 0
    steps: int = 0
    samples: int = 0


class Captured(NamedTuple):
    """One worker's part of a checkpoint, copied at one moment; see :class:`Facts`."""

    tensors: dict[str, Tensor]
    progress: tuple[ProgressEntry, ...]
    incarnation: int = 0
    ended: tuple[EndedLife, ...] = ()


class Saved(NamedTuple):
    """One file and what it says of itself."""

    path: Path
    facts: Facts


# One file.


def file_path(directory: Path, rank: int, step: int) -> Path:
    """Where worker ``rank`` saves its step ``step``."""
    return directory / f"worker-{rank}" / f"step-{step:08d}.safetensors"


def encode(
    tensors: Mapping[str, Tensor], facts: Facts, state: Any
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file; those of ``state`` are copied.

    Raises:
        ValueError: ``state`` holds something that cannot be saved.
    """
    text, flats = skeleton.pack(state)
    training = {f"training/{n}": flat.to("cpu", copy=True) for n, flat in enumerate(flats)}
    metadata = {
        "format": FORMAT,
        "facts": msgspec.json.encode(facts).decode(),
        "training": text.decode(),
    }
    return {**tensors, **training}, metadata


def read(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read a file: the tensors by kind and name, as ``c/NAME``; the training state.

    Raises:
        DamagedFileError: its content is not what was written.
    """
    tensors, metadata = read_tensors(path)
    # Out of the file's memory map, which lasts as long as a tensor of it does.
    training = {
        int(name.removeprefix("training/")): tensors.pop(name).clone()
        for name in list(tensors)
        if name.startswith("training/")
    }
    try:
        described = skeleton.decode(metadata.get("training", "").encode())
        return tensors, described.unpack([training[n] for n in sorted(training)])
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error


def _facts(path: Path) -> Facts:
    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT:
        raise DamagedFileError(f"{path} is no checkpoint: its format is not {FORMAT!r}")
    try:
        return msgspec.json.decode(metadata.get("facts", ""), type=Facts)
    except msgspec.MsgspecError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error


# A directory.


def saved_by(directory: Path, rank: int, *, warns: bool = False) -> list[Saved]:
    """Return the files of one worker that can be read, the newest first."""
    saved = []
    for path in (directory / f"worker-{rank}").glob("step-*.safetensors"):
        if not _FILE_NAME.fullmatch(path.name):
            continue
        try:
            saved.append(Saved(path, _facts(path)))
        except DamagedFileError as error:
            if warns:
                logger.warning("a checkpoint is passed over: %s", error)
    return sorted(saved, key=lambda each: (each.facts.generation, each.facts.step), reverse=True)


def saved_in(directory: Path, *, warns: bool = False) -> dict[int, list[Saved]]:
    """Return the files of all workers of the latest generation, by rank, the newest first."""
    names = (_DIRECTORY_NAME.fullmatch(path.name) for path in directory.glob("worker-*"))
    ranks = sorted(int(name[1]) for name in names if name)
    by_rank = {rank: saved for rank in ranks if (saved := saved_by(directory, rank, warns=warns))}
    latest = max((saved[0].facts.generation for saved in by_rank.values()), default=0)
    return {
        rank: [each for each in saved if each.facts.generation == latest]
        for rank, saved in by_rank.items()
        if saved[0].facts.generation == latest
    }


def generation_after(by_rank: Mapping[int, Sequence[Saved]], world_size: int) -> int:
    """The generation of what ``world_size`` workers save that go on from such files."""
    if not by_rank:
        return 1
    facts = next(iter(by_rank.values()))[0].facts
    return facts.generation + (world_size != facts.world_size)


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a module's tensors by their own names."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
    }


# Which files the run has left behind.


def ended_lives(
    members: Iterable[Member], notices: Iterable[Notice], now_s: float
) -> tuple[EndedLife, ...]:
    """Return the lives that ended more than ``GRACE_S`` ago, as one worker knows them.

    Args:
        members: its view.
        notices: what it noticed, oldest first.
        now_s: the time, on the notices' clock.
    """
    died_s = {notice.rank: notice.at_s for notice in notices if notice.kind == "dead"}
    return tuple(
        (member.rank, incarnation)
        for member in members
        if (incarnation := member.incarnation - (member.status is not Status.DEAD)) >= 0
        and now_s - died_s.get(member.rank, -math.inf) >= GRACE_S
    )


def outlived(newest: Mapping[int, Facts]) -> set[int]:
    """Return the ranks whose newest checkpoint is of a life that the run has outlived."""
    return {
        rank
        for rank, facts in newest.items()
        if any(
            _run_samples(other) > _run_samples(facts)
            and _is_ended(facts, other)
            # Not where two halves of one run call each other dead.
            and not (facts.run_id == other.run_id and _is_ended(other, facts))
            for other in newest.values()
        )
    }


def _run_samples(facts: Facts) -> int:
    return sum(entry.samples for entry in facts.progress)


def _is_ended(facts: Facts, other: Facts) -> bool:
    """Whether ``other``, of the same run or one that went on from it, says that its life ended."""
    if facts.run_id != other.run_id:
        return any(rank == facts.rank for rank, _ in other.ended)
    return any(rank == facts.rank and facts.incarnation <= last for rank, last in other.ended)


# Going on.


@dataclass
class Resumption:
    """What a worker starts from when its run goes on.

    Attributes:
        directory: of the checkpoints.
        generation: of those that this run will write.
        start: a text for all workers to compare: how the run starts.
        counts: from which this worker goes on.
        progress: every life to be counted in.
        tensors: by kind and name, as ``model/NAME``; see the module.
        training: the training state.
        is_own: whether this worker goes on with its own share of the data.
        ended: for what this run saves: the lives of earlier runs that have ended.
    """

    directory: Path
    generation: int
    start: str
    counts: Counts
    progress: tuple[ProgressEntry, ...]
    tensors: dict[str, Tensor]
    training: Any
    is_own: bool
    ended: tuple[EndedLife, ...]


def find_resumption(
    resume: PathLike | None,
    directory: Path | None,
    *,
    rank: int,
    world_size: int,
    method: str,
    layout: Layout,
    outer: str = "",
    newest_step: float = math.inf,
) -> Resumption | None:
    """Return what a run starts from; None for a fresh start.

    Args:
        resume: ``"auto"``, a directory of checkpoints, or None.
        directory: where this run saves.
        rank, world_size: of this worker, and of the run that starts now.
        method, layout: of the run that starts now, and of this worker's model.
        outer: the outer step of the run that starts now, in words; empty without one.
        newest_step: of this worker's own files those of later steps are left alone.

    Raises:
        ValueError: there is nothing where there should be, ``directory`` holds another run's
            checkpoints, or they are of another model or method.
        DamagedFileError: all checkpoints are damaged.
    """
    source = directory if resume == "auto" else None if resume is None else Path(resume)
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
    by_rank = saved_in(source, warns=True)
    own = [saved for saved in by_rank.get(rank, ()) if saved.facts.step <= newest_step]
    if own:
        by_rank[rank] = own
    elif rank in by_rank:
        raise ValueError(
            f"worker {rank} has no checkpoint in {source} of step {newest_step:g} or before, where "
            "another process of its replica has its newest: start afresh in another directory"
        )
    if by_rank:
        is_synchronous = method == "allreduce"
        return _resume(
            source,
            _of_one_step(source, by_rank) if is_synchronous else by_rank,
            rank=rank,
            world_size=world_size,
            is_synchronous=is_synchronous,
            layout=layout,
            outer=outer,
        )
    if _holds_files(source):
        raise DamagedFileError(f"no checkpoint in {source} is whole")
    if resume == "auto":
        return None
    what = "holds no checkpoint" if source.is_dir() else "is no directory"
    raise ValueError(
        f"resume={str(source)!r} {what}: name the directory of the run to go on from (here it is "
        f"{str(source.absolute())!r}), or leave resume out to start afresh; with a directory of "
        "one's own, resume='auto' does either"
    )


def _holds_files(directory: Path) -> bool:
    """Whether there are checkpoints, be they whole or not."""
    return any(directory.glob("worker-*/step-*.safetensors"))


def _of_one_step(source: Path, by_rank: Mapping[int, Sequence[Saved]]) -> dict[int, list[Saved]]:
    """For allreduce: keep the files of the newest step that all workers have whole."""
    method = next(iter(by_rank.values()))[0].facts.method
    if method != "allreduce":
        raise ValueError(
            f"the checkpoints in {source} are of method {method!r}, whose workers differ: "
            "method='allreduce' cannot go on from them. Start it from the average that "
            "save_averaged() writes"
        )
    steps = [{each.facts.step: each for each in saved} for saved in by_rank.values()]
    for step in sorted(set.intersection(*map(set, steps)), reverse=True):
        of_step = [saved[step] for saved in steps]
        try:
            for each in of_step:
                read_tensors(each.path)
        except DamagedFileError as error:
            logger.warning("%s; the step before it is taken", error)
            continue
        return {rank: [each] for rank, each in zip(by_rank, of_step, strict=True)}
    raise DamagedFileError(
        "method='allreduce' needs a step at which every worker has a whole checkpoint, and there "
        "is none"
    )


def _resume(
    source: Path,
    by_rank: Mapping[int, Sequence[Saved]],
    *,
    rank: int,
    world_size: int,
    is_synchronous: bool,
    layout: Layout,
    outer: str,
) -> Resumption:
    r"""Choose and read what a worker starts from.

    With the number of workers that saved, worker r starts from its own file, every tensor bitwise.
    With another number m, worker r starts from the mean

    .. math:: z = \frac1k \sum_j (x_j + c_j/2), \qquad j \in \{r, r+m, r+2m, \ldots\}

    over the k files that there are, with c = 0 and an outer step that begins anew; where there is
    none, over all files. Its optimizer state is that of file r, or r mod the number that saved:
    what a joiner takes from a donor. A fresh one would not do: AdamW's first steps are as large as
    the learning rate in every element.

    Of a worker that died long before the others saved last only the progress counts.
    """
    first = next(iter(by_rank.values()))[0].facts
    newest = {each: saved[0].facts for each, saved in by_rank.items()}
    left_behind = set() if is_synchronous else outlived(newest)
    for each in sorted(left_behind):
        logger.warning(
            "worker %d: %s is passed over: its worker died while the others went on",
            rank,
            by_rank[each][0].path,
        )
    ranks = sorted(by_rank.keys() - left_behind)
    missing = sorted(set(range(first.world_size)).difference(ranks))
    if missing and (rank in missing or world_size != first.world_size):
        logger.warning(
            "worker %d: workers %s have no checkpoint, so the average of the others takes their "
            "place",
            rank,
            ", ".join(map(str, missing)),
        )
    # Its own, or that of rank modulo how many there are, or the next that is whole.
    turn = rank % len(ranks)
    order = ([rank] if rank in ranks else []) + ranks[turn:] + ranks[:turn]
    found = ((each, _newest_good(by_rank[each], layout)) for each in dict.fromkeys(order))
    base, good = next(((each, good) for each, good in found if good), (-1, None))
    if good is None:
        raise DamagedFileError(f"no checkpoint in {source} is whole")
    facts, tensors, training = good
    if rank == 0:
        _warn_of_outer_step(facts.outer, outer)
    is_base = base == rank
    is_own = is_base and world_size == first.world_size
    group = [each for each in ranks if each % world_size == rank]
    # Under allreduce each worker carries its own part of the sum that all of them make.
    known = {each: newest[each] for each in (group if is_synchronous else by_rank)}
    if base in known:
        known[base] = facts
    step = facts.step
    if not (is_synchronous or is_own):
        if not is_base:  # so that what it saves is newer
            step = max(each.step for each in newest.values())
        own = tensors

        def mean(group: Sequence[int]) -> dict[str, Tensor]:
            goods = (_newest_good(by_rank[each], layout) for each in group if each != base)
            others = (good[1] for good in goods if good)
            return _mean_of_z(own, itertools.chain([own] if base in group else [], others))

        tensors = (mean(group) if group else {}) or mean(ranks)
    logger.info("worker %d resumes from worker %d's step %d in %s", rank, base, facts.step, source)
    return Resumption(
        directory=source,
        generation=generation_after(by_rank, world_size),
        start=f"from checkpoints of {first.world_size} workers, generation {first.generation}",
        counts=Counts(step, facts.steps, facts.samples) if is_base else Counts(step),
        progress=_progress(known, set(known) - set(left_behind)),
        tensors=tensors,
        training=training,
        is_own=is_own,
        ended=tuple((each, BEFORE_THIS_RUN) for each in sorted(left_behind)),
    )


def _progress(known: Mapping[int, Facts], alive: Collection[int]) -> tuple[ProgressEntry, ...]:
    """What files say of every process; of its own a rank that goes on knows best.

    Others had heard of steps that it made after its checkpoint: these are lost, and made again.
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


def _warn_of_outer_step(saved: str, outer: str) -> None:
    """Say what becomes of the outer step, where it is not what was saved."""
    if saved and not outer:
        logger.warning(
            "the checkpoints were saved with an outer step, which ends here: to go on with it, "
            "wrap with outer=%s",
            saved,
        )
    elif outer and not saved:
        logger.warning(
            "the checkpoints were saved without an outer step: %s begins without momentum", outer
        )
    elif outer != saved:
        logger.warning(
            "the checkpoints were saved with %s: its momentum goes on in %s", saved, outer
        )


def _newest_good(
    candidates: Iterable[Saved], layout: Layout
) -> tuple[Facts, dict[str, Tensor], Any] | None:
    """Read the newest file of one worker whose content is what was written."""
    for saved in candidates:
        try:
            tensors, training = read(saved.path)
        except DamagedFileError as error:
            logger.warning("%s; the checkpoint before it is taken, if there is one", error)
            continue
        model = {
            name.removeprefix("model/"): tensor
            for name, tensor in tensors.items()
            if name.startswith("model/")
        }
        found = layout_of(model)
        for name in sorted(found | layout):
            there, here = found.get(name, "absent"), layout.get(name, "absent")
            if there != here:
                raise ValueError(
                    f"{saved.path} is of another model: {name!r} is {there} there and {here} here"
                )
        return saved.facts, tensors, training
    return None


@torch.no_grad()
def _mean_of_z(
    base: Mapping[str, Tensor], files: Iterable[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Average z over files, one at a time; what is no float is the base's. Empty without files."""
    kept = {name: tensor for name, tensor in base.items() if name.startswith("model/")}
    sums = {
        name: torch.zeros_like(tensor, dtype=torch.float64)
        for name, tensor in kept.items()
        if tensor.is_floating_point()
    }
    count = 0
    for tensors in files:
        count += 1
        for name, total in sums.items():
            total += _z(tensors, name.removeprefix("model/"))
    if count == 0:
        return {}
    return kept | {name: (total / count).to(kept[name].dtype) for name, total in sums.items()}


def _z(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """What exchanges conserve the mean of, in double precision."""
    x = tensors[f"model/{name}"].double()
    pending, c = (tensors.get(f"{kind}/{name}") for kind in ("pending", "c"))
    pending = torch.zeros_like(x) if pending is None else pending.double()
    z = torch.empty_like(x)
    update.read_z(z, x, pending, None if c is None else c.double())
    return z
