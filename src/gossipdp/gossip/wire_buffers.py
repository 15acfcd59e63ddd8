"""Preallocated room for chunks on their way out and in, as tensors and as bytes."""

from collections.abc import Callable

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Chunk, State

# Each slot begins at a page, and so fits numbers of any type.
PAGE_BYTES = 4096


class WireBuffers:
    """A few slots, each as large as the largest chunk, in host memory.

    A slot is used as a tensor of the chunk's type (:meth:`tensor`) by the arithmetic and as bytes
    (:meth:`bytes`) by the link; both are views of the same memory.

    Args:
        state: whose chunks.
        num_slots: how many.
        allocate: where their memory comes from, such as ``Transport.allocate``; None: memory that
            nobody else sees.
    """

    def __init__(
        self,
        state: State,
        num_slots: int,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        size = max((_num_bytes(chunk) for chunk in state.all_chunks), default=0)
        self._slot_bytes = -(-size // PAGE_BYTES) * PAGE_BYTES
        num_bytes = num_slots * self._slot_bytes
        self._allocate = allocate
        if allocate is None or not num_bytes:
            self._take(tensor_bytes(torch.empty(num_bytes, dtype=torch.uint8)))
        else:
            self._take(allocate(num_bytes))

    def renew(self) -> None:
        """Ask for the memory again: it may be other than before, and what it held is lost then."""
        if self._allocate is not None and len(self._memory):
            memory = self._allocate(len(self._memory))
            if memory is not self._memory:
                self._take(memory)

    def _take(self, memory: memoryview) -> None:
        self._memory = memory
        starts = range(0, len(memory), self._slot_bytes or 1)
        self._bytes = [memory[start : start + self._slot_bytes] for start in starts]
        self._slots = [torch.frombuffer(slot, dtype=torch.uint8) for slot in self._bytes]
        # Kept: making one gives the interpreter's lock away and takes it back, in training's way.
        self._tensors: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def tensor(self, slot: int, chunk: Chunk, dtype: torch.dtype | None = None) -> Tensor:
        """Return the slot as a tensor for one chunk, of its own type unless ``dtype`` is given."""
        dtype = dtype or chunk.x.dtype
        key = slot, chunk.num_elements, dtype
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._slots[slot][: chunk.num_elements * dtype.itemsize].view(dtype)
            self._tensors[key] = tensor
        return tensor

    def bytes(self, slot: int, chunk: Chunk, dtype: torch.dtype | None = None) -> memoryview:
        """Return the same memory as bytes."""
        dtype = dtype or chunk.x.dtype
        return self._bytes[slot][: chunk.num_elements * dtype.itemsize]


def _num_bytes(chunk: Chunk) -> int:
    """Bytes of a chunk in its wider precision: consolidation sends sums in that of pending."""
    return chunk.num_elements * max(chunk.x.dtype.itemsize, chunk.pending.dtype.itemsize)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as bytes."""
    return tensor.detach().view(torch.uint8).numpy().data
