"""A worker's way through its data: sizes of batches, the position, and how to come back there."""

import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

Batch = TypeVar("Batch")


def batch_size(batch: Any, batch_dim: int) -> int | None:
    """Return the samples in a batch: the size of its first tensor along ``batch_dim``.

    Looks into mappings, lists, tuples and dataclasses. None where there is no tensor, or
    where it lacks that dimension.
    """
    found = _first_tensor(batch)
    return found.shape[batch_dim] if found is not None and found.dim() > batch_dim else None


def _first_tensor(value: Any) -> Tensor | None:
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


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and torch, in host memory.

    NumPy's where it was imported, those of CUDA where it was used.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        state = numpy.random.get_state(legacy=False)
        assert isinstance(state, dict)
        keys = state["state"]["key"]
        states["numpy"] = {
            "bit_generator": str(state["bit_generator"]),
            "key": torch.from_numpy(keys.astype("int64")),
            "pos": int(state["state"]["pos"]),
            "has_gauss": int(state["has_gauss"]),
            "gauss": float(state["gauss"]),
        }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators to what :func:`random_states` gave."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        saved = states["numpy"]
        keys = saved["key"].numpy().astype("uint32")
        numpy.random.set_state(
            {
                "bit_generator": saved["bit_generator"],
                "state": {"key": keys, "pos": saved["pos"]},
                "has_gauss": saved["has_gauss"],
                "gauss": saved["gauss"],
            }
        )
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


class DataPosition:
    """The epoch and the batch at which ``batches()`` is, and how to come back there.

    An epoch's order follows from the random states at its start (and from ``set_epoch``), so these
    are kept: to come back, they are set, the epoch is begun, and the batches that were trained on
    are loaded and dropped.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._batch = 0
        self._start: dict[str, Any] | None = None
        self._goes_on = False
        self._resumed: dict[str, Any] | None = None
        self._random_states: dict[str, Any] | None = None

    def capture(self) -> dict[str, Any]:
        """Return the position; what :meth:`resume` takes."""
        return {"epoch": self._epoch, "batch": self._batch, "start": self._start}

    def resume(
        self, position: dict[str, Any], random_states: dict[str, Any] | None, *, is_own: bool
    ) -> None:
        """Make the next :meth:`epoch` go on where ``position`` was captured.

        Args:
            position: what :meth:`capture` gave.
            random_states: to be set once the position is reached.
            is_own: whether this worker's share of the data is the one it was captured in; if not,
                the epoch begins anew.
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
        if resumed is not None:
            self._start = resumed["start"]
            _restore_start(resumed["start"], loader)
        else:
            self._start = _start(loader)
        self._batch = 0
        # torch's DistributedSampler has one, and so have loaders and samplers of Accelerate.
        for holder in (loader, *_samplers(loader)):
            set_epoch = getattr(holder, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
        iterator = iter(loader)
        if resumed is not None:
            for _ in range(resumed["batch"]):
                if next(iterator, self) is self:
                    break
                self._batch += 1
            if self._random_states is not None:
                restore_random_states(self._random_states)
        for batch in iterator:
            self._batch += 1
            yield batch
        self._epoch += 1

    @property
    def batch(self) -> int:
        """How many batches of the present epoch were yielded, or dropped to come back to it."""
        return self._batch


def _start(loader: Any) -> dict[str, Any]:
    return {
        "random": random_states(),
        "generators": [generator.get_state() for generator in _generators(loader)],
    }


def _restore_start(start: dict[str, Any], loader: Any) -> None:
    restore_random_states(start["random"])
    for generator, state in zip(_generators(loader), start["generators"], strict=False):
        generator.set_state(state)


def _samplers(loader: Any) -> list[Any]:
    """The distinct samplers from which a DataLoader takes its order; some may be None."""
    if not isinstance(loader, DataLoader):
        return []
    within = getattr(loader.batch_sampler, "sampler", None)
    samplers = [loader.sampler, loader.batch_sampler, within]
    return list({id(each): each for each in samplers}.values())


def _generators(loader: Any) -> list[torch.Generator]:
    """The distinct generators from which a DataLoader draws its order."""
    if not isinstance(loader, DataLoader):
        return []
    holders = [loader, *_samplers(loader)]
    found = [getattr(holder, "generator", None) for holder in holders]
    distinct = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(distinct.values())
