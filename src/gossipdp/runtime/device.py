"""Where work on the parameters is done: at once, or queued on a device that does it later.

In host memory an operation is done when its call returns, and a lock that is held meanwhile is all
that two threads need. On a GPU a call only queues: two threads that take turns at a lock may still
overlap on the device. :class:`Device` is what differs, and all that differs, between the two;
:class:`~gossipdp.runtime.shared_state.SharedState` is written once. :class:`HostMemory` costs
nothing; :mod:`~gossipdp.runtime.queued_device` holds the rules of the other kind.
"""

import abc
import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, final

import torch
from torch import Tensor

from gossipdp.dynamics.arithmetic import Arithmetic, ArithmeticName, make_arithmetic
from gossipdp.dynamics.state import State


class ChunkLock(Protocol):
    """What ``threading.Lock`` offers, as far as it is used here."""

    def acquire(self, blocking: bool = ...) -> bool:
        """Take it; False where it is not free and ``blocking`` is False."""

    def release(self) -> None:
        """Give it back."""

    def __enter__(self) -> bool:
        """Take it."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Give it back."""


class Device(abc.ABC):
    """Where the state of one worker lives; both of its threads use it."""

    @abc.abstractmethod
    def lock(self) -> ChunkLock:
        """Return a chunk's lock: what its holders do to the chunk happens in their order."""

    @abc.abstractmethod
    def gossip_thread(self) -> contextlib.AbstractContextManager[object]:
        """Everything that the calling thread does within it is the gossip thread's work."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Return when all that the calling thread has asked for is done."""

    @abc.abstractmethod
    def write(self, write: Callable[[Tensor], None], out: Tensor) -> None:
        """Call ``write(out)``, which reads the state; ``out`` may be in host memory."""

    @abc.abstractmethod
    def in_host_memory(self, values: Tensor) -> Tensor:
        """Return ``values`` where it is in host memory, else room for the same there."""

    @abc.abstractmethod
    def arithmetic(self, name: ArithmeticName, x: Tensor, scratch: Tensor) -> Arithmetic:
        """Make what computes with such chunks, for one thread; snapshots are in host memory.

        Args:
            name: what was chosen.
            x: parameters like those it will be given.
            scratch: room for the largest chunk, like its ``pending``.
        """


@final
class HostMemory(Device):
    """Nothing is queued."""

    def lock(self) -> ChunkLock:
        """See :class:`Device`."""
        return threading.Lock()

    def gossip_thread(self) -> contextlib.AbstractContextManager[object]:
        """See :class:`Device`."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """See :class:`Device`."""

    def write(self, write: Callable[[Tensor], None], out: Tensor) -> None:
        """See :class:`Device`."""
        write(out)

    def in_host_memory(self, values: Tensor) -> Tensor:
        """See :class:`Device`."""
        return values

    def arithmetic(self, name: ArithmeticName, x: Tensor, scratch: Tensor) -> Arithmetic:
        """See :class:`Device`."""
        return make_arithmetic(name, x, scratch)


def device_of(state: State) -> Device:
    """Return where the chunks of ``state`` live.

    Raises:
        ValueError: in several places, or in one that nothing is known of.
    """
    devices = {chunk.x.device for chunk in state.all_chunks}
    if devices <= {torch.device("cpu")}:
        return HostMemory()
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"parameters and buffers are on several devices ({names}); move the module to one "
            "before wrapping"
        )
    (device,) = devices
    if device.type != "cuda":
        raise ValueError(f"parameters are on {device}; exchanges know the CPU and CUDA devices")
    from gossipdp.runtime.cuda import CudaDevice

    return CudaDevice(device)
