"""CUDA's streams and events, as :mod:`~gossipdp.runtime.queued_device` asks for them.

Kept so thin that it can be checked by reading: **it has never run on a card.** The rules are
tested with a stand-in that does queued work late and in any order that streams and marks allow.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from gossipdp.runtime.queued_device import Mark, QueuedDevice

SWITCH, ON = "GOSSIPDP_CUDA", "experimental"


def is_cuda_allowed() -> bool:
    """Whether the user asked for what has never run on a card."""
    return os.environ.get(SWITCH) == ON


@final
class CudaDevice(QueuedDevice):
    """One CUDA device, and the gossip thread's stream on it.

    That stream's priority is high: its kernels are few and small, and a peer waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def gossip_thread(self) -> Iterator[None]:
        """See :class:`Device`; a current stream is a thread's own."""
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self.finish()

    def finish(self) -> None:
        """See :class:`Device`; the interpreter's lock is free meanwhile."""
        torch.cuda.current_stream(self._device).synchronize()

    def mark(self) -> Mark:
        """See :class:`QueuedDevice`."""
        return _Event(self._device)

    def pinned(self, num_bytes: int) -> Tensor:
        """See :class:`QueuedDevice`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def room(self, num_bytes: int) -> Tensor:
        """See :class:`QueuedDevice`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def holds(self, values: Tensor) -> bool:
        """See :class:`QueuedDevice`."""
        return values.device == self._device


@final
class _Event(Mark):
    """A stream that waits for an event waits for where it was recorded last by then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The host sleeps rather than spins.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """See :class:`Mark`."""
        self._event.record(torch.cuda.current_stream(self._device))

    def precede(self) -> None:
        """See :class:`Mark`."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """See :class:`Mark`."""
        self._event.synchronize()
