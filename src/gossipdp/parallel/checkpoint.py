"""Checkpoints of a run: one file a worker and step, and how a run goes on from them.

    DIRECTORY/worker-RANK/step-NNNNNNNN.safetensors

A file holds ``model/NAME`` (the module's parameters and persistent buffers), ``c/NAME`` (the
momentum), ``pending/NAME`` (what exchanges brought and the next step adds, where there is any), and
the tensors of the training state by number; in its metadata its facts and the skeleton of the
training state.
"""

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.parallel import skeleton
from gossipdp.parallel.checkpoint_facts import BEFORE_THIS_RUN, EndedLife, Facts, outlived
from gossipdp.parallel.checkpoint_files import DamagedFileError, read_metadata, read_tensors
from gossipdp.protocol.members import ProgressEntry

logger = logging.getLogger("gossipdp")

FORMAT = "gossipdp checkpoint 2"
_FILE_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_DIRECTORY_NAME = re.compile(r"worker-(\d+)")

# Name, type and shape of every tensor of a model, in a fixed order.
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Captured:
    """One worker's part of a checkpoint, copied at one moment; see :class:`Facts`."""

    tensors: dict[str, Tensor]
    step: int
    steps: int
    samples: int
    progress: tuple[ProgressEntry, ...]
    run_id: str = ""
    incarnation: int = 0
    ended: tuple[EndedLife, ...] = ()


@dataclass(frozen=True)
class Saved:
    """One file and what it says of itself."""

    path: Path
    facts: Facts


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
    """Read a file: the tensors by ``model/``, ``c/`` and ``pending/`` names; the training state.

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
    ranks = sorted(
        int(found[1])
        for path in directory.glob("worker-*")
        if (found := _DIRECTORY_NAME.fullmatch(path.name))
    )
    by_rank = {rank: saved for rank in ranks if (saved := saved_by(directory, rank, warns=warns))}
    latest = max((saved[0].facts.generation for saved in by_rank.values()), default=0)
    return {
        rank: [each for each in saved if each.facts.generation == latest]
        for rank, saved in by_rank.items()
        if saved[0].facts.generation == latest
    }


def _facts(path: Path) -> Facts:
    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT:
        raise DamagedFileError(f"{path} is no checkpoint: its format is not {FORMAT!r}")
    try:
        return msgspec.json.decode(metadata.get("facts", ""), type=Facts)
    except msgspec.MsgspecError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error


def _generation_after(facts: Facts, world_size: int) -> int:
    """The generation of what ``world_size`` workers save that go on from such a checkpoint."""
    return facts.generation + (world_size != facts.world_size)


def generation_of_joiner(directory: Path, resume: PathLike | None, world_size: int) -> int:
    """Return the generation that the workers of a run save to which one more comes.

    If nobody has saved since the run was resumed, what it went on from tells.

    Args:
        directory: where the run saves.
        resume: as the run was given it.
        world_size: that the run began with.
    """
    resumed = None if resume is None or resume == "auto" else Path(resume)
    for place in (directory, resumed):
        if place is not None and (by_rank := saved_in(place)):
            return _generation_after(next(iter(by_rank.values()))[0].facts, world_size)
    return 1


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a module's tensors by their own names."""
    return tuple(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in sorted(tensors.items())
    )


def _difference(found: Layout, expected: Layout) -> str:
    theirs = {name: f"{kind} {shape}" for name, kind, shape in found}
    ours = {name: f"{kind} {shape}" for name, kind, shape in expected}
    name = next(n for n in sorted(theirs | ours) if theirs.get(n) != ours.get(n))
    return f"{name!r} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} here"


@dataclass(frozen=True)
class Counts:
    """What a worker had counted when its run resumed; see :class:`Facts`."""

    step: int = 0
    steps: int = 0
    samples: int = 0

    @classmethod
    def of(cls, resumption: "Resumption | None") -> "Counts":
        """The counts that a worker goes on from; zeros for a fresh start."""
        if resumption is None:
            return cls()
        return cls(resumption.step, resumption.steps, resumption.samples)

    @classmethod
    def of_joiner(cls, steps: int, samples: int, directory: Path | None, rank: int) -> "Counts":
        """The counts of one that comes into a run that goes on, as the others know them.

        Its steps are numbered on from the files of its earlier life, which in a resumed run may
        have begun beyond what was counted: what it saves must be newer than they are.
        """
        saved = [] if directory is None else saved_by(directory, rank)
        return cls(max([steps, *(each.facts.step for each in saved)]), steps, samples)


class Resumption:
    r"""What a worker starts from when its run goes on.

    With the number of workers that saved, worker r starts from its own file, every tensor bitwise.
    With another number m, worker r starts from the mean

    .. math:: z = \frac1k \sum_j (x_j + c_j/2), \qquad j \in \{r, r+m, r+2m, \ldots\}

    over the k files that there are, with c = 0; where there is none, over all files. Its optimizer
    state is that of file r, or r mod the number that saved: what a joiner takes from a donor. A
    fresh one would not do: AdamW's first steps are as large as the learning rate in every element.

    Of a worker that died long before the others saved last (:mod:`.checkpoint_facts`) only the
    progress counts: its file is of a point that the run has left behind.

    Args:
        directory: of the checkpoints.
        by_rank: its files, as :func:`saved_in` gives them; at least one.
        rank, world_size: of this worker, and of the run that starts now.
        method: of the run that starts now.
        layout: of this worker's model.

    Attributes:
        generation: of the checkpoints that this run will write.
        start: a text for all workers to compare: how the run starts.
        step, steps, samples: from which this worker goes on counting; see :class:`Facts`.
        progress: every life to be counted in.
        tensors: by ``model/``, ``c/`` and ``pending/`` names.
        is_own: whether this worker goes on with its own share of the data.
        training: the training state.
        ended: for what this run saves: the lives of earlier runs that have ended.

    Raises:
        ValueError: it is of another model or method.
        DamagedFileError: all checkpoints are damaged.
    """

    def __init__(
        self,
        directory: Path,
        by_rank: Mapping[int, Sequence[Saved]],
        *,
        rank: int,
        world_size: int,
        method: str,
        layout: Layout,
    ) -> None:
        first = next(iter(by_rank.values()))[0].facts
        self.directory = directory
        self.generation = _generation_after(first, world_size)
        self.start = (
            f"from checkpoints of {first.world_size} workers, generation {first.generation}"
        )
        self._rank, self._world_size, self._layout = rank, world_size, layout
        self._is_same_number = world_size == first.world_size
        left_behind: set[int] = set()
        if method != "allreduce":
            left_behind = outlived({each: saved[0].facts for each, saved in by_rank.items()})
        elif first.method == "allreduce":
            by_rank = _of_one_step(by_rank)
        else:
            raise ValueError(
                f"the checkpoints in {directory} are of method {first.method!r}, whose workers "
                "differ: method='allreduce' cannot go on from them. Start it from the average "
                "that save_averaged() writes"
            )
        for each in sorted(left_behind):
            logger.warning(
                "worker %d: %s is passed over: its worker died while the others went on",
                rank,
                by_rank[each][0].path,
            )
        self.ended = tuple((each, BEFORE_THIS_RUN) for each in sorted(left_behind))
        usable = by_rank.keys() - left_behind
        missing = set(range(first.world_size)) - usable
        if missing and (rank in missing or not self._is_same_number):
            logger.warning(
                "worker %d: of the %d workers whose checkpoints are in %s there is none of %s; "
                "the average of the others takes its place",
                rank,
                first.world_size,
                directory,
                ", ".join(map(str, sorted(missing))),
            )
        self._take(by_rank, usable, is_synchronous=method == "allreduce")

    def _take(
        self,
        by_rank: Mapping[int, Sequence[Saved]],
        usable: Collection[int],
        *,
        is_synchronous: bool,
    ) -> None:
        rank, ranks = self._rank, sorted(usable)
        turn = rank % len(ranks)
        # Its own, or that of rank modulo how many there are, or the next that is whole.
        order = ([rank] if rank in usable else []) + ranks[turn:] + ranks[:turn]
        read = ((each, self._newest_good(by_rank[each])) for each in dict.fromkeys(order))
        base, good = next(((each, good) for each, good in read if good is not None), (-1, None))
        if good is None:
            raise DamagedFileError(f"no checkpoint in {self.directory} is whole")
        saved, tensors, self.training = good
        is_base = base == rank
        self.is_own = is_base and self._is_same_number
        self.step = saved.facts.step
        self.steps = saved.facts.steps if is_base else 0
        self.samples = saved.facts.samples if is_base else 0
        group = [each for each in ranks if each % self._world_size == rank]
        # Under allreduce each worker carries its own part of the sum that all of them make.
        known = {each: by_rank[each][0].facts for each in (group if is_synchronous else by_rank)}
        if base in known:
            known[base] = saved.facts
        self.progress = tuple(entry for _, f in sorted(known.items()) for entry in f.progress)
        self.tensors = tensors
        if not (is_synchronous or self.is_own):
            if not is_base:
                self.step = max(saved[0].facts.step for saved in by_rank.values())
            files = {each: by_rank[each] for each in ranks}
            # Where none of its group is whole: over all.
            self.tensors = self._mean_of_z(files, group, base, tensors) or self._mean_of_z(
                files, ranks, base, tensors
            )
        logger.info("worker %d resumes from %s", rank, saved.path)

    def _newest_good(
        self, candidates: Sequence[Saved]
    ) -> tuple[Saved, dict[str, Tensor], Any] | None:
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
            if (found := layout_of(model)) != self._layout:
                raise ValueError(
                    f"{saved.path} is of another model: {_difference(found, self._layout)}"
                )
            return saved, tensors, training
        return None

    @torch.no_grad()
    def _mean_of_z(
        self,
        files: Mapping[int, Sequence[Saved]],
        group: Iterable[int],
        base: int,
        base_tensors: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Average z over the files of a group, one at a time; integers are the base's.

        Empty where none of the group is whole.
        """
        kept = {name: held for name, held in base_tensors.items() if name.startswith("model/")}
        sums = {
            name: torch.zeros_like(held, dtype=torch.float64)
            for name, held in kept.items()
            if held.is_floating_point()
        }
        count = 0
        for each in group:
            if each == base:
                tensors = base_tensors
            elif (good := self._newest_good(files[each])) is not None:
                tensors = good[1]
            else:
                continue
            count += 1
            for name, total in sums.items():
                total += _z(tensors, name.removeprefix("model/"))
        if count == 0:
            return {}
        return kept | {name: (sums[name] / count).to(kept[name].dtype) for name in sums}


def _z(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """What exchanges conserve the mean of, in double precision."""
    x = tensors[f"model/{name}"].double()
    pending, c = (tensors.get(f"{kind}/{name}") for kind in ("pending", "c"))
    pending = torch.zeros_like(x) if pending is None else pending.double()
    z = torch.empty_like(x)
    update.read_z(z, x, pending, None if c is None else c.double())
    return z


def _of_one_step(by_rank: Mapping[int, Sequence[Saved]]) -> dict[int, list[Saved]]:
    """Keep the files of the newest step that all workers have whole."""
    common = set.intersection(*({each.facts.step for each in saved} for saved in by_rank.values()))
    for step in sorted(common, reverse=True):
        of_step = {
            rank: [each for each in saved if each.facts.step == step]
            for rank, saved in by_rank.items()
        }
        try:
            for saved in of_step.values():
                read_tensors(saved[0].path)
        except DamagedFileError as error:
            logger.warning("%s; the step before it is taken", error)
            continue
        return of_step
    raise DamagedFileError(
        "there is no step of which the checkpoints of all workers are whole, and "
        "method='allreduce' needs one"
    )


def find_resumption(
    resume: PathLike | None,
    directory: Path | None,
    *,
    rank: int,
    world_size: int,
    method: str,
    layout: Layout,
) -> Resumption | None:
    """Return what a run starts from; None for a fresh start.

    Args:
        resume: ``"auto"``, a directory of checkpoints, or None.
        directory: where this run saves.
        rank, world_size, method, layout: see :class:`Resumption`.

    Raises:
        ValueError: there is nothing where there should be, or ``directory`` holds another run's
            checkpoints.
    """
    source = directory if resume == "auto" else None if resume is None else Path(resume)
    goes_on_there = (
        source is not None and directory is not None and source.resolve() == directory.resolve()
    )
    if directory is not None and not goes_on_there and saved_in(directory):
        raise ValueError(
            f"{str(directory)!r} holds checkpoints of another run; go on from them with "
            "resume='auto', or choose another directory"
        )
    if source is None:
        return None
    by_rank = saved_in(source, warns=True)
    if by_rank:
        return Resumption(
            source, by_rank, rank=rank, world_size=world_size, method=method, layout=layout
        )
    if resume == "auto":
        return None
    what = "holds no checkpoint" if source.is_dir() else "is no directory"
    raise ValueError(
        f"resume={str(source)!r} {what}: name the directory of the run to go on from (here it is "
        f"{str(source.absolute())!r}), or leave resume out to start afresh; with a directory of "
        "one's own, resume='auto' does either"
    )
