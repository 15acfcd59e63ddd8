"""The chunks of one exchange in an 8-bit code: snapshots, codes in and out, differences.

The arithmetic is :mod:`~gossipdp.dynamics.lattice`; here are the memory for a window of chunks and
the steps that this worker has learnt. A coded chunk is a checksum of 4 bytes and one byte for each
value.
"""

import struct

import torch
from torch import Tensor

from gossipdp.dynamics.lattice import BLOCK, Lattice, largest, num_blocks
from gossipdp.dynamics.lattice_steps import LatticeSteps, clamped
from gossipdp.dynamics.state import Chunk, Role
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.wire_buffers import tensor_bytes

_CHECKSUM = struct.Struct("<I")


def is_coded(chunk: Chunk) -> bool:
    """Whether a chunk travels in code: trained, and not too small for it."""
    return chunk.role is Role.TRAINED and code_bytes(chunk) <= chunk.pending.nbytes


def code_bytes(chunk: Chunk) -> int:
    """Bytes of a coded chunk."""
    return _CHECKSUM.size + chunk.num_elements


class LatticeCodec:
    """Serves one exchange after the other; chunk ``i`` uses slot ``i % window`` of each.

    An exchange calls :meth:`start` and :meth:`agree`, then for each
    coded chunk :meth:`snapshot_room`, :meth:`encode`, :meth:`decode`, and in the end
    :meth:`difference` or :meth:`repeated`, from which the steps of the next exchange are learnt.

    Args:
        shared: this worker's state.
        window: chunks that may be open at a time.
    """

    def __init__(self, shared: SharedState, window: int) -> None:
        self._window = window
        coded = [chunk for chunk in shared.state.chunks if is_coded(chunk)]
        blocks = {chunk.index: num_blocks(chunk.num_elements) for chunk in coded}
        self._steps = {
            chunk.index: LatticeSteps(blocks[chunk.index], chunk.pending.dtype) for chunk in coded
        }
        self._exponents: dict[int, Tensor] = {}
        # A frame is not empty, even where nothing is coded.
        self._needed = torch.zeros(max(1, sum(blocks.values())), dtype=torch.int8)
        self.steps_landing = tensor_bytes(torch.zeros_like(self._needed))
        self._slots: dict[torch.dtype, list[_Slot]] = {}
        self._scratch: dict[torch.dtype, _Scratch] = {}
        for dtype in {chunk.pending.dtype for chunk in coded}:
            most = max(blocks[chunk.index] for chunk in coded if chunk.pending.dtype == dtype)
            self._slots[dtype] = [_Slot(most, dtype) for _ in range(window)]
            self._scratch[dtype] = _Scratch(most, dtype)

    def start(self) -> memoryview:
        """Return the steps that this worker needs, for the peer."""
        if self._steps:
            torch.cat([steps.exponents() for steps in self._steps.values()], out=self._needed)
        return tensor_bytes(self._needed)

    def agree(self, peers: memoryview) -> None:
        """Use the larger of both ends' steps in this exchange."""
        agreed = torch.maximum(self._needed, clamped(torch.frombuffer(peers, dtype=torch.int8)))
        sizes = [steps.num_blocks for steps in self._steps.values()]
        parts = torch.split(agreed[: sum(sizes)], sizes)
        self._exponents = dict(zip(self._steps, parts, strict=True))

    def snapshot_room(self, chunk: Chunk) -> Tensor:
        """Return where the chunk's snapshot goes; shape (elements,)."""
        return self._slot(chunk).snapshot[: chunk.num_elements]

    def encode(self, chunk: Chunk, room: memoryview) -> bool:
        """Write the snapshot's code to ``room``; return whether the snapshot is finite.

        One that the agreed steps do not fit is not coded; :meth:`decode` is then False as well.
        """
        slot, scratch = self._slot(chunk), self._scratch[chunk.pending.dtype]
        snapshot = _blocks(slot.snapshot, chunk)
        slot.snapshot[chunk.num_elements : snapshot.numel()] = 0
        slot.largest = largest(snapshot)
        slot.fits = scratch.lattice.fits(slot.largest, self._exponents[chunk.index])
        if slot.fits:
            codes = _blocks(scratch.codes, chunk)
            checksum = scratch.lattice.encode(snapshot, self._exponents[chunk.index], codes)
            _CHECKSUM.pack_into(room, 0, checksum)
            torch.frombuffer(room, dtype=torch.uint8, offset=_CHECKSUM.size).copy_(
                scratch.codes[: chunk.num_elements]
            )
        return bool(torch.isfinite(slot.largest).all())

    def decode(self, chunk: Chunk, payload: memoryview) -> bool:
        """Decode the peer's code against the snapshot; return whether it could be."""
        slot, scratch = self._slot(chunk), self._scratch[chunk.pending.dtype]
        if not slot.fits:
            return False
        codes = _blocks(scratch.codes, chunk)
        scratch.codes[: chunk.num_elements] = torch.frombuffer(
            payload, dtype=torch.uint8, offset=_CHECKSUM.size
        )
        scratch.codes[chunk.num_elements : codes.numel()] = 0
        checksum = scratch.lattice.decode(
            codes,
            self._exponents[chunk.index],
            _blocks(slot.snapshot, chunk),
            _blocks(slot.differences, chunk),
        )
        return _CHECKSUM.unpack_from(payload) == (checksum,)

    def difference(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return (delta, 0), two snapshots as far as their difference goes; shape (elements,).

        delta, exactly negated at the other end, is ours minus the peer's.
        """
        slot, scratch = self._slot(chunk), self._scratch[chunk.pending.dtype]
        delta = scratch.lattice.difference(
            _blocks(slot.differences, chunk), self._exponents[chunk.index], scratch.blocks(chunk)
        )
        self._steps[chunk.index].decoded(delta, slot.largest)
        return delta.view(-1)[: chunk.num_elements], scratch.zeros[: chunk.num_elements]

    def repeated(self, chunk: Chunk, mine: Tensor, peers: Tensor) -> None:
        """Learn from two snapshots in bfloat16."""
        slot, scratch = self._slot(chunk), self._scratch[chunk.pending.dtype]
        delta = scratch.blocks(chunk)
        delta.view(-1)[: chunk.num_elements].copy_(mine).sub_(peers)
        delta.view(-1)[chunk.num_elements :] = 0
        self._steps[chunk.index].repeated(delta, slot.largest)

    def _slot(self, chunk: Chunk) -> "_Slot":
        return self._slots[chunk.pending.dtype][chunk.index % self._window]


class _Slot:
    """What is kept of an open chunk; tensors flat, of whole blocks."""

    def __init__(self, most_blocks: int, dtype: torch.dtype) -> None:
        self.snapshot = torch.zeros(most_blocks * BLOCK, dtype=dtype)
        self.differences = torch.zeros(most_blocks * BLOCK, dtype=torch.int8)
        self.largest = torch.zeros(0)
        self.fits = False


class _Scratch:
    """What is needed while a chunk is worked on."""

    def __init__(self, most_blocks: int, dtype: torch.dtype) -> None:
        self.lattice = Lattice(most_blocks, dtype)
        self.codes = torch.zeros(most_blocks * BLOCK, dtype=torch.uint8)
        self.delta = torch.zeros(most_blocks * BLOCK, dtype=dtype)
        self.zeros = torch.zeros(most_blocks * BLOCK, dtype=dtype)

    def blocks(self, chunk: Chunk) -> Tensor:
        """Return the part of ``delta`` that a chunk takes, in blocks."""
        return _blocks(self.delta, chunk)


def _blocks(flat: Tensor, chunk: Chunk) -> Tensor:
    """Return the part of ``flat`` that a chunk takes, as (blocks, BLOCK)."""
    return flat[: num_blocks(chunk.num_elements) * BLOCK].view(-1, BLOCK)
