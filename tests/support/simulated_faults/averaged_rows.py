"""The rows of a population as what a simulated consolidation averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.protocol.actions import Commit
from gossipdp.simulate.population import Population
from simulated_faults.rows import put


@dataclass(frozen=True)
class Committed:
    """What a worker committed.

    Attributes:
        commit: the protocol's word for it.
        result: the row that stands for the worker's own now; (d,).
    """

    commit: Commit
    result: Tensor


@final
class AveragedRows:
    """Sums and results of each worker's consolidation, in chunks of its row.

    As on a real worker: input is the row flowed to infinity, x + c/2. Sums and results share one
    buffer; the input stays until a result is committed.

    Args:
        population: the rows.
        num_chunks: into how many chunks a row is split, at most its number of columns.
    """

    def __init__(self, population: Population, num_chunks: int) -> None:
        num_columns = population.x.shape[1]
        if not 1 <= num_chunks <= num_columns:
            raise ValueError(f"num_chunks is {num_chunks}; a row of {num_columns} has 1 or more")
        self.committed: dict[int, Committed] = {}
        """What each rank committed last."""
        self.inputs: dict[int, Tensor] = {}
        """What each rank put in."""
        self._population: Final = population
        self._bounds: Final = [chunk * num_columns // num_chunks for chunk in range(num_chunks + 1)]
        self._buffers: dict[int, Tensor] = {}

    def forget(self, rank: int) -> None:
        """A new process of ``rank`` begins: nothing of an old one is left."""
        self.committed.pop(rank, None)
        self.inputs.pop(rank, None)
        self._buffers.pop(rank, None)

    def prepare(self, rank: int) -> None:
        """Begin with the input of ``rank``."""
        x, c = self._population.trained, self._population.c
        if c is not None:
            update.flow(x[rank], c[rank], 0.5)
            c[rank].zero_()
        self.inputs[rank] = self._population.x[rank].clone()
        self._buffers[rank] = self.inputs[rank].clone()

    def chunk(self, rank: int, chunk: int) -> Tensor:
        """One chunk of the sum or of the result, as it stands at ``rank``; a copy."""
        return self._view(rank, chunk).clone()

    def add(self, rank: int, chunk: int, partial: Tensor) -> None:
        """Add what a child sent to the sum at ``rank``."""
        self._view(rank, chunk).add_(partial)

    def finish(self, rank: int, chunk: int, num_members: int) -> None:
        """Turn the sum at ``rank``, which is complete, into the mean."""
        self._view(rank, chunk).div_(num_members)

    def take(self, rank: int, chunk: int, result: Tensor) -> None:
        """Put in place at ``rank`` what arrived of a result."""
        self._view(rank, chunk).copy_(result)

    def squared_distance(self, rank: int) -> float:
        """|input - result|² at ``rank``."""
        return float((self._population.x[rank] - self._buffers[rank]).double().square().sum())

    def commit(self, rank: int, commit: Commit) -> None:
        """The result stands for the row of ``rank``."""
        result = self._buffers[rank].clone()
        self.committed[rank] = Committed(commit, result)
        put(self._population, rank, result)

    def is_same_everywhere(self, ranks: list[int]) -> bool:
        """Whether the rows of these ranks have the same bits."""
        rows = self._population.x.index_select(0, torch.tensor(ranks))
        return bool((rows == rows[0]).all())

    def _view(self, rank: int, chunk: int) -> Tensor:
        return self._buffers[rank][self._bounds[chunk] : self._bounds[chunk + 1]]
