"""The position of a loop in its data, and the way back there after a resume."""

import logging
import random
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

logger = logging.getLogger("gossipdp")

Batch = TypeVar("Batch")


class DataPosition:
    """The epoch and the batch at which ``batches()`` is.

    An epoch's order follows from ``set_epoch`` and from the random states at its start, so these
    are kept. To come back, they are set, the epoch is begun, and the batches that were trained on
    are loaded and dropped. ``batch`` counts those that were yielded or dropped.
    """

    def __init__(self) -> None:
        self.batch = self._epoch = 0
        self._start: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        self._random_states: dict[str, Any] | None = None

    def capture(self) -> dict[str, Any]:
        """Return the position, for :meth:`resume`; before a pass, the one that was resumed."""
        if self._resumed is not None:
            return self._resumed
        return {"epoch": self._epoch, "batch": self.batch, "start": self._start}

    def resume(
        self, position: dict[str, Any], random_states: dict[str, Any] | None, *, is_own: bool
    ) -> None:
        """Make the next :meth:`epoch` go on where ``position`` was captured.

        The random states are set once that place is reached. If it was captured in another share of
        the data than this worker's (not ``is_own``), the epoch starts from its beginning.
        """
        self._epoch = position["epoch"]
        if is_own and position["start"] is not None:
            self._resumed = position
            self._random_states = random_states

    def epoch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of one epoch, or the rest of a resumed one."""
        resumed, self._resumed = self._resumed, None
        order = _Order(loader)
        if resumed is None:
            self._start = order.capture()
        else:
            self._start = resumed["start"]
            order.restore(resumed["start"])
        self.batch = 0
        order.set_epoch(self._epoch)
        iterator = iter(loader)
        if resumed is not None:
            self._drop(iterator, resumed["batch"], order.doubt())
        for batch in iterator:
            self.batch += 1
            yield batch
        self._epoch += 1

    def _drop(self, iterator: Iterator[Batch], num_batches: int, doubt: str) -> None:
        """Pass over the batches that were trained on before, and set the random states after."""
        if num_batches and doubt:
            logger.warning(
                "the run goes on in the middle of a pass through the loader, after %d batches, "
                "which are loaded and dropped; but %s, so samples may come twice or not at all",
                num_batches,
                doubt,
            )
        while self.batch < num_batches and next(iterator, self) is not self:
            self.batch += 1
        if self.batch < num_batches:
            logger.warning(
                "the loader ended after %d of the %d batches that were trained on before: it is "
                "not what it was, and the next pass begins",
                self.batch,
                num_batches,
            )
        if self._random_states is not None:
            restore_random_states(self._random_states)


class _Order:
    """The states that decide the order of a loader's batches.

    Samplers, the loader and its dataset may hold random generators of their own, of torch, Python
    or NumPy. If the loader is not torch's, only its ``set_epoch`` is known.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_loader = isinstance(loader, DataLoader)
        self._holders = [loader]
        if self._is_loader:
            self._holders += [loader.batch_sampler, loader.sampler, loader.dataset]
        # Not at the top: the name ``numpy.random`` makes numpy import it, and cython with it.
        arrays = numpy.random.Generator, numpy.random.RandomState
        self._generators: dict[str, Any] = {}
        seen = {id(holder) for holder in self._holders}
        for index, holder in enumerate(self._holders):  # a sampler may hold another, and a dataset
            for name, value in getattr(holder, "__dict__", {}).items():
                if id(value) in seen or isinstance(value, random.SystemRandom):
                    continue
                seen.add(id(value))
                if isinstance(value, (Sampler, Dataset)):
                    self._holders.append(value)
                elif isinstance(value, (torch.Generator, random.Random, *arrays)):
                    self._generators[f"{index}.{name}"] = value

    def capture(self) -> dict[str, Any]:
        """Return the states before a pass begins, for :meth:`restore`."""
        return {
            "random": random_states(),
            "generators": {name: _state(each) for name, each in self._generators.items()},
            "has_workers": self._has_workers(),
        }

    def restore(self, start: dict[str, Any]) -> None:
        """Make the next pass begin as the captured one did.

        A loader draws a random number when it starts worker processes. Persistent ones start at
        its first pass alone, so those of a later pass are started before the states are set.
        """
        if self._is_loader and self._has_workers() != start["has_workers"]:
            self._loader._iterator = None
            if start["has_workers"]:
                DataLoader.__iter__(self._loader)
        restore_random_states(start["random"])
        for name, generator in self._generators.items():
            if name in start["generators"]:
                _set_state(generator, start["generators"][name])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that begins, as on a ``DistributedSampler`` and Accelerate's loaders."""
        for holder in self._holders:
            set_epoch = getattr(holder, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)

    def doubt(self) -> str:
        """Return why a pass may not come again as it was; empty if no reason is known."""
        if not self._is_loader:
            return ""
        if isinstance(self._loader.dataset, IterableDataset):
            return "an IterableDataset alone knows what it yields, and its state is not saved"
        if self._loader.num_workers and not self._loader.in_order:
            return "with in_order=False the order of its batches depends on timing"
        return ""

    def _has_workers(self) -> bool:
        return getattr(self._loader, "_iterator", None) is not None


def _state(generator: Any) -> Any:
    """Return the state of a random generator, as values that a checkpoint can hold.

    ``generator``: torch's, Python's or NumPy's, or the modules ``random`` and ``numpy.random``,
    which stand for the one that all share.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        state = generator.bit_generator.state
    elif hasattr(generator, "getstate"):
        state = generator.getstate()
    else:
        state = generator.get_state(legacy=False)
    return tree_map_only(numpy.ndarray, lambda held: torch.from_numpy(held.copy()), state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
        return
    state = tree_map_only(torch.Tensor, torch.Tensor.numpy, state)
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and torch, in host memory.

    If an accelerator was used, its states too, by the name that torch has for it.
    """
    states: dict[str, Any] = {
        "python": _state(random),
        "numpy": _state(numpy.random),
        "torch": torch.get_rng_state(),
    }
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        module = torch.get_device_module(accelerator)
        if module.is_initialized():
            states[accelerator.type] = module.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators to the states of :func:`random_states`."""
    _set_state(random, states["python"])
    _set_state(numpy.random, states["numpy"])
    torch.set_rng_state(states["torch"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in states:
        torch.get_device_module(accelerator).set_rng_state_all(states[accelerator.type])
