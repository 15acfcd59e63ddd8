"""What all workers of a run must have alike, and how a difference is told."""

import hashlib
import itertools

import msgspec

# Name and shape of everything that is exchanged, in order.
Tensors = tuple[tuple[str, tuple[int, ...]], ...]


class Settings(msgspec.Struct, frozen=True):
    """What all workers of a run must have alike.

    ``tensors`` are the names and shapes of what is exchanged, in order; never the device, so that
    a CPU and a CUDA worker can train together. The others are short texts that an error can show.
    """

    tensors: Tensors
    method: str
    graph: str
    comm_rate: str
    wire_format: str
    start: str = "afresh"

    @property
    def model(self) -> str:
        """The fingerprint of ``tensors``: 32 hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self.tensors)).hexdigest()[:32]

    def difference(self, reference: "Settings") -> str | None:
        """In what this worker differs from worker 0, in words; None where they agree."""
        for name in ("start", "method", "graph", "comm_rate", "wire_format"):
            here, there = getattr(self, name), getattr(reference, name)
            if here != there:
                if name == "start":
                    return f"this worker starts {here}, and worker 0 starts {there}"
                return f"{name} is {here!r} here and {there!r} on worker 0"
        for index, (here, there) in enumerate(
            itertools.zip_longest(self.tensors, reference.tensors)
        ):
            if here != there:
                return (
                    f"the models differ, first in tensor {index}: {_tensor(here)} here and "
                    f"{_tensor(there)} on worker 0"
                )
        return None


def _tensor(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{tensor[0]} of shape {tensor[1]}"
