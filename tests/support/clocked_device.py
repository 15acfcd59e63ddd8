"""A stand-in for a GPU that knows, for each access to its memory, which others are before it.

Its tensors are in host memory, and each operation is done at once, so values are those of host
memory. It checks their order, as torch's sanitizer of CUDA streams does. A stream, and a thread of
the host, is an actor with a clock: the number of its own last step, and of each other actor's step
that it is known to come after.

- What a thread queues comes after all that the thread knows.
- A mark keeps the clock of the stream on which it was left; a stream or a thread that waits for the
  mark takes this clock in. A thread that waits for its stream takes in the stream's.
- Threads know nothing of each other, unless :meth:`ClockedDevice.meet` says that one of them has
  handed over to the other.

A read must come after all writes of those bytes, a write after all reads and writes. If not,
:class:`OutOfOrderError` says so, however the work was timed. A step of the user's may write x
beside a snapshot (rule 2 of :mod:`gossipdp.dynamics.device`).

As with CUDA, a copy between the device and plain host memory is waited for, one of those that are
``non_blocking`` is not; reading a number (``float()``, ``bool()``) waits for the stream.
"""

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import BufferChunk
from gossipdp.dynamics.device import Mark, Order, QueuedDevice
from gossipdp.dynamics.state import State

MAIN, GOSSIP = "main", "gossip"
aten = torch.ops.aten
READS_A_NUMBER = {aten._local_scalar_dense.default, aten.equal.default}
ALLOCATES = {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}

Clock = dict[str, int]


class OutOfOrderError(AssertionError):
    """Two accesses to the same bytes, one of them a write, of which neither is before the other."""


@dataclass(frozen=True)
class _Access:
    start: int
    end: int
    actor: str
    time: int
    what: str
    is_write: bool
    is_ordered: bool
    """It was made by the holder of a lock, within the lock's order."""

    def meets(self, other: "_Access") -> bool:
        return self.start < other.end and other.start < self.end


@dataclass
class _Storage:
    start: int
    end: int
    held: Any  # so that no address is used twice
    is_pinned: bool = False
    is_x: bool = False
    """Read by snapshots beside steps and boundaries."""
    accesses: list[_Access] = field(default_factory=list)


class ClockedDevice(QueuedDevice):
    """See the module.

    Args:
        is_strict: threads hand over by :meth:`meet` alone. Else one thread knows what another one
            has waited for: for real threads, of which nobody can say when they meet.

    Attributes:
        stream: the calling thread's.
        on_finish: called where a thread waits for its stream: what another thread may do meanwhile.
        num_operations: so far.
        holders: the streams of the threads that hold a lock.
    """

    def __init__(self, *, is_strict: bool = True) -> None:
        super().__init__()
        self.on_finish: Callable[[], None] | None = None
        self.num_operations = 0
        self.holders: set[str] = set()
        self._is_strict = is_strict
        self._turn = threading.RLock()
        self._clocks: dict[str, Clock] = {}
        self._local = threading.local()
        # In the order of their addresses, which are beside them.
        self._storages: list[_Storage] = []
        self._starts: list[int] = []

    @property
    def stream(self) -> str:
        return getattr(self._local, "stream", MAIN)

    @property
    def host(self) -> str:
        return f"{self.stream}'s thread" if self._is_strict else "the host"

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Let the calling thread queue on ``stream``, as its thread, and watch what it does."""
        before, self._local.stream = self.stream, stream
        try:
            with self.used():
                yield
        finally:
            self._local.stream = before

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Watch what this thread does with the device's tensors."""
        # Scratch that was made before is not the device's, or another thread's.
        before, update._kept.rooms = update._kept.rooms, {}
        try:
            with _Watched(self):
                yield
        finally:
            update._kept.rooms = before

    def adopt(self, *tensors: Tensor, is_pinned: bool = False, is_x: bool = False) -> None:
        """Let these be the device's."""
        with self._turn:
            for tensor in tensors:
                if tensor.numel() and self._storage(tensor) is None:
                    held = tensor.untyped_storage()
                    start = held.data_ptr()
                    place = bisect.bisect_right(self._starts, start)
                    self._starts.insert(place, start)
                    storage = _Storage(start, start + held.nbytes(), held, is_pinned, is_x)
                    self._storages.insert(place, storage)

    def adopt_state(self, state: State) -> None:
        for segment in state.segments + state.moments:
            self.adopt(segment.x, is_x=True)
            # A snapshot may read what a boundary has taken beside it.
            self.adopt(segment.pending, *segment._inboxes, is_x=bool(segment._inboxes))
            if segment.c is not None:
                self.adopt(segment.c)
            self.adopt(*(each.seen for each in segment.chunks if isinstance(each, BufferChunk)))

    # The clocks.

    def clock(self, actor: str) -> Clock:
        return self._clocks.setdefault(actor, {})

    def learns(self, actor: str, clock: Clock) -> None:
        """Let all that ``actor`` does from now on come after ``clock``."""
        with self._turn:
            own = self.clock(actor)
            for other, time in clock.items():
                own[other] = max(time, own.get(other, 0))

    def queues(self) -> str:
        """Return the stream, which begins another step after all that its thread knows."""
        with self._turn:
            self.learns(self.stream, self.clock(self.host))
            self.ticks(self.stream)
            return self.stream

    def ticks(self, actor: str) -> None:
        with self._turn:
            clock = self.clock(actor)
            clock[actor] = clock.get(actor, 0) + 1

    def meet(self) -> None:
        """Let both threads know all that either knows: one has handed over to the other."""
        hosts = [f"{stream}'s thread" for stream in (MAIN, GOSSIP)]
        for one, other in (hosts, reversed(hosts), hosts):
            self.learns(one, self.clock(other))

    def access(self, actor: str, values: Tensor, what: str, *, is_write: bool) -> None:
        """Note one access to a tensor's memory.

        Raises:
            OutOfOrderError: it is not known to come after another one.
        """
        if not values.numel():
            return
        storage = self._storage(values)
        with self._turn:
            clock = self.clock(actor)
            start, last = values.data_ptr(), zip(values.shape, values.stride(), strict=True)
            end = start + values.itemsize * (1 + sum((size - 1) * step for size, step in last))
            is_ordered = self.stream in self.holders
            new = _Access(start, end, actor, clock[actor], what, is_write, is_ordered)
            kept = []
            for old in storage.accesses:
                is_before = clock.get(old.actor, 0) >= old.time
                is_covered = new.start <= old.start and old.end <= new.end
                if not is_before and new.meets(old) and (is_write or old.is_write):
                    self._check(storage, old, new)
                is_same = old.actor == actor and old.is_write == is_write
                is_same &= old.is_ordered == is_ordered
                if not (is_covered and is_before and (is_write or is_same)):
                    kept.append(old)
            storage.accesses = [*kept, new]

    @staticmethod
    def _check(storage: _Storage, old: _Access, new: _Access) -> None:
        (write, other) = (old, new) if old.is_write else (new, old)
        if storage.is_x and not other.is_write and not write.is_ordered:
            return  # rule 2: a snapshot beside a step
        verbs = ["writes" if each.is_write else "reads" for each in (old, new)]
        raise OutOfOrderError(
            f"{new.what} of {new.actor} {verbs[1]} memory that {old.what} of {old.actor} "
            f"{verbs[0]}, and waits for nothing that comes after it"
        )

    def _storage(self, values: Tensor) -> _Storage | None:
        """Return the storage that holds these bytes: the tensor's, or one that its lies in."""
        address = values.untyped_storage().data_ptr()
        with self._turn:
            place = bisect.bisect_right(self._starts, address) - 1
            found = self._storages[place] if place >= 0 else None
        return found if found is not None and address < found.end else None

    # What the engine asks for.

    @contextlib.contextmanager
    def gossip_thread(self) -> Iterator[None]:
        with self.on(GOSSIP):
            try:
                yield
            finally:
                self.finish()

    def order(self) -> contextlib.AbstractContextManager[None]:
        return _WatchedOrder(self)

    def finish(self) -> None:
        if self.on_finish is not None:
            meanwhile, self.on_finish = self.on_finish, None
            try:
                meanwhile()
            finally:
                self.on_finish = meanwhile
        self.wait_for_stream()

    def wait_for_stream(self) -> None:
        self.learns(self.host, self.clock(self.stream))

    def follow_gossip(self) -> None:
        self.learns(MAIN, self.clock(GOSSIP))
        # Inboxes change hands under their locks, with what the main thread has waited for.
        self.learns(f"{GOSSIP}'s thread", self.clock(self.host))

    def finish_all(self) -> None:
        for stream in (MAIN, GOSSIP):
            self.learns(self.host, self.clock(stream))

    def mark(self) -> Mark:
        return _Mark(self)

    def pinned(self, num_bytes: int) -> Tensor:
        return self.room(num_bytes, is_pinned=True)

    def room(self, num_bytes: int, *, is_pinned: bool = False) -> Tensor:
        with _disable_current_modes():
            room = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.adopt(room, is_pinned=is_pinned)
        return room

    def holds(self, values: Tensor) -> bool:
        """Return whether they are in the device's memory, or in a storage over a piece of it."""
        storage = self._storage(values)
        return storage is not None and not storage.is_pinned

    def is_pinned(self, values: Tensor) -> bool:
        storage = self._storage(values)
        return storage is not None and storage.is_pinned


class HostAsCard(QueuedDevice):
    """Host memory that is treated as a card: the same operations in the same order, at once."""

    def mark(self) -> Mark:
        return Mark()

    def follow_gossip(self) -> None: ...

    def finish_all(self) -> None: ...

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    room = pinned

    def is_pinned(self, values: Tensor) -> bool:
        return False

    def holds(self, values: Tensor) -> bool:
        return True


class _WatchedOrder(contextlib.AbstractContextManager[None]):
    """An order that lets the device know of what a lock's holder does."""

    def __init__(self, device: ClockedDevice) -> None:
        self._order, self._device = Order(device), device

    def __enter__(self) -> None:
        self._order.__enter__()
        self._device.holders.add(self._device.stream)

    def __exit__(self, *error: object) -> None:
        self._device.holders.discard(self._device.stream)
        self._order.__exit__(*error)


class _Mark(Mark):
    """A mark that is past as soon as a thread has waited for it, and not before."""

    def __init__(self, device: ClockedDevice) -> None:
        self._device = device
        self._clock: Clock = {}
        self._is_past = True

    def leave(self) -> None:
        self._clock = dict(self._device.clock(self._device.queues()))
        self._is_past = False

    def precede(self) -> None:
        self._device.learns(self._device.stream, self._clock)

    def wait(self) -> None:
        self._device.learns(self._device.host, self._clock)
        self._is_past = True

    def is_past(self) -> bool:
        if self._is_past:
            self._device.learns(self._device.host, self._clock)
        return self._is_past


class _Watched(TorchDispatchMode):
    def __init__(self, device: ClockedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, device = kwargs or {}, self._device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.is_view or not any(map(device._storage, tensors)):
            return func(*args, **kwargs)
        is_queued = any(map(device.holds, tensors))
        # A copy that is not waited for touches pinned memory when the device does it.
        is_late = func is aten.copy_.default and True in (*args[2:], kwargs.get("non_blocking"))
        stream = device.queues() if is_queued else ""
        device.ticks(device.host)
        device.num_operations += is_queued
        if func._schema.name in ALLOCATES:  # it reads a shape, and no value
            outcome = func(*args, **kwargs)
            if kwargs.get("device") != torch.device("cpu"):
                device.adopt(outcome)
            return outcome
        arguments = func._schema.arguments
        named = [(each, kwargs[each.name]) for each in arguments if each.name in kwargs]
        for argument, given in [*zip(arguments, args, strict=False), *named]:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for each in tree_leaves(given):
                if isinstance(each, Tensor) and device._storage(each) is not None:
                    is_late_access = is_queued and (device.holds(each) or is_late)
                    actor = stream if is_late_access else device.host
                    device.access(actor, each, str(func), is_write=is_write)
        outcome = func(*args, **kwargs)
        to_host = func is aten.copy_.default and not device.holds(args[0])
        to_host |= func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if is_queued and (func in READS_A_NUMBER or (to_host and not is_late)):
            device.wait_for_stream()
        elif is_queued and not to_host and not func._schema.is_mutable:
            for each in tree_leaves(outcome):
                if isinstance(each, Tensor):
                    device.adopt(each)
                    device.access(stream, each, str(func), is_write=True)
        return outcome
