"""A device that does later what is asked of it: the rules that keep two threads apart there.

Each thread queues on its current stream: the main thread on the user's, the gossip thread on one
of its own (:meth:`Device.gossip_thread`). A stream does its work in order, two streams in any, so
"under the chunk's lock" is not enough. A :class:`Mark` is a place in a stream (a CUDA event):
another stream, or the host, can wait until the work before it is done.

**Rule 1, order.** A chunk's lock carries a mark. Whoever takes the lock makes its stream wait for
the mark, and whoever gives it back leaves the mark behind all that it has queued
(:class:`OrderedLock`). So the chunk's holders work on it in the order in which they held the lock,
whichever threads and streams they are. Marks are left and waited for under the lock, so each wait
is for a mark that is there already: no two streams wait for each other.

- *Snapshot against boundary.* ``x += pending, pending = 0`` is only queued when the main thread
  goes on. A snapshot that came before it on the device, but after it under the lock, would add the
  same pending twice or not at all. It waits for the mark.
- *Boundary against exchange.* The other way round: pending is added to x after it was written.
- *A main thread that reads pending* (``state_dict``) and goes on: what the gossip thread writes
  next waits for the mark of the reader.
- *The user changes streams* between two boundaries: the mark is on the one of before.
- *The flags of a chunk* (theta, whether there is pending) are the host's, and change in the same
  order as the work.

**Rule 2, the step.** x itself is written by queued optimizer steps, without a lock. What holds in
host memory holds here: a snapshot may meet a step half way, of each value the old or the new is
read (aligned values of 2, 4 or 8 bytes are not torn), and both ends use what was read. x is read
once an event: the difference comes from the two snapshots.

**Rule 3, the host reads and writes only what is done.** Snapshots leave through pinned slots
(:class:`Slot`). The host copies out of one after :meth:`Device.finish`, and into one only when the
copy from it to the device is done, which a mark of its own tells. So neither a link nor another
process ever sees memory that the device is still writing, and no slot changes under the device.

**Rule 4, one thread takes over from the other** where x is written by the gossip thread, or read
without locks: the one that hands over calls :meth:`Device.finish` first. The main thread does so
before it starts the gossip thread, waits for ``consolidate`` or has poison replaced; the gossip
thread after ``replace`` and ``adopt_sums``, and at its end.

**Rule 5, the gossip thread waits for its own work alone.** With rule 1 a snapshot waits for the
last boundary, and if the host were many steps ahead of the device it would wait for all of those:
no heartbeat leaves meanwhile, and a live worker is taken for dead. So the main thread finishes its
stream at the start of each boundary, before it takes a lock; what it then queues is done at once,
and no lock's mark lies behind work of the user's. The price is that the host does not run ahead of
the device over a step boundary. The order on the user's stream is not changed, and correctness
does not rest on this rule: only that nobody waits long.

Memory: what a thread allocates while it works belongs to its own stream. What both use (the state,
scratch) is allocated before the gossip thread starts and freed after it was joined, with both
streams finished: else a block could go to one stream that the other's queued work still uses.
"""

import abc
import threading
from collections.abc import Callable
from types import TracebackType
from typing import final

import torch
from torch import Tensor

from gossipdp.dynamics.arithmetic import Arithmetic, ArithmeticName, make_arithmetic
from gossipdp.dynamics.state import Chunk
from gossipdp.runtime.device import ChunkLock, Device


class Mark(abc.ABC):
    """A place in the work of a stream; it can be left again, further on."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Be behind all that the calling thread has queued on its stream."""

    @abc.abstractmethod
    def precede(self) -> None:
        """Come before all that the calling thread queues from now on; the host does not wait.

        It is this place that is waited for, even if the mark is left elsewhere later.
        """

    @abc.abstractmethod
    def wait(self) -> None:
        """Return when the work before it is done; at once, if it was never left."""


class QueuedDevice(Device):
    """What :class:`Device` asks for, by streams and marks; see the module for the rules."""

    @abc.abstractmethod
    def mark(self) -> Mark:
        """Return a new mark that was left nowhere."""

    @abc.abstractmethod
    def pinned(self, num_bytes: int) -> Tensor:
        """Return host memory of type uint8 that the device copies from and to by itself."""

    @abc.abstractmethod
    def room(self, num_bytes: int) -> Tensor:
        """Return device memory of type uint8."""

    @abc.abstractmethod
    def holds(self, values: Tensor) -> bool:
        """Whether ``values`` is in the device's memory."""

    @final
    def lock(self) -> ChunkLock:
        """See :class:`Device`."""
        return OrderedLock(self.mark())

    @final
    def write(self, write: Callable[[Tensor], None], out: Tensor) -> None:
        """See :class:`Device`."""
        if self.holds(out):
            write(out)
            return
        there = self.room(out.nbytes).view(out.dtype)
        write(there)
        out.copy_(there)
        self.finish()

    @final
    def in_host_memory(self, values: Tensor) -> Tensor:
        """See :class:`Device`."""
        return torch.empty(values.shape, dtype=values.dtype)

    @final
    def arithmetic(self, name: ArithmeticName, x: Tensor, scratch: Tensor) -> Arithmetic:
        """See :class:`Device`."""
        return StagedArithmetic(self, make_arithmetic(name, x, scratch))


@final
class OrderedLock:
    """Rule 1: a lock whose holders' work is done in the order in which they held it."""

    def __init__(self, mark: Mark) -> None:
        self._lock = threading.Lock()
        self._mark = mark

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; what is queued from now on comes after the work of all holders before."""
        if not self._lock.acquire(blocking):
            return False
        try:
            self._mark.precede()
        except BaseException:
            self._lock.release()
            raise
        return True

    def release(self) -> None:
        """Give it back, with the mark behind what was queued."""
        try:
            self._mark.leave()
        finally:
            self._lock.release()

    def __enter__(self) -> bool:
        """Take it."""
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.release()


@final
class Slot:
    """Rule 3: a chunk's way between host memory and the device. One thread's."""

    def __init__(self, device: QueuedDevice, num_bytes: int) -> None:
        self._pinned = device.pinned(num_bytes)
        self._there = device.room(num_bytes)
        self._device = device
        self._loaded = device.mark()

    def there(self, like: Tensor) -> Tensor:
        """Return the device's part, as ``like`` in host memory."""
        return self._there[: like.nbytes].view(like.dtype)

    def load(self, values: Tensor) -> Tensor:
        """Copy ``values`` to the device; they may change as soon as this returns."""
        self._loaded.wait()  # or the device might read the new values for the old
        pinned = self._pinned[: values.nbytes].view(values.dtype)
        pinned.copy_(values)
        there = self.there(values)
        there.copy_(pinned, non_blocking=True)
        self._loaded.leave()
        return there

    def store(self, out: Tensor) -> None:
        """Copy what is in the device's part to ``out``; it is there when this returns."""
        self._loaded.wait()  # the device may read the slot yet
        pinned = self._pinned[: out.nbytes].view(out.dtype)
        pinned.copy_(self.there(out), non_blocking=True)
        self._device.finish()
        out.copy_(pinned)


@final
class StagedArithmetic(Arithmetic):
    """Computes on the device, by ``inner``, with snapshots that come from and go to the host.

    Same-host workers exchange so too: through the shared memory between their hosts' processes.
    """

    def __init__(self, device: QueuedDevice, inner: Arithmetic) -> None:
        super().__init__(inner.scratch)
        self.name = f"{inner.name} on the device"
        self._inner = inner
        # A snapshot is at most as wide as pending.
        self._mine = Slot(device, inner.scratch.nbytes)
        self._peers = Slot(device, inner.scratch.nbytes)

    def prepare(self, x: torch.dtype, wire: torch.dtype) -> None:
        """See :class:`Arithmetic`."""
        self._inner.prepare(x, wire)

    def snapshot(self, chunk: Chunk, out: Tensor, decay: float) -> bool:
        """See :class:`Arithmetic`."""
        is_finite = self._inner.snapshot(chunk, self._mine.there(out), decay)
        self._mine.store(out)
        return is_finite

    def exchange(
        self, chunk: Chunk, mine: Tensor, peers: Tensor, decay: float, alpha_tilde: float
    ) -> float:
        """See :class:`Arithmetic`."""
        there = self._mine.load(mine), self._peers.load(peers)
        return self._inner.exchange(chunk, *there, decay, alpha_tilde)

    def snapshot_and_exchange(
        self, chunk: Chunk, out: Tensor, peers: Tensor, decay: float, alpha_tilde: float
    ) -> float:
        """See :class:`Arithmetic`; the difference is that of the snapshot which leaves."""
        there = self._peers.load(peers)
        squared_norm = self._inner.snapshot_and_exchange(
            chunk, self._mine.there(out), there, decay, alpha_tilde
        )
        self._mine.store(out)
        return squared_norm

    def boundary(self, chunk: Chunk, decay: float) -> None:
        """See :class:`Arithmetic`."""
        self._inner.boundary(chunk, decay)

    def squared_distance(self, one: Tensor, other: Tensor) -> float:
        """See :class:`Arithmetic`; ``other`` is in host memory."""
        return self._inner.squared_distance(one, self._peers.load(other))
