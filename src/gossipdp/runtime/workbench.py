"""What one thread computes exchanges with."""

import torch

from gossipdp.dynamics.arithmetic import Arithmetic, ArithmeticName
from gossipdp.dynamics.state import Chunk, State
from gossipdp.runtime.device import Device


class Workbench:
    """One thread's arithmetic, with room for one chunk, per precision and device of parameters.

    Args:
        state: whose chunks it will be asked for.
        name: what computes, where it can compute with the parameters at hand.
        device: where those live.
    """

    def __init__(self, state: State, name: ArithmeticName, device: Device) -> None:
        largest: dict[tuple[torch.dtype, torch.device], Chunk] = {}
        for chunk in state.chunks:
            held = largest.setdefault(self._key(chunk), chunk)
            if held.num_elements < chunk.num_elements:
                largest[self._key(chunk)] = chunk
        self._arithmetics: dict[tuple[torch.dtype, torch.device], Arithmetic] = {
            key: device.arithmetic(name, chunk.x, torch.empty_like(chunk.pending))
            for key, chunk in largest.items()
        }
        self.names: set[str] = {arithmetic.name for arithmetic in self._arithmetics.values()}

    def prepare(self, wire: torch.dtype | None = None) -> None:
        """Compile for snapshots of the precision ``wire``, by default that of the parameters."""
        for (x, _), arithmetic in self._arithmetics.items():
            arithmetic.prepare(x, wire or x)

    def of(self, chunk: Chunk) -> Arithmetic:
        """Return what computes with such a chunk."""
        return self._arithmetics[self._key(chunk)]

    @staticmethod
    def _key(chunk: Chunk) -> tuple[torch.dtype, torch.device]:
        return chunk.x.dtype, chunk.x.device
