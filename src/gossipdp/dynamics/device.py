"""The device of the parameters: host memory, which works at once, or a GPU, which queues.

In host memory (:class:`Device`) an operation is done when its call returns, so a lock is all that
two threads need. On a GPU a call only queues, each thread's on a stream of its own: a stream works
in order, two streams in any order. A :class:`Mark` is a place in a stream (a CUDA event) that
others can wait for. Tests check the rules of :class:`QueuedDevice` with a stand-in that works late,
in any order that they allow. :class:`AcceleratorDevice` has run on an NVIDIA H200 and an H100.

**Rule 1, order.** The holder of a chunk's lock first makes its stream wait for the lock's mark, and
in the end leaves the mark behind all that it has queued (:class:`Order`). So the holders' work is
done in the order in which they held the lock, and no two streams wait for each other: each wait is
for a mark that exists. The boundary of a chunk with two inboxes needs no mark.

**Rule 2, what is read.** Queued optimizer steps, and boundaries of inboxes, write x without a lock,
as steps do in host memory. A snapshot may read the old or the new of each value, and both ends use
the values read. Each event reads x once.

**Rule 3, the host sees finished work only.** Snapshots leave and arrive in pinned memory
(:class:`Slot`). The host reads it after :meth:`Device.finish`, and writes it only when the device's
copy from it is done.

**Rule 4, hand-over.** Before one thread takes over x from the other, or reads it without locks, the
other calls :meth:`Device.finish`.

**Rule 5, waits are short.** An exchange that had to wait for what the main thread has queued would
wait for a whole step, and no heartbeat would leave. So trained parameters have two inboxes
(:mod:`~gossipdp.dynamics.inboxes`), and the host runs one boundary ahead of the device
(:class:`Credit`). For what has none (buffers, moments, and all that is rare), the main thread first
finishes its stream, so that its marks are at once past. For a joiner that takes the optimizers'
state it waits at the end of each step.

Memory that both threads use is allocated before the gossip thread starts and freed after it was
joined; scratch belongs to one thread, so to one stream.
"""

import abc
import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor

logger = logging.getLogger("gossipdp")

SWITCH, ON = "GOSSIPDP_UNTRIED_GPU", "yes"
HUGE_PAGE_BYTES = 1 << 21
LEAST_HUGE_BYTES = 16 * HUGE_PAGE_BYTES


def refusal(device: torch.device) -> str | None:
    """Return why parameters on a device of torch's are refused, and the fix; None: they are not."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":  # a ROCm device is one to torch
        return "Exchanges know the CPU and CUDA devices: move the module to the CPU before wrapping"
    if torch.version.hip is None or os.environ.get(SWITCH) == ON:
        return None
    return (
        "The exchange of parameters has run on an NVIDIA GPU, and on no other maker's: set "
        f"{SWITCH}={ON} to try it all the same, or move the module to the CPU before wrapping"
    )


class Device:
    """Host memory, where nothing is queued; a queued device overrides every method."""

    is_queued = False

    def order(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for the holders of a chunk's lock: their work is done in their order."""
        return contextlib.nullcontext()

    def gossip_thread(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the calling thread works as the gossip thread."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Return when all that the calling thread has asked for is done."""

    def mark(self) -> "Mark":
        """Return a new mark, which was not left anywhere yet."""
        return Mark()

    def is_capturing(self) -> bool:
        """Return True if what the calling thread asks for is recorded in a graph, and not done."""
        return False

    def write(self, write: Callable[[Tensor], object], out: Tensor) -> None:
        """Call ``write(out)``, which reads the state; ``out`` may be in host memory."""
        write(out)

    # Snapshots, which are in host memory; the gossip thread's.

    def on_device(self, out: Tensor) -> Tensor:
        """Return the device's buffer for a snapshot, which :meth:`store` then copies to ``out``."""
        return out

    def store(self, out: Tensor, total: Tensor | None = None) -> Tensor | None:
        """Copy the snapshot :meth:`on_device` to ``out``; return when it has arrived.

        Returns:
            ``total``, one number, where the host reads it without waiting.
        """
        return total

    def kept(self, out: Tensor) -> Tensor | None:
        """Return the snapshot that was stored to ``out``, if it is still on the device."""
        return out

    def load(self, number: int, values: Tensor) -> Tensor:
        """Return a copy on the device; ``values`` may change as soon as this returns."""
        return values

    def pin(self, memory: memoryview, *, is_peers: bool) -> object:
        """Let the device copy from and to ``memory`` by itself, as long as the result is held.

        This process may only read the memory that ``is_peers``.
        """
        return None


class Mark:
    """A place in the work of a stream; it can be left again, further on.

    This one is of host memory, where nothing is queued; that of a device overrides every method.
    """

    def leave(self) -> None:
        """Move behind all that the calling thread has queued on its stream."""

    def precede(self) -> None:
        """Make all that the calling thread queues from now on wait; the host does not wait.

        It waits for this place, even if the mark is left elsewhere later.
        """

    def wait(self) -> None:
        """Return when the work before it is done; at once, if it was never left."""

    def is_past(self) -> bool:
        """Return True if :meth:`wait` would return at once."""
        return True


class QueuedDevice(Device, abc.ABC):
    """A device that works later than it is asked; see the module for the rules."""

    is_queued = True

    def __init__(self) -> None:
        # By the number of what is loaded, or by the address to which snapshots are stored. If one
        # is dropped, its snapshot is loaded again.
        self._slots: dict[int, Slot] = {}

    @abc.abstractmethod
    def mark(self) -> Mark: ...

    @abc.abstractmethod
    def follow_gossip(self) -> None:
        """Queue all that the calling thread asks for behind what the gossip thread has queued."""

    @abc.abstractmethod
    def finish_all(self) -> None:
        """Return when all that any thread has asked for so far is done."""

    @abc.abstractmethod
    def pinned(self, num_bytes: int) -> Tensor:
        """Return host memory of type uint8 that the device copies from and to by itself."""

    @abc.abstractmethod
    def is_pinned(self, values: Tensor) -> bool:
        """Return True if the device copies from and to these values of the host by itself."""

    @abc.abstractmethod
    def room(self, num_bytes: int) -> Tensor:
        """Return device memory of type uint8."""

    @abc.abstractmethod
    def holds(self, values: Tensor) -> bool:
        """Return True if ``values`` is in the device's memory."""

    # See Device.

    def order(self) -> "Order":
        return Order(self)

    def write(self, write: Callable[[Tensor], object], out: Tensor) -> None:
        if self.holds(out):
            write(out)
            return
        room = self.room(out.nbytes).view(out.dtype)
        write(room)
        out.copy_(room)  # waits

    def on_device(self, out: Tensor) -> Tensor:
        return self._slot(out.data_ptr(), out).on_device(out)

    def store(self, out: Tensor, total: Tensor | None = None) -> Tensor | None:
        return self._slots[out.data_ptr()].store(out, total)

    def kept(self, out: Tensor) -> Tensor | None:
        slot = self._slots.get(out.data_ptr())
        return slot.on_device(out) if slot is not None and slot.num_bytes >= out.nbytes else None

    def load(self, number: int, values: Tensor) -> Tensor:
        return self._slot(number, values).load(values)

    def _slot(self, number: int, values: Tensor) -> "Slot":
        slot = self._slots.get(number)
        if slot is None or slot.num_bytes < values.nbytes:
            # Torch keeps pinned memory that is dropped until the copies from it are done.
            slot = self._slots[number] = Slot(self, values.nbytes)
        return slot


class _Turns:
    """Whoever leaves it leaves the mark, unless Ctrl+C comes before: then ``_is_left`` is False."""

    def __init__(self, device: QueuedDevice) -> None:
        self.device, self._mark = device, device.mark()
        self._is_left = True

    def __exit__(self, *_: object) -> None:
        self._mark.leave()
        self._is_left = True


@final
class Order(_Turns):
    """Rule 1, for one lock; entered and left by its holder.

    If Ctrl+C throws a holder out before it has left the mark, the next one makes up for it.
    """

    def __enter__(self) -> None:
        """Queue all that follows behind the work of the holders before."""
        if not self._is_left:
            self.device.finish_all()
        self._is_left = False
        self._mark.precede()


@final
class Credit(_Turns):
    """Rule 5: the host is at most one boundary ahead of the device. The main thread's.

    Entered before a boundary, it waits until the work of the boundary before is done. If Ctrl+C
    throws the thread out before the mark is left, the next boundary waits for all of the stream.
    """

    def __enter__(self) -> None:
        self._mark.wait() if self._is_left else self.device.finish()
        self._is_left = False


@final
class Slot:
    """Rule 3: the way of a chunk between host memory and the device. One thread's.

    Memory that is pinned itself needs no copy in between.
    """

    def __init__(self, device: QueuedDevice, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._between: Tensor | None = None
        self._total = device.pinned(4).view(torch.float32)
        self._room = device.room(num_bytes)
        self._device = device
        self._loaded = device.mark()

    def on_device(self, like: Tensor) -> Tensor:
        """Return the device's part, as ``like`` in host memory."""
        return self._room[: like.nbytes].view(like.dtype)

    def load(self, values: Tensor) -> Tensor:
        loaded = self.on_device(values)
        if self._device.is_pinned(values):
            loaded.copy_(values, non_blocking=True)
            self._loaded.leave()
            self._loaded.wait()
        else:
            self._loaded.wait()  # or the device might read the new values for the old
            loaded.copy_(self._pinned(values).copy_(values), non_blocking=True)
            self._loaded.leave()
        return loaded

    def store(self, out: Tensor, total: Tensor | None = None) -> Tensor | None:
        """Copy the device's part to ``out``, and one number beside it; wait once for both."""
        pinned = out if self._device.is_pinned(out) else self._pinned(out)
        pinned.copy_(self.on_device(out), non_blocking=True)
        if total is not None:
            self._total.copy_(total, non_blocking=True)
        self._device.finish()
        if pinned is not out:
            out.copy_(pinned)
        return None if total is None else self._total

    def _pinned(self, values: Tensor) -> Tensor:
        """Return the slot's own pinned memory, as ``values``."""
        if self._between is None:
            self._between = self._device.pinned(self.num_bytes)
        return self._between[: values.nbytes].view(values.dtype)


@final
class AcceleratorDevice(QueuedDevice):
    """One device of the accelerator that torch was built for, and the gossip thread's stream on it.

    That stream's priority is high: its kernels are few and small, and a peer waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream = torch.Stream(device, priority=-1)
        self._queued = torch.Event(device)
        self._of_thread = threading.local()
        self._locked: WeakSet[_Pinned] = WeakSet()
        self._one = torch.ones(1, dtype=torch.float32, device=device)

    @contextlib.contextmanager
    def gossip_thread(self) -> Iterator[None]:
        with self._stream:  # a current stream is a thread's own
            try:
                yield
            finally:
                self.finish()

    def finish(self) -> None:
        mark: Mark | None = getattr(self._of_thread, "mark", None)
        if mark is None:
            mark = self._of_thread.mark = self.mark()
        mark.leave()
        mark.wait()  # the host sleeps, without the interpreter's lock

    def follow_gossip(self) -> None:
        self._queued.record(self._stream)
        torch.accelerator.current_stream(self._device).wait_event(self._queued)

    def finish_all(self) -> None:
        torch.accelerator.synchronize(self._device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def mark(self) -> Mark:
        return _Event(self._device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_pinned(self, values: Tensor) -> bool:
        # Not torch's is_pinned(): the driver may remember pages that are no longer there.
        return any(pinned.holds(values) for pinned in self._locked)

    def pin(self, memory: memoryview, *, is_peers: bool) -> object:
        if not is_peers:
            self._slots.clear()  # of the memory before
        pinned = _Pinned(memory, self._device.index, is_peers=is_peers)
        if pinned.status == 0:
            self._locked.add(pinned)
            return pinned
        text = "%d bytes of exchanges cannot be pinned (error %d of the driver): they are copied"
        logger.info(text, len(memory), pinned.status)
        with contextlib.suppress(RuntimeError):  # the error, which the next launch would meet
            self._one.fill_(1.0)
        return None

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def holds(self, values: Tensor) -> bool:
        return values.device == self._device


@final
class _Event(Mark):
    """An event of CUDA's: a stream that waits for it waits for the place of its last record."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The host sleeps rather than spins, as it would with ``torch.Event`` (torch 2.11).
        self._event = torch.cuda.Event(blocking=True)

    def leave(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def precede(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()

    def is_past(self) -> bool:
        return bool(self._event.query())


@final
class _Pinned:
    """Memory whose pages are locked, so that the device copies from and to them by itself.

    If the driver refuses (``status`` is not 0), chunks go through a :class:`Slot`'s own memory.
    """

    PORTABLE, READ_ONLY = 1, 8
    """The driver's flags: for all devices; of pages that this process may not write."""

    def __init__(self, memory: memoryview, device_index: int | None, *, is_peers: bool) -> None:
        self._memory = memory  # its pages stay mapped until they are unlocked
        self._process_id, self._device_index = os.getpid(), device_index
        self._driver: Any = torch.cuda.cudart()
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        flags = self.PORTABLE | (self.READ_ONLY if is_peers else 0)
        self.status = 0  # so that pages are unlocked even if an interrupt comes now
        with torch.accelerator.device_index(device_index):
            self.status = int(self._driver.cudaHostRegister(self._address, len(memory), flags))

    def holds(self, values: Tensor) -> bool:
        """Return True if all of ``values`` lies here."""
        offset = values.data_ptr() - self._address
        return 0 <= offset <= len(self._memory) - values.nbytes

    def __del__(self) -> None:
        """Unlock the pages, but not in a forked child."""
        if self.status == 0 and self._process_id == os.getpid():
            with torch.accelerator.device_index(self._device_index):
                if int(self._driver.cudaHostUnregister(self._address)):
                    _never_unlocked.append(self._memory)  # other memory must not come there


_never_unlocked: list[memoryview] = []


def device_of(devices: set[torch.device]) -> Device:
    """Return the device of parameters that lie on these devices of torch's.

    Raises:
        ValueError: there are several, or one of a kind that exchanges do not know.
    """
    if devices <= {torch.device("cpu")}:
        return Device()
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"parameters and buffers are on several devices ({names}); move the module to one "
            "before wrapping"
        )
    (device,) = devices
    if device.type != "cuda":
        raise ValueError(f"parameters are on {device}. {refusal(device)}")
    return AcceleratorDevice(device)


def zeros(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in memory of their own; many megabytes of host memory lie on huge pages.

    A pass over pages of 4 KiB takes a sixth longer, because the processor does not read ahead
    across their ends. A kernel without huge pages gives small ones.
    """
    num_bytes = length * dtype.itemsize
    if device.type != "cpu" or num_bytes < LEAST_HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(length, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=private)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    start = -values.data_ptr() % HUGE_PAGE_BYTES
    return values[start : start + num_bytes].view(dtype)
