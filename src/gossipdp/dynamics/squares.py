"""An 8-bit code of values that are never negative: an optimizer's means of squared gradients.

A float32's bits, read as a whole number, are close to its logarithm. The code keeps the exponent
and three bits of the mantissa, rounded: eight levels from one power of two to the next. It counts
levels from the largest value of its block down: 255 is the level of that value, 1 is a 2**-31.75th
of it, and 0 is zero alone. So for v >= 2**-31 times the largest of its block

    |decoded - v| <= v / 16,    and for its root  |sqrt(decoded) - sqrt(v)| <= sqrt(v) / 30;

smaller ones but zero are raised to about that size. What is decoded is finite and not negative.
"""

from torch import Tensor, int16

from gossipdp.dynamics.lattice import num_blocks
from gossipdp.dynamics.machine_code import loop


def coded_bytes(num_elements: int) -> int:
    """Return the bytes of a code: the level of each block's largest value, and the codes."""
    return 2 * num_blocks(num_elements) + num_elements


def encode(values: Tensor, code: Tensor) -> None:
    """Write the ``code`` (uint8) of ``values``: float32, finite and not negative."""
    loop("encode_squares")(values, *_parts(code, len(values)))


def decode(code: Tensor, values: Tensor) -> None:
    """Write the values of a ``code``."""
    loop("decode_squares")(values, *_parts(code, len(values)))


def _parts(code: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    num_tops = 2 * num_blocks(num_elements)
    return code[:num_tops].view(int16), code[num_tops:]
