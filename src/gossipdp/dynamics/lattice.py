"""An 8-bit code for the difference of two vectors whose holders know that they are near.

(The code of an optimizer's moments is another: :func:`encode_squares`.)

Both ends round their values to points of one lattice, k = round(x / s), with a step s for each
block of values, and send k modulo 256. The receiver, who holds y, takes the number congruent to it
that is nearest to its own round(y / s). That is the sender's k if, for every value,

    |x - y| < 127 s.

Both then know the same difference s (k_x - k_y), one the negative of the other, with an error of at
most s. As s follows the distance (:class:`LatticeSteps`), the error shrinks as the two agree, and
values that are equal stay equal.

All of it is exact: s is a power of two, so x / s is not rounded, k is a whole number of the
integers' range, and |k_x - k_y| <= 128. A checksum over the part of k that did not travel, above
the lowest byte, shows if decoding found the sender's k. It takes in all of that part: if two agree
to the last bit and one then turns a weight of 1/2 to -1/2, they are just 2**24 steps apart.

The checksum has 64 bits. For each block it holds two sums modulo 2**32: of a = k >> 8, and of a
with its upper bits mixed into the lower ones, each times a weight of its place, odd and
pseudo-random. The blocks' sums are chained by an odd factor. If decoding went wrong in one place of
a block, or in two by one wrap each, the sums always differ; of other patterns they miss 1 in 2**64,
or 1 in 2**48 where all a are off by multiples of 2**16. The weights are the same in every run: this
is no defence against an enemy.

The idea: Davies, Gurunathan, Moshrefi, Ashkboos, Alistarh, "New Bounds for Distributed Mean
Estimation and Variance Reduction", ICLR 2021; for gossip: Nadiradze et al., "Asynchronous
Decentralized SGD with Quantized and Local Updates" (SwarmSGD), NeurIPS 2021. Departures: a step
for each block in place of a random rotation; a checksum in place of an assumed distance; rounding
to the nearest point without dither: with gradients whose size varies 100-fold within a block, on a
ring of 8, the consensus distance is 1.11 times the exact exchange's, with dither 1.34.
"""

import functools

import torch
from torch import Tensor

from gossipdp.dynamics.machine_code import BLOCK, loop

MARGIN = 4.0
SHRINK = 0.8
"""Failures on a ring of 4 that learns the digits, of 53,000 blocks with SGD and as many with AdamW:
0 and 1 with (4, 0.8), 7 and 10 with (3, 0.8), 69 and 77 with (2, 0.8), none with (4, 0.9), which
follows half as fast. The error was 10%, 8%, 5% and 11% of the distance, root mean square."""

LARGEST_EXPONENT = 120
SMALLEST_EXPONENT = -120
_FARTHEST = 127 * 2.0**LARGEST_EXPONENT  # a code bridges no more; 4 times it is no float32
CARRY = 0x9E3779B97F4A7C15  # odd: 2**64 over the golden ratio
_MANTISSA_BITS = 24
# The part of a value that rounding both ends to bfloat16 may hide: at most 2**-8 of each of the
# two, and half of that as a rule.
_HIDDEN_BY_BFLOAT16 = 2.0**-8


def num_blocks(num_elements: int) -> int:
    """Return the blocks of ``num_elements`` values; the last one may be shorter."""
    return -(-num_elements // BLOCK)


@functools.cache
def weights() -> Tensor:
    """Return what each place of a block counts in the two sums: odd; int32, 2 BLOCK of them."""
    found, state = [], 0
    for _ in range(2 * BLOCK):  # splitmix64 (Steele, Lea, Flood, OOPSLA 2014)
        state = (state + CARRY) % 2**64
        mixed = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) % 2**64
        found.append((mixed >> 32 | 1) - 2**31)
    return torch.tensor(found, dtype=torch.int32, device="cpu")


def encode(values: Tensor, exponents: Tensor, codes: Tensor, sizes: Tensor) -> int | None:
    """Write the codes (uint8) of float32 ``values``, and the largest size of each block.

    Shapes: of values and codes (n,); of ``exponents`` (int8), those of the steps, and of ``sizes``
    (blocks,).

    Returns:
        The checksum; None if a block's values do not fit, or are not finite: so is its size then.

    >>> step, codes = torch.tensor([-4], dtype=torch.int8), torch.empty(3, dtype=torch.uint8)
    >>> checksum = encode(torch.full((3,), 3.03), step, codes, torch.empty(1))
    >>> differences = torch.empty(3, dtype=torch.int8)
    >>> decode(codes, step, torch.full((3,), -2.0), differences) == checksum
    True
    >>> differences.tolist()  # of 1/16 each
    [-80, -80, -80]
    """
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    fits = loop("encode")(values, exponents, codes, sizes, weights(), word) == 0.0
    return int(word) if fits else None


def decode(codes: Tensor, exponents: Tensor, near: Tensor, differences: Tensor) -> int:
    """Write k of ``near``, which fits, minus k of the codes; return the latter's checksum.

    The ``differences`` (int8) are right if the checksum is the sender's, but for the few patterns
    that the module names; and only then.
    """
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    loop("decode")(near, exponents, codes, differences, weights(), word)
    return int(word)


def difference(differences: Tensor, exponents: Tensor) -> Tensor:
    """Return s times the whole ``differences``, float32; exact."""
    steps = ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)  # put together from bits
    return differences * steps.repeat_interleave(BLOCK)[: len(differences)]


def largest(values: Tensor) -> Tensor:
    """Return the largest absolute value of each block, or NaN if it has one; shape (blocks,)."""
    whole = values.new_zeros(num_blocks(len(values)) * BLOCK)
    whole[: len(values)] = values
    return whole.view(-1, BLOCK).abs().amax(dim=1)


class LatticeSteps:
    r"""One worker's estimate of its distance to its peers, for each block.

    It keeps the *reach* of each block, the distance that the next code is to bridge:

    .. math:: \text{reach} \leftarrow \max(4 m,\ 0.8\,\text{reach}), \qquad
              s = \text{the power of two at or above reach} / 127

    with m the largest difference that an exchange has just shown in the block. It grows at once and
    shrinks slowly, so that one quiet exchange does not make the next one fail. In an exchange both
    ends use the larger of their two steps.

    It begins with nothing known: the finest step, whose code fails unless the two agree, so that
    the first exchange shows the distance.
    """

    def __init__(self, num_blocks: int) -> None:
        self._reach, self._largest = torch.zeros(2, num_blocks, dtype=torch.float32, device="cpu")

    def exponents(self) -> Tensor:
        """Return the exponents of the steps that this worker needs: int8, of shape (blocks,).

        They are not finer than the values' own rounding, as that gains nothing.
        """
        by_reach = torch.frexp(self._reach / 127).exponent
        by_rounding = torch.frexp(self._largest).exponent - _MANTISSA_BITS
        by_reach[self._reach == 0] = SMALLEST_EXPONENT
        by_rounding[self._largest == 0] = SMALLEST_EXPONENT
        return clamped(torch.maximum(by_reach, by_rounding))

    def learn(
        self, blocks: slice, distances: Tensor, sizes: Tensor, *, is_rounded: bool = False
    ) -> None:
        """Learn from a chunk that was applied.

        Args:
            blocks: those of the chunk.
            distances: the largest differences of the two snapshots, of shape (blocks,).
            sizes: the largest absolute values of this worker's snapshot, of shape (blocks,).
            is_rounded: True if the snapshots were repeated in bfloat16, which hides differences.
        """
        hidden = _HIDDEN_BY_BFLOAT16 * sizes if is_rounded else 0.0
        reach = torch.maximum(MARGIN * (distances + hidden), SHRINK * self._reach[blocks])
        self._reach[blocks] = reach.clamp_(max=_FARTHEST)  # infinity would not shrink
        self._largest[blocks] = sizes


def clamped(exponents: Tensor) -> Tensor:
    """Return the nearest exponents whose steps, and their reciprocals, are ordinary numbers."""
    return exponents.clamp(SMALLEST_EXPONENT, LARGEST_EXPONENT).to(torch.int8)


# Squares: values that are never negative, such as an optimizer's means of squared gradients.


def squares_bytes(num_elements: int) -> int:
    """Return the bytes of a code of squares: each block's largest level, then the codes."""
    return 2 * num_blocks(num_elements) + num_elements


def encode_squares(values: Tensor, code: Tensor) -> None:
    """Write the ``code`` (uint8) of ``values``: float32, finite and not negative.

    A float32's bits, read as a whole number, are close to its logarithm. The code keeps the
    exponent and three bits of the mantissa, rounded: eight levels from one power of two to the
    next. It counts levels from the largest value of its block down: 255 is the level of that value,
    1 is a 2**-31.75th of it, and 0 is zero alone. So for v >= 2**-31 times the largest of its block

        |decoded - v| <= v / 16,    and for its root  |sqrt(decoded) - sqrt(v)| <= sqrt(v) / 30;

    smaller ones but zero are raised to about that size. What is decoded is finite and not negative.
    """
    loop("encode_squares")(values, *_parts(code, len(values)))


def decode_squares(code: Tensor, values: Tensor) -> None:
    """Write the values of a ``code``."""
    loop("decode_squares")(values, *_parts(code, len(values)))


def _parts(code: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    num_tops = 2 * num_blocks(num_elements)
    return code[:num_tops].view(torch.int16), code[num_tops:]
