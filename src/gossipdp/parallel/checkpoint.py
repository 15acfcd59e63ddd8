"""Checkpoints of a run: one file a worker and step, and how a run resumes from them.

    DIRECTORY/worker-RANK/step-NNNNNNNN.safetensors

A file holds ``model/NAME`` (the module's parameters and persistent buffers), ``c/NAME`` (the
momentum), ``pending/NAME`` (what exchanges brought and the next step adds, where there is any),
and the tensors of the training state; in its metadata its facts and the structure of the training
state.
"""

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint_facts import Facts
from gossipdp.parallel.checkpoint_files import DamagedFileError, read_metadata, read_tensors
from gossipdp.parallel.outlived import BEFORE_THIS_RUN, EndedLife, outlived
from gossipdp.protocol.progress import ProgressEntry

logger = logging.getLogger("gossipdp")

FORMAT = "gossipdp checkpoint 1"
TRAINING_PREFIX = "training/"
_FILE_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_DIRECTORY_NAME = re.compile(r"worker-(\d+)")

# Name, type and shape of every tensor of a model, in a fixed order.
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Captured:
    """One worker's part of a checkpoint, copied between two exchanges; see :class:`Facts`."""

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


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a module's tensors by their own names."""
    return tuple(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in sorted(tensors.items())
    )


def saved_by(directory: Path, rank: int) -> list[Saved]:
    """Return the files of one worker, the newest first; one that cannot be read is warned of."""
    saved = []
    for path in (directory / f"worker-{rank}").glob("step-*.safetensors"):
        if _FILE_NAME.fullmatch(path.name):
            try:
                saved.append(Saved(path, _facts(path, read_metadata(path))))
            except DamagedFileError as error:
                logger.warning("a checkpoint is passed over: %s", error)
    return sorted(saved, key=lambda each: (each.facts.generation, each.facts.step), reverse=True)


def saved_in(directory: Path) -> dict[int, list[Saved]]:
    """Return the files of all workers of the latest generation, by rank, the newest first."""
    ranks = sorted(
        int(found[1])
        for path in directory.glob("worker-*")
        if (found := _DIRECTORY_NAME.fullmatch(path.name))
    )
    by_rank = {rank: saved for rank in ranks if (saved := saved_by(directory, rank))}
    latest = max((saved[0].facts.generation for saved in by_rank.values()), default=0)
    latest_of = {
        rank: [each for each in saved if each.facts.generation == latest]
        for rank, saved in by_rank.items()
    }
    return {rank: saved for rank, saved in latest_of.items() if saved}


def generation_after(facts: Facts, num_workers: int) -> int:
    """Return the generation of what ``num_workers`` save that go on from such a checkpoint."""
    return facts.generation + (num_workers != facts.num_workers)


def generation_of_joiner(
    checkpoint_dir: Path, resume: str | os.PathLike[str] | None, num_workers: int
) -> int:
    """Return the generation that the workers of a run save to which one more comes.

    Nobody may have saved since the run was resumed: what it went on from tells it then.

    Args:
        checkpoint_dir: where the run saves.
        resume: as the run was given it.
        num_workers: that the run began with.
    """
    resumed = None if resume is None or resume == "auto" else Path(resume)
    for directory in (checkpoint_dir, resumed):
        if directory is not None and (by_rank := saved_in(directory)):
            return generation_after(next(iter(by_rank.values()))[0].facts, num_workers)
    return 1


def _facts(path: Path, metadata: Mapping[str, str]) -> Facts:
    if metadata.get("format") != FORMAT:
        raise DamagedFileError(f"{path} is no checkpoint: its format is not {FORMAT!r}")
    try:
        return msgspec.json.decode(metadata.get("facts", ""), type=Facts)
    except msgspec.MsgspecError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error


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

    Of a worker that died long before the others saved last (:func:`~gossipdp.parallel.outlived`)
    only the progress counts: its file is of a point that the run has left behind.

    Args:
        directory: of the checkpoints.
        rank, num_workers: of this worker, and of the run that starts now.
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
        ValueError: there is no checkpoint, or it is of another model or method.
        DamagedFileError: all checkpoints are damaged.
    """

    def __init__(
        self, directory: Path, rank: int, num_workers: int, method: str, layout: Layout
    ) -> None:
        by_rank = saved_in(directory)
        if not by_rank:
            what = "holds no checkpoint" if directory.is_dir() else "is no directory"
            raise ValueError(
                f"resume={str(directory)!r} {what}: name the checkpoint_dir of the run to go on "
                f"from (here it is {str(directory.absolute())!r}), or leave resume out to start "
                "afresh; with a checkpoint_dir, resume='auto' does either"
            )
        first = next(iter(by_rank.values()))[0].facts
        self.directory = directory
        self.num_saved = first.num_workers
        self._rank, self._num_workers, self._layout = rank, num_workers, layout
        self._is_same_number = num_workers == self.num_saved
        self.generation = generation_after(first, num_workers)
        self.start = f"from checkpoints of {self.num_saved} workers, generation {first.generation}"
        synchronous = method == "allreduce"
        if synchronous != (first.method == "allreduce") and synchronous:
            raise ValueError(
                f"the checkpoints in {directory} are of method {first.method!r}, whose workers "
                "differ: method='allreduce' cannot go on from them. Start it from the average "
                "that save_averaged() writes"
            )
        left_behind: set[int] = set()
        if synchronous:
            by_rank = _of_one_step(by_rank)
        else:
            left_behind = outlived({each: saved[0].facts for each, saved in by_rank.items()})
        for each in sorted(left_behind):
            logger.warning(
                "worker %d: %s is passed over: its worker died while the others went on",
                rank,
                by_rank[each][0].path,
            )
        self.ended = tuple((each, BEFORE_THIS_RUN) for each in sorted(left_behind))
        missing = set(range(self.num_saved)) - (by_rank.keys() - left_behind)
        if missing and (rank in missing or not self._is_same_number):
            logger.warning(
                "worker %d: of the %d workers whose checkpoints are in %s there is none of %s; "
                "the average of the others takes its place",
                rank,
                self.num_saved,
                directory,
                ", ".join(map(str, sorted(missing))),
            )
        self._take(by_rank, by_rank.keys() - left_behind, synchronous)

    def _take(
        self, by_rank: Mapping[int, Sequence[Saved]], usable: Collection[int], synchronous: bool
    ) -> None:
        rank, num_workers = self._rank, self._num_workers
        ranks = sorted(usable)
        turn = rank % len(ranks)
        # Its own, or that of rank modulo how many there are, or the next that is whole.
        order = ([rank] if rank in usable else []) + ranks[turn:] + ranks[:turn]
        read = ((each, self._newest_good(by_rank[each])) for each in dict.fromkeys(order))
        base, good = next(((each, good) for each, good in read if good is not None), (-1, None))
        if good is None:
            raise DamagedFileError(f"no checkpoint in {self.directory} is whole")
        saved, tensors, self.training = good
        self.is_own = base == rank and self._is_same_number
        self.step = saved.facts.step
        self.steps = saved.facts.steps if base == rank else 0
        self.samples = saved.facts.samples if base == rank else 0
        group = [each for each in ranks if each % num_workers == rank]
        # Under allreduce each worker carries its own part of the sum that all of them make.
        counted = group if synchronous else sorted(by_rank)
        known = {each: by_rank[each][0].facts for each in counted}
        if base in known:
            known[base] = saved.facts
        self.progress = tuple(entry for facts in known.values() for entry in facts.progress)
        if synchronous or self.is_own:
            self.tensors = tensors
        else:
            if base != rank:
                self.step = max(saved[0].facts.step for saved in by_rank.values())
            files = {each: by_rank[each] for each in ranks}
            self.tensors = self._mean_of_z(files, group, base, tensors)
        logger.info("worker %d resumes from %s", rank, saved.path)

    @torch.no_grad()
    def _mean_of_z(
        self,
        by_rank: Mapping[int, Sequence[Saved]],
        group: Sequence[int],
        base: int,
        base_tensors: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Average z = x + pending + c/2 over files, one at a time; integers are the base's."""
        averaged = [
            name
            for name, tensor in base_tensors.items()
            if name.startswith("model/") and tensor.is_floating_point()
        ]
        sums = {
            name: torch.zeros_like(base_tensors[name], dtype=torch.float64) for name in averaged
        }
        count = 0
        for ranks in (group, sorted(by_rank)):  # where none of the group is whole: all
            for rank in ranks:
                good = None if rank == base else self._newest_good(by_rank[rank])
                if rank != base and good is None:
                    continue
                _add_z(sums, base_tensors if good is None else good[1])
                count += 1
            if count:
                break
        means = {name: (sums[name] / count).to(base_tensors[name].dtype) for name in averaged}
        kept = {name: held for name, held in base_tensors.items() if name.startswith("model/")}
        return {**kept, **means}

    def _newest_good(
        self, candidates: Sequence[Saved]
    ) -> tuple[Saved, dict[str, Tensor], Any] | None:
        """Read the newest file of one worker whose content is what was written."""
        for saved in candidates:
            try:
                return saved, *self._read(saved.path)
            except DamagedFileError as error:
                logger.warning("%s; the checkpoint before it is taken, if there is one", error)
        return None

    def _read(self, path: Path) -> tuple[dict[str, Tensor], Any]:
        tensors, metadata = read_tensors(path)
        training = {
            name: tensors.pop(name) for name in list(tensors) if name.startswith(TRAINING_PREFIX)
        }
        found = layout_of(
            {
                name.removeprefix("model/"): tensor
                for name, tensor in tensors.items()
                if name.startswith("model/")
            }
        )
        if found != self._layout:
            raise ValueError(f"{path} is of another model: {_difference(found, self._layout)}")
        # Out of the file's memory map, which lasts as long as a tensor of it does.
        copies = {name: tensor.clone() for name, tensor in training.items()}
        try:
            return tensors, training_state.unpack(metadata.get("structure"), copies)
        except ValueError as error:
            raise DamagedFileError(f"{path} is damaged: {error}") from error


def find_resumption(
    resume: str | os.PathLike[str] | None,
    checkpoint_dir: Path | None,
    *,
    rank: int,
    num_workers: int,
    method: str,
    layout: Layout,
) -> Resumption | None:
    """Return what a run starts from by ``resume=`` and ``checkpoint_dir=``; None for a fresh start.

    Raises:
        ValueError: there is nothing where there should be, or ``checkpoint_dir`` holds another
            run's checkpoints.
    """
    directory = checkpoint_dir if resume == "auto" else None if resume is None else Path(resume)
    goes_on_there = (
        directory is not None
        and checkpoint_dir is not None
        and directory.resolve() == checkpoint_dir.resolve()
    )
    if checkpoint_dir is not None and not goes_on_there and saved_in(checkpoint_dir):
        raise ValueError(
            f"checkpoint_dir={str(checkpoint_dir)!r} holds checkpoints of another run; go on from "
            "them with resume='auto', or choose another directory"
        )
    if directory is None or (resume == "auto" and not saved_in(directory)):
        return None
    return Resumption(directory, rank, num_workers, method, layout)


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


def _add_z(sums: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, total in sums.items():
        own = name.removeprefix("model/")
        total += tensors[name]
        if (pending := tensors.get(f"pending/{own}")) is not None:
            total += pending
        if (c := tensors.get(f"c/{own}")) is not None:
            total.add_(c, alpha=0.5)


def _difference(found: Layout, expected: Layout) -> str:
    theirs = {name: rest for name, *rest in found}
    ours = {name: rest for name, *rest in expected}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            return (
                f"{name!r} is {_tensor(theirs.get(name))} there and {_tensor(ours.get(name))} here"
            )
    return "they hold the same tensors"


def _tensor(description: Sequence[Any] | None) -> str:
    return "absent" if description is None else f"{description[0]} {tuple(description[1])}"
