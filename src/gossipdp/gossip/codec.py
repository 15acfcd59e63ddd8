"""The forms in which chunks travel in exchanges: a snapshot to bytes and back.

Both ends compute their difference from the same two numbers, whatever the form, so the mean of
x + c/2 is conserved in each; and no worker's own parameters are rounded. Consolidation, averages
and the transfer of whole states are exact in each.

Trained parameters travel as they are held (``full``), rounded to bfloat16 unless they have 2 bytes
(``bfloat16``, error 2**-8 of the value), or as a code of the difference to the peer unless they
have 8 (``lattice8``: :mod:`~gossipdp.dynamics.lattice`, error a few percent of the distance). A
code takes 1 byte a value, and 3 in a chunk that is repeated.

``auto`` is full where both ends share memory, and for arrays of a device; else lattice8, once its
loops are loaded. A worker that asks for an exchange chooses, and its first frame shows it. A code
takes about twice the processor time of values where no byte travels, over TCP up to 1.5 times.

BatchNorm's statistics always travel as they are held: they differ too much in size to share a step,
and a variance must not turn negative. So the optimizers' moments travel in bfloat16 where
parameters are coded, and Adam's second moment in 8 bits by its logarithm
(:func:`~gossipdp.dynamics.lattice.encode_squares`).
"""

import itertools
import math
import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor

from gossipdp.dynamics import lattice
from gossipdp.dynamics.chunks import Chunk, Role
from gossipdp.dynamics.machine_code import CODED, loop
from gossipdp.dynamics.state import State
from gossipdp.dynamics.update import is_finite

PAGE_BYTES = 4096
_CHECKSUM = struct.Struct("<q")

Allocate: TypeAlias = Callable[[int], memoryview]
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class WireFormat:
    """One form in which chunks travel."""

    name: str
    rounded: Collection[Role] = ()
    """Roles whose values travel in bfloat16, rounded as the snapshot is taken."""
    is_coded: bool = False
    """True if trained parameters travel as a code of the difference."""
    window: int = 4
    """Chunks that may be open at a time."""
    most_queued: int = 4
    """Chunks that may wait in the link's queue."""


FORMATS = {
    "full": WireFormat("full"),
    "bfloat16": WireFormat("bfloat16", rounded=(Role.TRAINED, Role.MOMENT)),
    # A coded chunk closes after the way there and back, so more are open. Codes wait here and not
    # in the link's queue, where verdicts would wait behind them.
    "lattice8": WireFormat("lattice8", (Role.MOMENT,), is_coded=True, window=6, most_queued=2),
}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as bytes."""
    return tensor.detach().view(torch.uint8).numpy().data


class PoisonFound(Exception):
    """A chunk holds NaN or infinity; ``ours``: it is this worker's own."""

    def __init__(self, ours: bool) -> None:
        super().__init__("our own parameters" if ours else "the peer's parameters")
        self.ours = ours


def _timed(method: _Method) -> _Method:
    """Add the processor time of a call to the codec's ``busy_s``, if it ``is_timed``."""

    @wraps(method)
    def timed(self: "Codec", *args: Any, **kwargs: Any) -> Any:
        if not self.is_timed:
            return method(self, *args, **kwargs)
        started_s = time.thread_time()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.busy_s += time.thread_time() - started_s

    return cast(_Method, timed)


@final
class Codec:
    """Turns one worker's chunks into bytes and the peer's bytes into differences.

    Its memory serves one exchange after the other: slot ``i % window`` for chunk ``i`` on its way
    out, and one more for the chunk that is coming in. A slot begins at a page, so it fits numbers
    of any type.

    A *certain* chunk travels as values, which the peer can always read. Any other is *coded*: a
    checksum of 8 bytes, and one byte a value. Before the first chunk each end sends the step of
    every block that it needs; the larger of the two is used. From each exchange the steps of the
    next are learnt.

    Args:
        name: one of ``FORMATS``, or ``auto``.
        allocate: the transport's, so that peers of the same host can read the slots in place.
            None: memory that no other process sees.

    Attributes:
        forms: those that exchanges may have: by whether they are coded.
        form: that of the present exchange.
    """

    def __init__(self, name: str, state: State, allocate: Allocate | None = None) -> None:
        self.is_timed, self.busy_s = False, 0.0
        """The processor time spent on arrays so far, in which other threads may run Python. It is
        counted only on demand, since each look at the clock is a system call."""
        names = ("full", "lattice8") if name == "auto" else (name,)
        self.forms = {FORMATS[each].is_coded: FORMATS[each] for each in names}
        self._is_on_device, self._has_loops = state.device.is_queued, False
        self._most_window = max(form.window for form in self.forms.values())
        chunks = state.chunks + state.moment_chunks
        most = max((chunk.x.nbytes for chunk in chunks), default=1)
        self._slot_bytes = -(-most // PAGE_BYTES) * PAGE_BYTES
        num_bytes = (self._most_window + 1) * self._slot_bytes
        if allocate is None:
            own = tensor_bytes(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
            allocate = lambda _: own  # noqa: E731
        self._allocate = partial(allocate, num_bytes)
        self._memory = memoryview(b"")
        self._slot_of: dict[int, int] = {}
        self._renew()
        coded = [chunk for chunk in state.chunks if True in self.forms and _fits_code(chunk)]
        most = max((chunk.num_elements for chunk in state.moment_chunks), default=0)
        self._squares = torch.zeros(most, dtype=torch.float32, device="cpu")
        dtypes = {self._dtype(c, form) for c in state.chunks for form in self.forms.values()}
        if coded:  # the code's difference, and repeats
            dtypes |= {torch.float32, torch.bfloat16}
        for dtype in dtypes:
            state.compile_for(dtype)
        sizes = (lattice.num_blocks(each.num_elements) for each in coded)
        ends = list(itertools.accumulate(sizes, initial=0))
        parts = itertools.starmap(slice, itertools.pairwise(ends))
        self._blocks = {chunk.index: part for chunk, part in zip(coded, parts, strict=True)}
        # A frame is not empty, even if nothing is coded.
        self._steps = lattice.LatticeSteps(max(1, ends[-1]))
        self._needed = self._exponents = self._steps.exponents()
        self.preface_landing = tensor_bytes(torch.zeros_like(self._needed))
        """Room for the preface that the peer's :meth:`start` returned."""
        most = max((each.num_elements for each in coded), default=0)
        self._code_slots = [_CodeSlot(most) for _ in range(self._most_window if coded else 0)]
        if False not in self.forms:
            self.load()

    def load(self) -> None:
        """Load the loops of codes, or compile them, so that no exchange is slow."""
        for name in CODED if self._code_slots else ():
            loop(name)
        self._has_loops = True

    def _renew(self) -> None:
        """Ask for the memory again; if it is another one, the former content is lost."""
        memory = self._allocate()
        if memory is not self._memory:
            self._memory = memory
            # Kept, since making one gives the interpreter's lock away and so delays training.
            self._tensors: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def _bytes(self, slot: int, num_bytes: int) -> memoryview:
        start = slot * self._slot_bytes
        return self._memory[start : start + num_bytes]

    def _tensor(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Return the place of our snapshot of a chunk, if it travels in this precision."""
        key = self._slot_of[chunk.index], chunk.num_elements, dtype
        if key not in self._tensors:
            room = self._bytes(key[0], chunk.num_elements * dtype.itemsize)
            self._tensors[key] = torch.frombuffer(room, dtype=dtype)
        return self._tensors[key]

    def _dtype(self, chunk: Chunk, form: WireFormat | None = None) -> torch.dtype:
        """Return the precision in which a certain chunk travels."""
        is_wide = chunk.x.dtype.itemsize > torch.bfloat16.itemsize
        is_rounded = is_wide and chunk.role in (form or self.form).rounded
        return torch.bfloat16 if is_rounded else chunk.x.dtype

    def is_certain(self, chunk: Chunk) -> bool:
        """Return whether the peer can always read the chunk; else it sends a verdict on each."""
        return not self.form.is_coded or chunk.index not in self._blocks

    def _is_square(self, chunk: Chunk) -> bool:
        return self.form.is_coded and chunk.is_square

    def chooses_code(self, is_shared: bool) -> bool:
        """Return whether an exchange that this worker asks for, over such a link, is coded."""
        is_cheap = self._has_loops and not (is_shared or self._is_on_device)
        return True in self.forms and (is_cheap or False not in self.forms)

    def num_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of a chunk on its way, unless it must be repeated."""
        if self._is_square(chunk):
            return lattice.squares_bytes(chunk.num_elements)
        if self.is_certain(chunk):
            return chunk.num_elements * self._dtype(chunk).itemsize
        return _CHECKSUM.size + chunk.num_elements

    def start(
        self, chunks: Sequence[Chunk], theta: float, gain: float, *, is_coded: bool
    ) -> memoryview | None:
        """Begin an exchange of these chunks, in their order, at the phase ``theta``.

        ``gain`` is that of the exchange on x_tilde.

        Returns:
            The preface, which the peer must have before the first chunk; None if there is none.
        """
        self._renew()
        self._theta, self._gain = theta, gain
        self.form = form = self.forms[is_coded]
        self._slot_of = {chunk.index: place % form.window for place, chunk in enumerate(chunks)}
        if not is_coded:
            return None
        self._needed = self._steps.exponents()
        return tensor_bytes(self._needed)

    def agree(self, preface: memoryview) -> None:
        """Take in the peer's preface: the larger of both ends' steps holds."""
        theirs = lattice.clamped(torch.frombuffer(preface, dtype=torch.int8))
        self._exponents = torch.maximum(self._needed, theirs)

    def room(self, chunk: Chunk, *, lands: bool = False, repeats: bool = False) -> memoryview:
        """Return where a chunk's bytes are before they leave, or (``lands``) where the peer's land.

        ``repeats``: those of a chunk that could not be decoded and is sent again in bfloat16.
        """
        slot = self._most_window if lands else self._slot_of[chunk.index]
        repeated = chunk.num_elements * torch.bfloat16.itemsize
        return self._bytes(slot, repeated if repeats else self.num_bytes(chunk))

    @_timed
    def encode(self, chunk: Chunk) -> None:
        """Write the bytes of a snapshot to :meth:`room`; raise PoisonFound for NaN or infinity."""
        if not self.is_certain(chunk):
            self._encode_difference(chunk)
        elif self._is_square(chunk):
            values = self._squares[: chunk.num_elements]
            chunk.snapshot(self._theta, values)
            lattice.encode_squares(values, torch.frombuffer(self.room(chunk), dtype=torch.uint8))
        elif not chunk.snapshot(self._theta, self._tensor(chunk, self._dtype(chunk))):
            raise PoisonFound(ours=True)

    @_timed
    def exchange(self, chunk: Chunk, payload: memoryview, *, is_repeat: bool = False) -> float:
        """Apply the difference to the peer's chunk; return its squared norm.

        ``payload``: the peer's values or repeat. A code is read by :meth:`decode` before.
        """
        if is_repeat:
            return self._exchange_repeated(chunk, payload)
        if not self.is_certain(chunk):
            return self._exchange_decoded(chunk)
        if self._is_square(chunk):
            mine = peers = self._squares[: chunk.num_elements]  # a moment takes the peer's alone
            lattice.decode_squares(torch.frombuffer(payload, dtype=torch.uint8), peers)
        else:
            mine = self._tensor(chunk, self._dtype(chunk))
            peers = torch.frombuffer(payload, dtype=mine.dtype)
        return chunk.exchange(self._theta, mine, peers, self._gain)

    # Coded chunks.

    def _encode_difference(self, chunk: Chunk) -> None:
        """Code a snapshot; if the steps do not fit it, it is neither coded nor decoded."""
        slot, room = self._code_slot(chunk), self.room(chunk)
        snapshot = slot.snapshot[: chunk.num_elements]
        chunk.snapshot(self._theta, snapshot)
        codes = torch.frombuffer(room, dtype=torch.uint8, offset=_CHECKSUM.size)
        num_blocks = lattice.num_blocks(chunk.num_elements)
        slot.sizes = torch.empty(num_blocks, dtype=torch.float32, device="cpu")
        exponents = self._exponents[self._blocks[chunk.index]]
        checksum = lattice.encode(snapshot, exponents, codes, slot.sizes)
        slot.fits = checksum is not None
        if checksum is not None:
            _CHECKSUM.pack_into(room, 0, checksum)
        elif not torch.isfinite(slot.sizes).all():
            raise PoisonFound(ours=True)

    @_timed
    def decode(self, chunk: Chunk, payload: memoryview) -> bool:
        """Decode the peer's code against our snapshot; return whether that could be done."""
        slot, size = self._code_slot(chunk), chunk.num_elements
        if not slot.fits:
            return False
        codes = torch.frombuffer(payload, dtype=torch.uint8, offset=_CHECKSUM.size)
        near, differences = slot.snapshot[:size], slot.differences[:size]
        exponents = self._exponents[self._blocks[chunk.index]]
        checksum = lattice.decode(codes, exponents, near, differences)
        return _CHECKSUM.unpack_from(payload) == (checksum,)

    def _exchange_decoded(self, chunk: Chunk) -> float:
        """Apply what was decoded; the other end has exactly the negative of it."""
        slot, blocks = self._code_slot(chunk), self._blocks[chunk.index]
        coded = slot.differences[: chunk.num_elements], self._exponents[blocks]
        if not chunk.device.is_queued:
            distances = torch.empty_like(slot.sizes)
            squared_norm = chunk.exchange_coded(self._theta, (*coded, distances), self._gain)
        else:  # no loop computes there, so we pass delta as mine and zeros as the peer's
            delta = lattice.difference(*coded)
            distances = lattice.largest(delta)
            zeros = torch.zeros_like(delta)
            squared_norm = chunk.exchange(self._theta, delta, zeros, self._gain)
        self._steps.learn(blocks, distances, slot.sizes)
        return squared_norm

    def repeat(self, chunk: Chunk) -> memoryview:
        """Return our snapshot in bfloat16, to be sent; raise PoisonFound if it overflows."""
        mine = self._tensor(chunk, torch.bfloat16)
        mine.copy_(self._code_slot(chunk).snapshot[: chunk.num_elements])
        if not is_finite(mine):
            raise PoisonFound(ours=True)
        return self.room(chunk, repeats=True)

    def _exchange_repeated(self, chunk: Chunk, payload: memoryview) -> float:
        mine = self._tensor(chunk, torch.bfloat16)
        peers = torch.frombuffer(payload, dtype=torch.bfloat16)
        squared_norm = chunk.exchange(self._theta, mine, peers, self._gain)
        if math.isfinite(squared_norm):
            distances = lattice.largest(mine.float() - peers)
            sizes = self._code_slot(chunk).sizes
            self._steps.learn(self._blocks[chunk.index], distances, sizes, is_rounded=True)
        return squared_norm

    def _code_slot(self, chunk: Chunk) -> "_CodeSlot":
        return self._code_slots[self._slot_of[chunk.index]]


@final
class _CodeSlot:
    """The record of an open coded chunk."""

    def __init__(self, most_values: int) -> None:
        self.snapshot = torch.empty(most_values, dtype=torch.float32, device="cpu")
        self.differences = torch.empty(most_values, dtype=torch.int8, device="cpu")
        self.sizes = torch.zeros(0, dtype=torch.float32, device="cpu")
        self.fits = False


def _fits_code(chunk: Chunk) -> bool:
    is_float32 = chunk.role is Role.TRAINED and chunk.pending.dtype == torch.float32
    return is_float32 and _CHECKSUM.size + chunk.num_elements <= chunk.pending.nbytes
