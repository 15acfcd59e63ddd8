"""How fine a lattice the next exchange may use: steps that follow what the last ones showed.

Of each block the *reach* is kept, the distance that the next code is to bridge:

    reach <- max(MARGIN m, SHRINK reach),      s = the power of two at or above reach / 127

with m the largest difference that an exchange has just shown in the block. It grows at once and
shrinks slowly, so that one quiet exchange does not make the next one fail. In an exchange both
ends use the larger of their two steps.
"""

import torch
from torch import Tensor

from gossipdp.dynamics import lattice

MARGIN = 4.0
SHRINK = 0.8
"""On a ring of 4 that learns the digits with SGD, with AdamW, of 53,000 blocks each 0 and 1 failed
with (4, 0.8), 7 and 10 with (3, 0.8), 69 and 77 with (2, 0.8), and none with (4, 0.9), which
follows half as fast; the error was 10%, 8%, 5% and 11% of the distance, root mean square."""

LARGEST_EXPONENT = 120
SMALLEST_EXPONENT = -120
_MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}
# What rounding both ends to bfloat16 may have hidden: 2**-9 of each of two values.
_HIDDEN_BY_BFLOAT16 = 2.0**-8


class LatticeSteps:
    """What one worker knows of its distance to its peers, for each block of one chunk.

    It begins with nothing known: the finest step, whose code fails unless the two agree, so that
    the first exchange shows the distance.

    Args:
        num_blocks: of the chunk.
        dtype: of the values that are coded.
    """

    def __init__(self, num_blocks: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        self._reach = torch.zeros(num_blocks)
        self._largest = torch.zeros(num_blocks)
        self._mantissa_bits = _MANTISSA_BITS[dtype]

    def exponents(self) -> Tensor:
        """Exponents of the steps that this worker needs: int8, of shape (blocks,).

        Not finer than the values' own rounding: then nothing is gained.
        """
        by_reach = torch.frexp(self._reach / 127).exponent
        by_rounding = torch.frexp(self._largest).exponent - self._mantissa_bits
        by_reach[self._reach == 0] = SMALLEST_EXPONENT
        by_rounding[self._largest == 0] = SMALLEST_EXPONENT
        return clamped(torch.maximum(by_reach, by_rounding))

    def decoded(self, difference: Tensor, largest: Tensor) -> None:
        """Learn from an exchange whose codes decoded.

        Args:
            difference: of the two snapshots, of shape (blocks, BLOCK).
            largest: absolute values of this worker's snapshot, of shape (blocks,).
        """
        self._observe(lattice.largest(difference), largest)

    def repeated(self, difference: Tensor, largest: Tensor) -> None:
        """Learn from an exchange repeated in bfloat16; arguments as of :meth:`decoded`."""
        self._observe(lattice.largest(difference) + _HIDDEN_BY_BFLOAT16 * largest, largest)

    def _observe(self, distance: Tensor, largest: Tensor) -> None:
        self._reach = torch.maximum(MARGIN * distance.float(), SHRINK * self._reach)
        self._largest = largest.float()


def clamped(exponents: Tensor) -> Tensor:
    """Exponents whose steps, and their reciprocals, are ordinary numbers."""
    return exponents.clamp(SMALLEST_EXPONENT, LARGEST_EXPONENT).to(torch.int8)
