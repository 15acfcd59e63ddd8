"""The arithmetic of exchanges in compiled loops: one pass over memory an event."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossipdp.dynamics import numba_kernels
from gossipdp.dynamics.arithmetic import COMPILED_DTYPES, Arithmetic
from gossipdp.dynamics.state import Chunk, Role

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class NumbaArithmetic(Arithmetic):
    """Compiled by numba, for float32 and bfloat16 parameters and snapshots in host memory.

    Imports numba (a third of a second) and loads each loop at its first call, from disk where
    it has been compiled before; :meth:`prepare` does so at once.
    """

    name = "numba"

    def __init__(self, scratch: Tensor) -> None:
        super().__init__(scratch)
        self._kept_pending = _array(scratch)
        self._kept_c = _array(torch.empty_like(scratch))

    def prepare(self, x: torch.dtype, wire: torch.dtype) -> None:
        """See :meth:`Arithmetic.prepare`; an empty call of each loop compiles it.

        Where the disk is full, what was compiled is used all the same, and not kept.
        """
        if wire not in COMPILED_DTYPES:
            return  # that of other chunks, which are not computed here
        pending, snapshot = torch.empty(0), torch.empty(0, dtype=wire)
        chunk = Chunk(Role.TRAINED, torch.empty(0, dtype=x), pending, pending)
        for call in (
            lambda: self.snapshot(chunk, snapshot, 1.0),
            lambda: self.exchange(chunk, snapshot, snapshot, 1.0, 0.5),
            lambda: self.snapshot_and_exchange(chunk, snapshot, snapshot, 1.0, 0.5),
            lambda: self.boundary(chunk, 1.0),
        ):
            try:
                call()
            except OSError as error:
                logger.warning("compiled kernels cannot be kept on disk: %s", error)
                call()

    def snapshot(self, chunk: Chunk, out: Tensor, decay: float) -> bool:
        """See :meth:`Arithmetic.snapshot`."""
        flows = chunk.c is not None and decay != 1.0
        return bool(
            numba_kernels.snapshot(
                _array(out), _array(chunk.x), *_pending_and_c(chunk), flows, decay
            )
        )

    def exchange(
        self, chunk: Chunk, mine: Tensor, peers: Tensor, decay: float, alpha_tilde: float
    ) -> float:
        """See :meth:`Arithmetic.exchange`."""
        has_c = chunk.c is not None
        return float(
            numba_kernels.exchange(
                *_pending_and_c(chunk), has_c, _array(mine), _array(peers), decay, alpha_tilde
            )
        )

    def snapshot_and_exchange(
        self, chunk: Chunk, out: Tensor, peers: Tensor, decay: float, alpha_tilde: float
    ) -> float:
        """See :meth:`Arithmetic.snapshot_and_exchange`."""
        return float(
            numba_kernels.snapshot_and_exchange(
                _array(out),
                _array(chunk.x),
                *_pending_and_c(chunk),
                chunk.c is not None,
                _array(peers),
                self._kept_pending,
                self._kept_c,
                decay,
                alpha_tilde,
            )
        )

    def boundary(self, chunk: Chunk, decay: float) -> None:
        """See :meth:`Arithmetic.boundary`."""
        flows = chunk.c is not None and decay != 1.0
        numba_kernels.boundary(_array(chunk.x), *_pending_and_c(chunk), flows, decay)


def _pending_and_c(chunk: Chunk) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Both arrays; where there is no c, pending stands in its place."""
    pending = chunk.pending.numpy()
    return pending, pending if chunk.c is None else chunk.c.numpy()


def _array(values: Tensor) -> NDArray[np.generic]:
    """The tensor's memory; bfloat16, which numpy does not know, as the bits in uint16."""
    if values.dtype == torch.bfloat16:
        values = values.view(torch.uint16)
    return values.numpy()
