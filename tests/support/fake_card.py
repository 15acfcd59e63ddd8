"""A card without a driver: torch computes where its tensors are and of which type, and no values.

Within :func:`fake_card` a tensor on ``cuda:0`` is one of torch's ``FakeTensor``: an operation on it
and on a tensor in host memory raises, unless it is a copy, as on a card. Host memory is real. A
copy to it brings ones, and a number that the host reads from the card is 1. The streams and events
that the library makes are stand-ins that do nothing.
"""

import contextlib
import ctypes
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossipdp.dynamics import update
from gossipdp.parallel import moments, packing, shards, views

CARD = torch.device("cuda:0")
SOURCE = str(Path(update.__file__).parents[1])
aten = torch.ops.aten
ALLOCATES = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}


class FakeCard:
    """See the module.

    Attributes:
        reads: the lines of the library where the host has waited for a number, in order.
        finishes: the functions of the library in which the host has waited for its stream.
        num_launches: operations that a card would do, copies included.
        num_waits: times that the host has waited: for a number, a copy, a stream or an event.
        num_events: those that streams have recorded, and waited for.
        num_rooms: allocations.
    """

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.finishes: list[str] = []
        self.num_launches = self.num_waits = self.num_events = self.num_rooms = 0
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.turn = threading.RLock()
        # Kept, so that no place is used twice.
        self._storages: list[torch.UntypedStorage] = []
        self._starts: dict[int, int] = {}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let the calling thread work on the card."""
        update._kept.rooms.clear()  # of another card
        with _Cards(self):
            yield
        update._kept.rooms.clear()

    def address(self, storage: torch.UntypedStorage) -> int:
        """Return where a storage would begin."""
        with self.turn:
            if storage._cdata not in self._starts:
                self._storages.append(storage)
                self._starts[storage._cdata] = len(self._storages) << 32
            return self._starts[storage._cdata]

    def over(self, values: Tensor) -> Tensor:
        """Return these bytes as a tensor with a storage of its own over them, as DLPack does."""
        with self.fakes:
            alone = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        storage = alone.untyped_storage()
        self._storages.append(storage)
        self._starts[storage._cdata] = values.data_ptr()
        return alone


class _Cards(TorchDispatchMode):
    def __init__(self, card: FakeCard) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, card = dict(kwargs or {}), self._card
        kwargs.pop("pin_memory", None)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        place = kwargs.get("device")
        is_made = place is not None and place.type == CARD.type
        if not is_made and not any(isinstance(each, FakeTensor) for each in tensors):
            return func(*args, **kwargs)
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            stack = traceback.extract_stack()
            last = [frame for frame in stack if frame.filename.startswith(SOURCE)][-1]
            card.reads.append(f"{last.name}: {last.line}")
            card.num_waits += 1
            is_number = func is aten._local_scalar_dense.default
            return torch.ones((), dtype=tensors[0].dtype if is_number else torch.bool).item()
        card.num_rooms += func._schema.name in ALLOCATES
        is_idle = func.is_view or func.namespace != "aten" or func._schema.name in ALLOCATES
        card.num_launches += not is_idle
        is_late = func is aten.copy_.default and True in (*args[2:], kwargs.get("non_blocking"))
        to_host = func is aten.copy_.default and not isinstance(args[0], FakeTensor)
        card.num_waits += to_host and not is_late
        with card.turn, card.fakes:
            if to_host:
                func(card.fakes.from_tensor(args[0]), *args[1:], **kwargs)
            else:
                outcome = func(*args, **kwargs)
                if place is None or place.type != "cpu":
                    return outcome
        return args[0].fill_(1) if to_host else torch.ones(outcome.shape, dtype=outcome.dtype)


class _Stream:
    def __init__(self, card: FakeCard) -> None:
        self._card = card
        self._context = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._context.enter_context(self._card.used())

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def wait_event(self, event: "_Event") -> None:
        self._card.num_events += 1


class _Event:
    def __init__(self, card: FakeCard) -> None:
        self._card = card

    def record(self, stream: _Stream) -> None:
        self._card.num_events += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._card.num_waits += 1
        frames = [each for each in traceback.extract_stack() if each.filename.startswith(SOURCE)]
        names = [each.name for each in frames if each.name != "wait"]
        if names[-1] == "finish":
            self._card.finishes.append(next(name for name in reversed(names) if name != "finish"))


def _let_torch_know_cuda() -> None:
    """Let a build for the CPU alone make fake tensors on CUDA devices.

    Python's operators switch to a tensor's device, and such a build has nothing to switch. The
    fake tensors' mode fills that gap only in a build for CUDA.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * 2).in_dll(library, registry)  # the CPU's, which is idle, and CUDA's
    guards[1] = guards[1] or guards[0]


@contextlib.contextmanager
def fake_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    """Let this thread and gossip threads work on a fake card at ``cuda:0``."""
    _let_torch_know_cuda()
    card = FakeCard()
    stream = _Stream(card)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "Stream", lambda device, priority: _Stream(card))
    monkeypatch.setattr(torch, "Event", lambda device, blocking=False: _Event(card))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: _Event(card))
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "current_stream", lambda device: stream)
    driver = SimpleNamespace(cudaHostRegister=lambda *_: 1)  # which pins no memory of others
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())

    def synchronize(device: torch.device) -> None:
        card.num_waits += 1

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    # Addresses, which the fake ones lack.
    real = torch.UntypedStorage.data_ptr

    def start(storage: torch.UntypedStorage) -> int:
        return card.address(storage) if storage.device.type == "meta" else real(storage)

    def address(tensor: FakeTensor) -> int:
        offset = tensor.storage_offset() * tensor.itemsize
        return card.address(tensor.untyped_storage()) + offset

    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", start)
    monkeypatch.setattr(FakeTensor, "data_ptr", address)
    for name, instead in (("to_dlpack", lambda values: values), ("from_dlpack", card.over)):
        given = getattr(views, name)

        def either(values: Tensor, given: Any = given, instead: Any = instead) -> Tensor:
            return instead(values) if isinstance(values, FakeTensor) else given(values)

        monkeypatch.setattr(views, name, either)

    # They are plain tensors here.
    def plain(value: object) -> type:
        return Tensor if isinstance(value, FakeTensor) else type(value)

    for module in (moments, packing, shards):
        monkeypatch.setattr(module, "type", plain, raising=False)
    with card.used():
        yield card
