"""Finds out optimizers that write over what exchanges bring: those with float32 master weights.

Such an optimizer keeps its own copy of 16-bit parameters, steps that, and writes the rounded copy
over x. What the boundary added to x is lost then, at this end of the exchange only.
"""

import math

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Chunk, State
from gossipdp.errors import ModelChangedError

SAMPLES_PER_BOUNDARY = 256
MIN_SAMPLES = 1000
ENOUGH_SAMPLES = 20_000


class MasterWeights:
    r"""Compares a few values of 16-bit parameters from boundary to boundary.

    With :math:`a` what a boundary added to a value and :math:`d` what the next step changed,

    .. math:: \text{slope} = \sum a d \, / \sum a^2

    is about 0 for an optimizer that steps x, and -1 for one that takes the addition back. It costs
    some 20 microseconds a step, and ends once ``ENOUGH_SAMPLES`` have shown nothing. Parameters of
    more than 16 bits are not looked at: nobody holds master weights of those.

    Args:
        state: of this worker.
    """

    def __init__(self, state: State) -> None:
        self._chunks: dict[int, list[Chunk]] = {}
        for segment in state.segments:
            if segment.role.is_exchanged and segment.x.dtype in (torch.bfloat16, torch.float16):
                self._chunks.setdefault(segment.optimizer_index, []).extend(segment.chunks)
        # By optimizer: the values before its last boundary added to them, and after.
        self._added: dict[int, tuple[Chunk, Tensor, Tensor]] = {}
        self._before: tuple[Chunk, Tensor] | None = None
        self._sums = torch.zeros(3, dtype=torch.float64)  # of a d, a a, d d
        self._num_samples = 0

    def stepped(self, optimizer_index: int) -> None:
        """An optimizer has stepped, and the boundary has not begun.

        Raises:
            ModelChangedError: what the last boundaries added was taken back.
        """
        chunks = self._chunks.get(optimizer_index)
        if not chunks:
            return
        added = self._added.pop(optimizer_index, None)
        if added is not None:
            self._count(*added)
        chunk = next((chunk for chunk in chunks if chunk.has_pending), None)
        self._before = None if chunk is None else (chunk, _sample(chunk))

    def bounded(self, optimizer_index: int) -> None:
        """The boundary of that optimizer is over."""
        if self._before is not None:
            chunk, before = self._before
            self._added[optimizer_index] = chunk, before, _sample(chunk)
            self._before = None

    def _count(self, chunk: Chunk, before: Tensor, after: Tensor) -> None:
        added, stepped = (after - before).double(), (_sample(chunk) - after).double()
        moved = added != 0
        added, stepped = added[moved], stepped[moved]
        self._sums += torch.stack(
            [(added * stepped).sum(), added.square().sum(), stepped.square().sum()]
        )
        self._num_samples += added.numel()
        along, size, change = self._sums.tolist()
        if self._num_samples < MIN_SAMPLES or not math.isfinite(along) or size == 0.0:
            return
        slope, error = along / size, math.sqrt(change / size / self._num_samples)
        if abs(slope + 1.0) < 0.25 and -slope > 8.0 * error:
            raise ModelChangedError(
                "the optimizer writes over what exchanges bring: it holds float32 master weights "
                "of the 16-bit parameters and does not look at the parameters themselves. Train "
                "with float32 parameters (under torch.autocast), or use an optimizer that steps "
                "the parameters in place"
            )
        if self._num_samples >= ENOUGH_SAMPLES:
            self._chunks.clear()


def _sample(chunk: Chunk) -> Tensor:
    return chunk.x[:: max(1, chunk.num_elements // SAMPLES_PER_BOUNDARY)].float().clone()
