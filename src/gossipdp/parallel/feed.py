"""What ``batches()`` and ``epochs()`` yield, how it is counted, where it ends, and the way back."""

import contextlib
import dataclasses
import functools
import logging
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gossipdp.parallel.options import Options

logger = logging.getLogger("gossipdp")

Batch = TypeVar("Batch")

STEPS_WITHOUT_SAMPLES = 3
"""After so many steps without one counted sample something is wrong with the loop."""


class Feed:
    """Yields a loader's batches until all workers together have trained on enough samples.

    Calls ``between`` two batches, and is ``within`` a context while it yields.
    """

    def __init__(
        self,
        position: "DataPosition",
        total_samples: Callable[[], int],
        is_stopped: Callable[[], bool],
        options: Options,
        *,
        between: Callable[[], None],
        within: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.budget_samples = options.budget_samples
        self._position = position
        self._total_samples, self._is_stopped = total_samples, is_stopped
        self._between, self._within = between, within
        self._samples_per_step = options.samples_per_step
        self._batch_dim = options.batch_dim
        self._is_yielding = self._is_repeat = False
        self._counted = self._all_counted = 0

    def take_counted(self) -> int:
        """Return the samples of the step that has just ended."""
        counted, self._counted = self._samples_per_step or self._counted, 0
        self._all_counted += counted
        return counted

    def check_counted(self, num_steps: int) -> None:
        """Say so, once, where steps were made and nothing was counted: the loop is a wrong one."""
        if num_steps != STEPS_WITHOUT_SAMPLES or self._all_counted:
            return
        problem = (
            f"{num_steps} gradient steps, and not one sample was counted. Loop over "
            "model.batches(loader) or model.epochs(loader, n); or call model(x) in training mode "
            "in place of the module itself; or wrap with samples_per_step="
        )
        if self.budget_samples is not None:
            raise RuntimeError(f"the budget would never be used up: {problem}")
        logger.warning("%s", problem)

    def count_forward(self, batch: Any) -> None:
        """Count a batch of a loop of the user's own; one that was yielded here is counted.

        So is one whose forward pass is repeated: by a closure, or in a backward pass, by activation
        checkpointing. (If that is reentrant, its first pass had no gradients and was not counted.)
        """
        node = torch._C._current_autograd_node()  # None: no backward pass runs
        if node is not None and node.name() != "CheckpointFunctionBackward":
            return
        if self._samples_per_step is None and not (self._is_yielding or self._is_repeat):
            self._counted += _batch_size(batch, self._batch_dim) or 1

    def counting_once(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return the closure for a step, whose samples are counted by its first call alone.

        Nor by that one if there were forward passes before the step: they were of the same batch,
        as with SAM.
        """
        is_repeat = self._counted > 0

        @functools.wraps(closure)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_repeat
            self._is_repeat, is_repeat = is_repeat, True
            try:
                return closure(*args, **kwargs)
            finally:
                self._is_repeat = False

        return counted

    def until(self, samples: int, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches until the workers together have trained on so many samples."""
        with self._yielding():
            yield from self._until(samples, self._passes(loader))

    def epochs(
        self, loader: Iterable[Batch], num_epochs: int, size: int
    ) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield epochs of ``size`` samples of all workers, each as its number and its batches."""
        with self._yielding():
            passes = self._passes(loader)
            epoch = -1
            while not self._has_ended(num_epochs * size):
                epoch = max(epoch + 1, self._total_samples() // size)
                if epoch >= num_epochs:  # the loop left epochs before their ends
                    return
                yield epoch, self._until((epoch + 1) * size, passes)

    @property
    def finished(self) -> bool:
        """Whether the budget is used up, or a worker has stopped the run."""
        return self._has_ended(math.inf if self.budget_samples is None else self.budget_samples)

    def _has_ended(self, samples: float) -> bool:
        return self._is_stopped() or self._total_samples() >= samples

    def _until(self, samples: int, passes: Iterator[Batch]) -> Iterator[Batch]:
        while not self._has_ended(samples):
            yield next(passes)
            self._between()

    def _passes(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, each counted, pass after pass without end."""
        self._position.begin()
        self._counted = 0
        while True:
            for batch in self._position.epoch(loader):
                self._count(batch)
                yield batch
            if self._position.batch == 0:
                raise ValueError(
                    "the loader yielded no batch: it is empty, or it is an iterator that can "
                    "be gone through only once (pass the loader itself)"
                )

    def _count(self, batch: Any) -> None:
        if self._samples_per_step is not None:
            return
        samples = _batch_size(batch, self._batch_dim)
        if samples is None:
            raise ValueError(
                f"a batch of type {type(batch).__name__} holds no tensor with a dimension "
                f"{self._batch_dim} that would tell its samples: wrap with samples_per_step="
            )
        self._counted += samples

    @contextlib.contextmanager
    def _yielding(self) -> Iterator[None]:
        with self._within():
            self._is_yielding = True
            try:
                yield
            finally:
                self._is_yielding = False


def _batch_size(batch: Any, batch_dim: int) -> int | None:
    """Return the size of a batch's first tensor along ``batch_dim``; None where there is none."""
    found = _first_tensor(batch)
    return found.shape[batch_dim] if found is not None and found.dim() > batch_dim else None


def _first_tensor(value: Any) -> Tensor | None:
    """Look into mappings, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, (list, tuple)):
        return None
    return next((t for t in map(_first_tensor, value) if t is not None), None)


def dataset_size(loader: Any) -> int:
    """Return how many samples the loader's dataset holds.

    Raises:
        ValueError: nobody can tell.
    """
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        raise ValueError(
            "the loader does not say how many samples its dataset holds: give epochs(..., "
            "samples=), the samples of one epoch of all workers together"
        ) from None


class DataPosition:
    """The epoch and the batch at which ``batches()`` is, and how to come back there.

    An epoch's order follows from the random states at its start (and from ``set_epoch``), so these
    are kept: to come back, they are set, the epoch is begun, and the batches that were trained on
    are loaded and dropped. ``batch`` counts those that were yielded or dropped.
    """

    def __init__(self) -> None:
        self.batch = 0
        self._epoch = 0
        self._start: dict[str, Any] | None = None
        self._goes_on = False
        self._resumed: dict[str, Any] | None = None
        self._random_states: dict[str, Any] | None = None

    def capture(self) -> dict[str, Any]:
        """Return what :meth:`resume` takes."""
        return {"epoch": self._epoch, "batch": self.batch, "start": self._start}

    def resume(
        self, position: dict[str, Any], random_states: dict[str, Any] | None, *, is_own: bool
    ) -> None:
        """Make the next :meth:`epoch` go on where ``position`` was captured.

        The random states are set once it is reached. If this worker's share of the data is not the
        one that it was captured in (``is_own``), the epoch begins anew.
        """
        self._epoch = position["epoch"]
        self._goes_on = True
        if is_own and position["start"] is not None:
            self._resumed = position
            self._random_states = random_states

    def begin(self) -> None:
        """Count epochs from 0, unless the position was just resumed."""
        if not self._goes_on:
            self._epoch = 0
        self._goes_on = False

    def epoch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of one epoch, or what a resumed one has left."""
        resumed, self._resumed = self._resumed, None
        samplers, generators = _sources_of_order(loader)
        if resumed is not None:
            self._start = start = resumed["start"]
            restore_random_states(start["random"])
            for generator, state in zip(generators, start["generators"], strict=False):
                generator.set_state(state)
        else:
            states = [generator.get_state() for generator in generators]
            self._start = {"random": random_states(), "generators": states}
        self.batch = 0
        # torch's DistributedSampler has one, and so have loaders and samplers of Accelerate.
        for holder in (loader, *samplers):
            set_epoch = getattr(holder, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
        iterator = iter(loader)
        if resumed is not None:
            for _ in range(resumed["batch"]):
                if next(iterator, self) is self:
                    break
                self.batch += 1
            if self._random_states is not None:
                restore_random_states(self._random_states)
        for batch in iterator:
            self.batch += 1
            yield batch
        self._epoch += 1


def _sources_of_order(loader: Any) -> tuple[list[Any], list[torch.Generator]]:
    """The distinct samplers (some may be None) and generators from which a DataLoader draws."""
    if not isinstance(loader, DataLoader):
        return [], []
    within = getattr(loader.batch_sampler, "sampler", None)
    samplers = {id(each): each for each in (loader.sampler, loader.batch_sampler, within)}
    found = [getattr(holder, "generator", None) for holder in (loader, *samplers.values())]
    generators = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(samplers.values()), list(generators.values())


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and torch, in host memory.

    NumPy's where it was imported, those of CUDA where it was used.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        state: Any = numpy.random.get_state()  # of its Mersenne twister
        kind, key, *rest = state
        states["numpy"] = (str(kind), torch.from_numpy(key.copy()), *map(float, rest))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators to what :func:`random_states` gave."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        kind, key, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((kind, key.numpy(), int(position), int(has_gauss), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
