"""A stand-in for a GPU: what torch does to its tensors is done late, in any order allowed.

Its tensors are in host memory, so everything can be compared bit for bit. Within
:meth:`DeferredDevice.used`, every operation of torch on one of them (an optimizer's, an exchange's)
is queued on the calling thread's stream, and done at some time before whoever waits for it goes on:
each stream's in order, one stream beside the other as the seed will have it. Until then results
are NaN.

As with CUDA, a copy between the device and plain host memory is waited for, one of those that are
``non_blocking`` is not; reading a number (``float()``, ``bool()``) waits for the stream.
"""

import bisect
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import BufferChunk
from gossipdp.dynamics.device import Mark, QueuedDevice
from gossipdp.dynamics.state import State

MAIN, GOSSIP = "main", "gossip"
aten = torch.ops.aten
READS_A_NUMBER = {aten._local_scalar_dense.default, aten.equal.default}
ALLOCATES = {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(views):
        yield


@dataclass
class _Task:
    run: Callable[[], object]
    is_ready: Callable[[], bool] = field(default=lambda: True)


class DeferredDevice(QueuedDevice):
    """See the module.

    Args:
        seed: of the order in which work is done.
        breaks: rules that it does not keep, to show that a test would see it: "precede", "leave",
            "wait" (of marks), "finish".

    Attributes:
        stream: the calling thread's.
        on_finish: called where a thread waits for its stream: what another thread may do meanwhile.
        num_deferred: operations so far.
    """

    def __init__(self, seed: int, breaks: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.breaks = breaks
        self.on_finish: Callable[[], None] | None = None
        self.num_deferred = 0
        self._random = Random(seed)
        self._turn = threading.RLock()
        self._streams: dict[str, deque[_Task]] = {MAIN: deque(), GOSSIP: deque()}
        self._slow = MAIN
        self._local = threading.local()
        # Kept, so that no address is used twice; by address, in ascending order.
        self._storages: list[tuple[int, Any]] = []

    @property
    def stream(self) -> str:
        return getattr(self._local, "stream", MAIN)

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Let the calling thread queue on ``stream``."""
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Defer what this thread does with the device's tensors."""
        update._kept.rooms.clear()  # scratch that was made before is not the device's
        with _Deferred(self):
            yield

    def adopt(self, *tensors: Tensor) -> None:
        """Let these be the device's."""
        for tensor in tensors:
            if not self.holds(tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                bisect.insort(self._storages, (storage.data_ptr(), storage), key=_address)

    def adopt_state(self, state: State) -> None:
        for segment in state.segments + state.moments:
            self.adopt(segment.x, segment.pending)
            if segment.c is not None:
                self.adopt(segment.c)
            if segment.outer is not None:
                self.adopt(segment.outer.base, segment.outer.m)
            self.adopt(*(each.seen for each in segment.chunks if isinstance(each, BufferChunk)))

    # What a stream does.

    def queue(self, run: Callable[[], object], is_ready: Callable[[], bool] | None = None) -> None:
        with self._turn:
            task = _Task(run) if is_ready is None else _Task(run, is_ready)
            self._streams[self.stream].append(task)
            self.num_deferred += 1
            while self._random.random() < 0.4 and self._work():
                pass

    def _work(self) -> bool:
        """Do the next task of some stream; False where none may be done."""
        ready = [queue for queue in self._streams.values() if queue and queue[0].is_ready()]
        if not ready:
            return False
        if self._random.random() < 0.1:
            self._slow = self._random.choice(list(self._streams))
        # One of them far behind the other, now this, now that.
        quick = [queue for queue in ready if queue is not self._streams[self._slow]]
        task = (quick or ready)[0].popleft()
        # Autograd has had its part when the work was asked for.
        with _disable_current_modes(), _below_autograd():
            task.run()
        return True

    def work_until(self, condition: Callable[[], bool]) -> None:
        with self._turn:
            while not condition():
                assert self._work(), "streams wait for each other"

    # What the engine asks for.

    @contextlib.contextmanager
    def gossip_thread(self) -> Iterator[None]:
        with self.on(GOSSIP), self.used():
            try:
                yield
            finally:
                self.finish()

    def finish(self) -> None:
        if self.on_finish is not None:
            meanwhile, self.on_finish = self.on_finish, None
            try:
                meanwhile()
            finally:
                self.on_finish = meanwhile
        if "finish" not in self.breaks:
            self.wait_for_stream()

    def wait_for_stream(self) -> None:
        queue = self._streams[self.stream]
        self.work_until(lambda: not queue)

    def finish_all(self) -> None:
        self.work_until(lambda: not any(self._streams.values()))

    def mark(self) -> Mark:
        return _Mark(self)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def room(self, num_bytes: int) -> Tensor:
        with _disable_current_modes():
            room = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.adopt(room)
        return room

    def holds(self, values: Tensor) -> bool:
        """Return whether they are in the device's memory, or in a storage over a piece of it."""
        address = values.untyped_storage().data_ptr()
        place = bisect.bisect_right(self._storages, address, key=_address) - 1
        if place < 0:
            return False
        start, storage = self._storages[place]
        return address < start + storage.nbytes()


def _address(held: tuple[int, Any]) -> int:
    return held[0]


class _Mark(Mark):
    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self._num_left = self._num_reached = 0

    def _reach(self, number: int) -> None:
        self._num_reached = number

    def leave(self) -> None:
        if "leave" not in self._device.breaks:
            self._num_left += 1
            number = self._num_left
            self._device.queue(lambda: self._reach(number))

    def precede(self) -> None:
        number = self._num_left
        if "precede" not in self._device.breaks:
            self._device.queue(lambda: None, lambda: self._num_reached >= number)

    def wait(self) -> None:
        number = self._num_left
        if "wait" not in self._device.breaks:
            self._device.work_until(lambda: self._num_reached >= number)


class _Deferred(TorchDispatchMode):
    def __init__(self, device: DeferredDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, device = kwargs or {}, self._device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.is_view or not any(map(device.holds, tensors)):
            return func(*args, **kwargs)
        if func in READS_A_NUMBER:
            device.wait_for_stream()
            return func(*args, **kwargs)
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            device.wait_for_stream()
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copy(*args)
        if func._schema.is_mutable:
            device.queue(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        outcome = func(*args, **kwargs)  # of what is there now: only shapes count
        for tensor in tree_leaves(outcome):
            device.adopt(tensor)
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        if func._schema.name not in ALLOCATES:
            device.queue(
                lambda: tree_map(lambda late, now: late.copy_(now), outcome, func(*args, **kwargs))
            )
        return outcome

    def _copy(self, out: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
        device = self._device
        if not non_blocking and not device.holds(values):
            values = values.clone()  # the host may change it as soon as this returns
        device.queue(lambda: out.copy_(values))
        if not non_blocking and not device.holds(out):
            device.wait_for_stream()
        return out
