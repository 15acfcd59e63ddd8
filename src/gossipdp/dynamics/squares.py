"""An 8-bit code of values that are never negative: an optimizer's means of squared gradients.

A float32's bits, read as a whole number, are close to its logarithm. The code keeps the exponent
and three bits of the mantissa, rounded: eight levels from one power of two to the next. It counts
levels from the largest value of its block down: 255 is the level of that value, 1 is a 2**-31.75th
of it, and 0 is zero alone. So for v >= 2**-31 times the largest of its block

    |decoded - v| <= v / 16,    and for its root  |sqrt(decoded) - sqrt(v)| <= sqrt(v) / 30;

smaller ones but zero are raised to about that size. What is decoded is finite and not negative.

It codes the values, not a difference: each end takes in what the other has sent.
"""

import torch
from torch import Tensor

from gossipdp.dynamics.lattice import num_blocks
from gossipdp.dynamics.machine_code import loop

_TOP_BYTES = 2


def coded_bytes(num_elements: int) -> int:
    """Return the bytes of a code."""
    return _TOP_BYTES * num_blocks(num_elements) + num_elements


def encode_squares(values: Tensor, out: Tensor) -> None:
    """Write the code of ``values``, float32, finite and not negative, to ``out`` (uint8)."""
    loop("encode_squares")(values, *_parts(out, len(values)))


def decode_squares(code: Tensor, out: Tensor) -> None:
    """Write the values of a ``code`` to ``out``, float32."""
    loop("decode_squares")(out, *_parts(code, len(out)))


def _parts(code: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    split = _TOP_BYTES * num_blocks(num_elements)
    return code[:split].view(torch.int16), code[split:]
