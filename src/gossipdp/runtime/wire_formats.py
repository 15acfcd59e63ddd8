"""In which form parameters travel in exchanges, by name.

Both ends compute their difference from the same two numbers, whatever the form, so the mean of
x + c/2 is conserved in each; and no worker's own parameters are rounded. Consolidation and the
transfer of whole states are exact in each.

============  ===============================================  ===================  ===============
name          trained parameters                               bytes of a value     error
============  ===============================================  ===================  ===============
parameters    as they are held                                 4 (float32)          none
bfloat16      rounded to bfloat16; those of 2 bytes as they    2                    2**-9 of the
              are                                                                   value
lattice8      a code of the difference to the peer             1; 3 in a chunk      a few percent
              (:mod:`~gossipdp.runtime.lattice_exchange`)      that is repeated     of the distance
============  ===============================================  ===================  ===============

Buffers of floating point (BatchNorm's statistics) always travel as they are held; those of
integers, and frozen parameters, are not exchanged.
"""

import abc
from collections.abc import Callable
from typing import final

import torch

from gossipdp.protocol.messages import ExchangeId
from gossipdp.runtime import lattice_exchange, plain_exchange
from gossipdp.runtime.exchange import Exchange, ExchangeBuffers
from gossipdp.runtime.lattice_codec import LatticeCodec
from gossipdp.runtime.lattice_exchange import LatticeExchange
from gossipdp.runtime.link import Link
from gossipdp.runtime.plain_exchange import PlainExchange, as_it_is, in_bfloat16
from gossipdp.runtime.shared_state import SharedState

WIRE_FORMATS = ("parameters", "bfloat16", "lattice8")


class WireFormat(abc.ABC):
    """Starts exchanges of one form; owns the memory that they share one after the other."""

    @abc.abstractmethod
    def start(self, link: Link, id: ExchangeId, alpha_tilde: float) -> Exchange:
        """Return a new exchange; the one before has ended."""


def wire_format(
    name: str, shared: SharedState, allocate: Callable[[int], memoryview] | None = None
) -> WireFormat:
    """Return the form that ``name``, one of ``WIRE_FORMATS``, stands for.

    ``allocate``: the transport's, so that peers of the same host can read the slots in place.
    """
    match name:
        case "parameters" | "bfloat16":
            return _Plain(shared, name, allocate)
        case "lattice8":
            return _Lattice(shared, allocate)
    raise ValueError(f"unknown wire_format {name!r}; choose one of: {', '.join(WIRE_FORMATS)}")


@final
class _Plain(WireFormat):
    def __init__(
        self, shared: SharedState, name: str, allocate: Callable[[int], memoryview] | None
    ) -> None:
        self._shared = shared
        self._buffers = ExchangeBuffers(shared, plain_exchange.WINDOW, allocate)
        dtype_of = in_bfloat16 if name == "bfloat16" else as_it_is
        self._dtypes = [dtype_of(chunk) for chunk in shared.state.chunks]
        for dtype in set(self._dtypes):
            shared.prepare(dtype)

    def start(self, link: Link, id: ExchangeId, alpha_tilde: float) -> Exchange:
        self._buffers.renew()
        return PlainExchange(
            self._shared, link, id, alpha_tilde, buffers=self._buffers, dtypes=self._dtypes
        )


@final
class _Lattice(WireFormat):
    def __init__(self, shared: SharedState, allocate: Callable[[int], memoryview] | None) -> None:
        self._shared = shared
        self._buffers = ExchangeBuffers(shared, lattice_exchange.WINDOW, allocate)
        self._codec = LatticeCodec(shared, lattice_exchange.WINDOW)
        for dtype in (torch.float32, torch.bfloat16):  # what the code stands for; what is repeated
            shared.prepare(dtype)

    def start(self, link: Link, id: ExchangeId, alpha_tilde: float) -> Exchange:
        self._buffers.renew()
        return LatticeExchange(
            self._shared, link, id, alpha_tilde, buffers=self._buffers, codec=self._codec
        )
