"""Preallocated room for chunks on their way out and in, as tensors and as bytes."""

import torch
from torch import Tensor

from gossipdp.dynamics.state import Chunk, State


class WireBuffers:
    """A few slots, each as large as the largest chunk, in host memory.

    A slot is used as a tensor of the chunk's type (:meth:`tensor`) by the arithmetic and as bytes
    (:meth:`bytes`) by the link; both are views of the same memory.
    """

    def __init__(self, state: State, num_slots: int) -> None:
        size = max((_num_bytes(chunk) for chunk in state.all_chunks), default=0)
        self._slots = [torch.empty(size, dtype=torch.uint8) for _ in range(num_slots)]
        self._bytes = [tensor_bytes(slot) for slot in self._slots]

    def tensor(self, slot: int, chunk: Chunk, dtype: torch.dtype | None = None) -> Tensor:
        """Return the slot as a tensor for one chunk, of its own type unless ``dtype`` is given."""
        dtype = dtype or chunk.x.dtype
        return self._slots[slot][: chunk.num_elements * dtype.itemsize].view(dtype)

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
