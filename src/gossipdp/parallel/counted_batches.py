"""The batches of ``batches()`` and ``epochs()``, their count, and their end."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from gossipdp.logs import OF_RUN
from gossipdp.parallel.checkpointer import Checkpointer
from gossipdp.parallel.data_position import DataPosition
from gossipdp.parallel.entry import Entry
from gossipdp.parallel.schedule import set_rates
from gossipdp.parallel.stats import LATER_SHARE

logger = logging.getLogger("gossipdp")

Batch = TypeVar("Batch")

STEPS_WITHOUT_SAMPLES = 3
"""If so many steps count no sample, something is wrong with the loop."""
ROUNDS_WITHOUT_STEP = 200  # in a row; accumulation makes fewer
COUNTS_OTHERWISE = (
    "a batch counts as %s samples, and the loader's batch_size is %s: if that is wrong, wrap with "
    "counting=Counting(samples_per_step=...)"
)
IN_AN_OWN_ORDER = "generator=torch.Generator().manual_seed(model.worker_seed))"
RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class CountedBatches:
    """Yields a loader's batches until all workers together have trained on enough samples.

    Checkpoints that are due are taken between two batches.
    """

    def __init__(self, worker: Entry, position: DataPosition, checkpointer: Checkpointer) -> None:
        options = worker.options
        self.budget_samples = options.budget_samples
        self._position, self._worker, self._checkpointer = position, worker, checkpointer
        self._samples_per_step = options.counting.samples_per_step
        self._batch_dim = options.counting.batch_dim
        self._is_repeat = self._may_repeat = False
        self._is_closed = self._is_looked_at = False
        self._counted = self._all_counted = 0
        self._asker = self._maker = threading.get_ident()  # of batches, and of this
        self._rounds_since_step: float = 0
        # The first two count the calls of epochs() that are over. The third is of the last call,
        # which may be under way or broken off.
        self._epochs_before = self._samples_before = self._num_epochs = 0
        self._forwarded: list[tuple[weakref.ref[Tensor], int]] = []  # the inputs of a step's passes

    def take_counted(self) -> int:
        """Return the samples of the step that has just ended."""
        here = self._maker, threading.get_ident()  # which a step in a backward pass may not share
        if self._checkpointer.is_within_batches and self._asker not in here:
            raise RuntimeError(
                "another thread than that of optimizer.step() asks for batches, in the middle of a "
                "step: loop over them in the thread that steps, and let the loader prefetch"
            )
        counted, self._counted = self._samples_per_step or self._counted, 0
        self._all_counted += counted
        self._rounds_since_step = min(0, self._rounds_since_step)
        self._forwarded.clear()
        return counted

    def check_counted(self, num_steps: int) -> None:
        """Raise, or without a budget warn, if steps were made and no sample was counted."""
        if num_steps != STEPS_WITHOUT_SAMPLES or self._all_counted:
            return
        problem = (
            f"{num_steps} gradient steps of the {type(self._worker.module).__name__}, and not one "
            "sample was counted. Loop over model.batches(loader) or model.epochs(loader, n); or "
            "call model(x) in training mode in place of the module itself; or wrap with "
            "counting=Counting(samples_per_step=...)"
        )
        if self.budget_samples is not None:
            raise RuntimeError(f"the budget would never be used up: {problem}")
        logger.warning("%s", problem, extra=OF_RUN)

    def count_forward(self, batch: Any) -> None:
        """Count a batch of a loop of the user's own, unless it is counted already.

        A batch that was yielded here is counted already. So is one whose forward pass is repeated,
        by a closure or, in a backward pass, by activation checkpointing. (If that is reentrant, its
        first pass had no gradients and was not counted.)
        """
        node = torch._C._current_autograd_node()  # None: no backward pass runs
        if node is not None and node.name() != "CheckpointFunctionBackward":
            return
        is_counted = self._checkpointer.is_within_batches or self._is_repeat
        if self._samples_per_step is not None or is_counted or self._is_closed:
            return
        if path := _path(batch):  # each pass may make a view of its own
            first, base = path[-1], path[-1]._base
            whole, place = first if base is None else base, first.storage_offset()
            seen = (at for each, at in self._forwarded if each() is whole)
            if self._may_repeat and place in seen:
                return
            self._forwarded.append((weakref.ref(whole), place))
        self._counted += _batch_size(batch, self._batch_dim) or 0

    def counting_once(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return the closure for a step; only its first call counts samples.

        If a batch had its forward pass before the step, as with SAM, not even the first call counts
        it. If the closure gets another batch, as with Lightning's accumulation, it counts.
        """
        is_first = True

        @functools.wraps(closure)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            self._may_repeat, self._is_repeat, is_first = is_first, not is_first, False
            try:
                return closure(*args, **kwargs)
            finally:
                self._may_repeat = self._is_repeat = False

        return counted

    def until_budget(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches until the workers together have used up the budget."""
        budget = self.budget_samples
        assert budget is not None
        self._check_open()
        self._say_if_ended(f"batches() of {budget} samples")

        def batches() -> Iterator[Batch]:
            with self._checkpointer.of_batches():
                yield from self._until(budget, self._passes(loader))

        return batches()

    def epochs(
        self, loader: Iterable[Batch], num_epochs: int, size: int
    ) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield epochs of ``size`` samples; see ``GossipDataParallel.epochs``."""
        self._check_open()
        if self.budget_samples is not None and self._has_ended(self.budget_samples):
            self._samples_before = self.budget_samples
            self._epochs_before += self._num_epochs
        self._num_epochs = num_epochs
        epochs_before, samples_before = self._epochs_before, self._samples_before
        self.budget_samples = budget = samples_before + num_epochs * size
        self._say_if_ended(f"epochs() up to {epochs_before + num_epochs}")
        set_rates(self._worker.optimizers)

        def epochs() -> Iterator[tuple[int, Iterator[Batch]]]:
            with self._checkpointer.of_batches():
                passes, epoch = self._passes(loader), -1
                while not self._has_ended(budget):
                    self._check_open()
                    epoch = max(epoch + 1, (self._worker.total_samples() - samples_before) // size)
                    if epoch >= num_epochs:  # the loop broke off epochs before their ends
                        return
                    end = samples_before + (epoch + 1) * size
                    if inspect.getgeneratorstate(passes) == inspect.GEN_CLOSED:  # by an error of
                        passes = self._passes(loader)  # the loader, which the script has caught
                    yield epochs_before + epoch, self._until(end, passes)

        return epochs()

    def close(self) -> None:
        """Raise from now on if a loop asks for more batches: no step would be counted."""
        self._is_closed = True

    @property
    def finished(self) -> bool:
        """True once the budget is used up, a worker has stopped the run, or this one is closed."""
        self._count_round()
        budget = math.inf if self.budget_samples is None else self.budget_samples
        return self._is_closed or self._has_ended(budget)

    def exceeds_epochs(self, samples: int) -> bool:
        """Return if so many are far beyond ``epochs()``, which count this worker's own dataset."""
        return self._num_epochs > 0 and samples > (1 + LATER_SHARE) * (self.budget_samples or 0)

    def _count_round(self) -> None:
        """Warn once, if many rounds of the user's loop have made no step."""
        self._rounds_since_step += 1
        if self._rounds_since_step == ROUNDS_WITHOUT_STEP:
            self._rounds_since_step = -math.inf
            logger.warning(
                "%d rounds of the loop without a step of the %s that was wrapped: only its steps "
                "use up the budget, so the loop may never end. Call its step() in the loop",
                ROUNDS_WITHOUT_STEP,
                type(self._worker.optimizers[0]).__name__,
                extra=OF_RUN,
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                "the run has ended with consolidate() or close(), so there are no more batches to "
                "count: loop before it, or wrap the module and its optimizer once more to train on"
            )

    def _say_if_ended(self, loop: str) -> None:
        if not self.finished:
            return
        why = f"the workers have trained on {self._worker.total_samples()} samples already"
        if self._worker.known().is_stopped:
            why = "model.stop() has ended the run"
        logger.warning("%s yields nothing: %s", loop, why, extra=OF_RUN)

    def _has_ended(self, samples: float) -> bool:
        return self._worker.known().is_stopped or self._worker.total_samples() >= samples

    def _until(self, samples: int, passes: Iterator[Batch]) -> Iterator[Batch]:
        while not self._has_ended(samples):
            self._check_open()
            self._count_round()
            self._asker = threading.get_ident()
            yield next(passes)
            if self._worker.has_stepped and not self._is_closed:  # else the first is half way
                self._checkpointer.take_due()

    def _passes(self, loader: Iterable[Batch]) -> Generator[Batch, None, None]:
        """Yield the loader's batches, each counted, pass after pass without end."""
        self._counted = 0
        is_new, self._is_looked_at = not self._is_looked_at, True
        if is_new:
            self._check_sampler(loader)
        usual, samples = getattr(loader, "batch_size", None), None
        while True:
            for number, batch in enumerate(self._position.epoch(loader)):
                if number == 1 and is_new:  # the first batch was not the last, so it was full
                    is_new = False
                    if samples != usual and usual is not None:
                        logger.warning(COUNTS_OTHERWISE, samples, usual, extra=OF_RUN)
                samples = self._count(batch, usual)
                yield batch
            if self._position.batch == 0:
                raise ValueError(
                    "the loader yielded no batch: it is empty, or it is an iterator that can "
                    "be gone through only once (pass the loader itself)"
                )

    def _check_sampler(self, loader: Any) -> None:
        """Warn if a worker never sees much of the data, or if all see the same batches."""
        call = "DataLoader(..., shuffle=True"
        own, of_batches = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
        # Under batch_size=None the sampler of batches is the loader's own.
        samplers: list[Any] = [own, *(getattr(each, "sampler", None) for each in (own, of_batches))]
        for each in samplers:
            if isinstance(each, DistributedSampler) and not each.shuffle and each.num_replicas > 1:
                problem = (
                    "the loader's DistributedSampler has shuffle=False, so each worker trains on "
                    "one share of the data alone: that of a slow worker counts less, and that of a "
                    "dead one is lost. In its place write"
                )
            elif (kind := type(each)) in RANDOM_SAMPLERS and each.generator is None:
                if not self._worker.draws_alike:
                    continue
                if kind is not RandomSampler or each is not own:
                    call = f"{kind.__name__}(..."
                problem = (
                    "all workers go through the data in the same order, since torch has the same "
                    "random state on all of them. Unless each has data of its own, write"
                )
            else:
                continue
            logger.warning("%s %s, %s", problem, call, IN_AN_OWN_ORDER, extra=OF_RUN)
            return

    def _count(self, batch: Any, usual: int | None) -> int | None:
        if self._samples_per_step is not None:
            return usual
        samples = _batch_size(batch, self._batch_dim, usual)
        if samples is None:
            raise ValueError(
                f"a batch of type {type(batch).__name__} holds no tensor with a dimension "
                f"{self._batch_dim} that would tell its samples: wrap with "
                "counting=Counting(samples_per_step=...)"
            )
        self._counted += samples
        return samples


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the arguments of a call as a batch: they are no list of samples."""
    return {**dict(enumerate(args)), **kwargs}


def _batch_size(batch: Any, batch_dim: int, usual: int | None = None) -> int | None:
    """Return a batch's size: of its first tensor along ``batch_dim``; None where there is none.

    It is a list's length if two of three hold: its items look like images, or have unlike lengths;
    it cannot be a pair of inputs and targets; its length is the ``usual`` size.
    """
    *holders, first = _path(batch) or [None]
    if holders and isinstance(holders[-1], PackedSequence):
        return int(holders[-1].batch_sizes[0])
    if first is None or first.dim() <= batch_dim:
        return None
    size: int = first.size(batch_dim)  # a nested tensor has no shape
    are_images = batch_dim == 0 and first.dim() == 3 and size <= 4  # channels
    for holder in reversed(holders) if size != usual else ():
        samples = [_path(each)[-1:] for each in holder] if isinstance(holder, (list, tuple)) else []
        if all(samples) and len({(each.dim(), each.dtype) for (each,) in samples}) == 1:
            differ = len({each.size(batch_dim) for (each,) in samples}) > 1
            is_pair = holder is batch and len(holder) <= 2 and not isinstance(holder[0], Mapping)
            if (are_images or differ) + (not is_pair) + (len(samples) == usual) >= 2:
                return len(samples)
    return size


def _path(value: Any) -> list[Any]:
    """Return what leads to the first tensor in mappings, lists, tuples and dataclasses, and it."""
    if isinstance(value, Tensor):
        return [value]
    inner: Iterable[Any] = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = (getattr(value, field.name) for field in dataclasses.fields(value))
    return next(([value, *path] for path in map(_path, inner) if path), [])


def dataset_size(loader: Any) -> int:
    """Return how many samples the loader's dataset holds; raise if the loader does not say.

    Under ``batch_size=None`` a dataset's length counts what it yields, which are batches, unless a
    sampler asks for many samples at a time.
    """
    yields_batches = (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is None
        and not isinstance(loader.sampler, BatchSampler)
    )
    problem = "under batch_size=None the dataset may hold batches"
    if not yields_batches:
        problem = "the loader does not say how many samples its dataset holds"
        with contextlib.suppress(AttributeError, TypeError, NotImplementedError):
            return len(loader.dataset)
    raise ValueError(
        f"{problem}: give epochs(..., samples=), the samples of one epoch of all workers together"
    )
