"""The rows of a population as parameters of real workers' sums, and links that carry their chunks.

Everything else that a sum does is done by :class:`gossipdp.gossip.sums.Sums`, as on a real worker.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.gossip.sums import Outcome
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp_lab.simulate.population import Population
from simulated_faults.ledger import put

Frame: TypeAlias = tuple[FrameType, ChunkKey, bytes]
"""A chunk on its way."""


@dataclass(frozen=True)
class Committed:
    """The result that a worker committed and its input, in float64, each as one row; (d,)."""

    outcome: Outcome
    result: Tensor
    given: Tensor


@final
class AveragedRows:
    """The input of each worker to a sum, in chunks of its row, and the result it ended with."""

    def __init__(self, population: Population, num_chunks: int) -> None:
        num_columns = population.x.shape[1]
        self.committed: dict[int, Committed] = {}
        self._population: Final = population
        self._bounds: Final = [chunk * num_columns // num_chunks for chunk in range(num_chunks + 1)]

    def forget(self, rank: int) -> None:
        """Let go of what an old process of ``rank`` ended with."""
        self.committed.pop(rank, None)

    def state(self, rank: int) -> State:
        """Return the row of ``rank`` as the parameters of a worker, which share its memory."""
        x, c = self._population.x[rank], self._population.c
        segments = []
        for start, stop in zip(self._bounds, self._bounds[1:], strict=False):
            segment = Segment(x[start:stop], Role.TRAINED, momentum=c is not None)
            if c is not None:
                (chunk,) = segment.chunks
                chunk.c, chunk.theta_c = c[rank, start:stop], chunk.theta
            segments.append(segment)
        return State(segments)

    def inputs(self, rank: int) -> Tensor:
        """Return x + c/2 of ``rank``, in float64."""
        row = self._population.x[rank].double().clone()
        if self._population.c is not None:
            row[: self._population.num_trained] += 0.5 * self._population.c[rank].double()
        return row

    def end(self, rank: int, outcome: Outcome) -> None:
        """Do what the main thread does: the result stands for the row of ``rank``."""
        result = torch.cat(outcome.values)
        self.committed[rank] = Committed(outcome, result, self.inputs(rank))
        put(self._population, rank, result)


def no_parameters(num_chunks: int) -> State:
    """Return the state of a worker that has one number in each chunk, where no rows are kept."""
    return State([Segment(torch.zeros(1), Role.TRAINED) for _ in range(num_chunks)])


class SimulatedLink:
    """One end of a wire, as far as sums need a link: chunks leave at once."""

    def __init__(self, peer: int, send: Callable[[Frame], None], close: Callable[[], None]) -> None:
        self.peer = peer
        self.closed = False
        self.queued_chunks = 0
        self.chunk_bytes_sent: Counter[FrameType] = Counter()
        self.chunk_bytes_received: Counter[FrameType] = Counter()
        self._send, self._close = send, close

    def send_chunk(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        if not self.closed:
            self.chunk_bytes_sent[frame_type] += payload.nbytes
            self._send((frame_type, key, bytes(payload)))

    def close(self, reason: str) -> None:
        self.closed = True
        self._close()


class Links(Mapping[int, Any]):
    """The links that a worker has now, made from the wires of its network."""

    def __init__(self, peers: Callable[[], list[int]], link: Callable[[int], Any]) -> None:
        self._peers, self._link = peers, link

    def __getitem__(self, peer: int) -> Any:
        if (found := self._link(peer)) is None:
            raise KeyError(peer)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._peers())

    def __len__(self) -> int:
        return len(self._peers())
