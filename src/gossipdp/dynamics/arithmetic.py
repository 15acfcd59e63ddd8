r"""The arithmetic of a whole event on one chunk: one method an event, and who computes it.

With :math:`s = e^{-2\eta\Delta}` → ``decay``, :math:`\tilde\alpha` → ``alpha_tilde``:

.. math::
    \text{snapshot} &= x + p + \tfrac{1-s}{2}c \\
    \delta &= \text{mine} - \text{peers} \\
    p &\leftarrow p + \tfrac{1-s}{2}c - \tfrac12\delta, \qquad
    c \leftarrow s\,c - (\tilde\alpha - \tfrac12)\,\delta

:class:`TorchArithmetic` needs nothing and takes several passes;
:class:`~gossipdp.dynamics.numba_arithmetic.NumbaArithmetic` takes one pass an event. Both keep the
same promises, and one test suite holds them to it:

* delta is the two snapshots' difference, rounded once, so the other end has its exact negative;
* it is applied whole or not at all: where any of its values is NaN or infinite, nothing is
  written but the snapshot. Whether that is so depends on delta alone, not on how its squared norm
  is summed, so both ends decide alike whatever each of them computes with;
* nothing is allocated, and the GIL is free meanwhile.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from gossipdp.dynamics import kernels

if TYPE_CHECKING:
    from gossipdp.dynamics.state import Chunk

ArithmeticName = Literal["numba", "torch"]
ARITHMETICS: tuple[ArithmeticName, ...] = get_args(ArithmeticName)

LEAST_COMPILED_VALUES = 1_000_000
"""With fewer values to exchange, loading compiled kernels costs more than they ever save."""

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
"""Of the parameters and snapshots that compiled kernels compute with, in host memory."""


class Arithmetic(ABC):
    """Computes events on chunks of one precision and device, for one thread at a time.

    Of a chunk it reads and writes ``x``, ``pending`` and ``c`` alone. ``decay`` is 1 where there
    is nothing to flow. ``out``, ``mine`` and ``peers`` are snapshots of the chunk's length, in the
    precision in which they travel.

    Args:
        scratch: room for the largest chunk, like its ``pending``.
    """

    name: str

    def __init__(self, scratch: Tensor) -> None:
        self.scratch = scratch

    def prepare(self, x: torch.dtype, wire: torch.dtype) -> None:  # noqa: B027
        """Compile what is needed for these precisions, so that no later call is slow."""

    @abstractmethod
    def snapshot(self, chunk: Chunk, out: Tensor, decay: float) -> bool:
        """Write x + pending as they will be after the flow; return whether all is finite.

        The flow itself is left to whoever next writes the chunk.
        """

    @abstractmethod
    def exchange(
        self, chunk: Chunk, mine: Tensor, peers: Tensor, decay: float, alpha_tilde: float
    ) -> float:
        """Flow, then apply delta = mine - peers; return its squared norm.

        A norm that is not finite says that delta was not, and that nothing was written.
        """

    @abstractmethod
    def snapshot_and_exchange(
        self, chunk: Chunk, out: Tensor, peers: Tensor, decay: float, alpha_tilde: float
    ) -> float:
        """Both at once, where the peer's snapshot is there already; return as from exchange."""

    @abstractmethod
    def boundary(self, chunk: Chunk, decay: float) -> None:
        """Flow, then x += pending; pending keeps what x's precision cannot hold."""

    def squared_distance(self, one: Tensor, other: Tensor) -> float:
        """Return the squared distance of two tensors, in the precision of ``scratch``."""
        return kernels.difference_(self.scratch[: one.numel()], one, other)


class TorchArithmetic(Arithmetic):
    """Eager torch: several passes over each chunk, and nothing to install or to compile."""

    name = "torch"

    def snapshot(self, chunk: Chunk, out: Tensor, decay: float) -> bool:
        """See :meth:`Arithmetic.snapshot`."""
        pending = chunk.pending
        if chunk.c is not None and decay != 1.0:
            pending = self.scratch[: chunk.num_elements]
            torch.add(chunk.pending, chunk.c, alpha=0.5 * (1.0 - decay), out=pending)
        kernels.snapshot_(out, chunk.x, pending)
        return kernels.is_finite(out)

    def exchange(
        self, chunk: Chunk, mine: Tensor, peers: Tensor, decay: float, alpha_tilde: float
    ) -> float:
        """See :meth:`Arithmetic.exchange`."""
        delta = self.scratch[: chunk.num_elements]
        squared_norm = kernels.difference_(delta, mine, peers)
        if not math.isfinite(squared_norm):
            # Finite values beyond 1e19 are no poison: only their squares are beyond float32.
            wide = delta.double()
            squared_norm = float(torch.dot(wide, wide))
            if not math.isfinite(squared_norm):
                return squared_norm
        if chunk.c is not None and decay != 1.0:
            kernels.flow_(chunk.pending, chunk.c, decay)
        kernels.exchange_(chunk.pending, chunk.c, delta, alpha_tilde)
        return squared_norm

    def snapshot_and_exchange(
        self, chunk: Chunk, out: Tensor, peers: Tensor, decay: float, alpha_tilde: float
    ) -> float:
        """See :meth:`Arithmetic.snapshot_and_exchange`."""
        self.snapshot(chunk, out, decay)
        return self.exchange(chunk, out, peers, decay, alpha_tilde)

    def boundary(self, chunk: Chunk, decay: float) -> None:
        """See :meth:`Arithmetic.boundary`."""
        if chunk.c is not None and decay != 1.0:
            kernels.flow_(chunk.pending, chunk.c, decay)
        kernels.add_pending_(chunk.x, chunk.pending, self.scratch[: chunk.num_elements])


def has_numba() -> bool:
    """Whether numba is installed; without importing it, which takes a third of a second."""
    return importlib.util.find_spec("numba") is not None


def choose_arithmetic(requested: str, num_values: int) -> ArithmeticName:
    """Return what computes the exchanges of ``num_values`` values.

    ``"auto"`` takes numba where it is installed and there are at least
    :data:`LEAST_COMPILED_VALUES`, else torch; ``"numba"`` and ``"torch"`` are taken as they are.

    Raises:
        ValueError: there is no such arithmetic, or numba was asked for and is not installed.

    Example:
        >>> choose_arithmetic("auto", 1000)
        'torch'
    """
    if requested == "auto":
        return "numba" if num_values >= LEAST_COMPILED_VALUES and has_numba() else "torch"
    for name in ARITHMETICS:
        if requested == name:
            break
    else:
        raise ValueError(
            f"GOSSIPDP_KERNELS is {requested!r}; choose one of auto, {', '.join(ARITHMETICS)}"
        )
    if name == "numba" and not has_numba():
        raise ValueError(
            "GOSSIPDP_KERNELS is 'numba', which is not installed: pip install 'gossipdp[fast]', "
            "or choose auto or torch"
        )
    return name


def make_arithmetic(name: ArithmeticName, x: Tensor, scratch: Tensor) -> Arithmetic:
    """Make the arithmetic called ``name``, or torch's where that cannot compute with such tensors.

    Compiled kernels know parameters of :data:`COMPILED_DTYPES` in host memory.

    Args:
        name: what was chosen.
        x: parameters like those it will be given.
        scratch: room for the largest chunk, like its ``pending``.
    """
    if (
        name == "numba"
        and x.device.type == "cpu"
        and x.dtype in COMPILED_DTYPES
        and scratch.dtype == torch.float32
    ):
        from gossipdp.dynamics.numba_arithmetic import NumbaArithmetic

        return NumbaArithmetic(scratch)
    return TorchArithmetic(scratch)
