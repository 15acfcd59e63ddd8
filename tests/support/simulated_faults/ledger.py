"""An account of the sum of x + c/2: each event, and its change of each row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from gossipdp.dynamics.phase import Phase
from gossipdp.protocol.actions import Begin, Rebuilt
from gossipdp.protocol.messages import ExchangeId
from gossipdp_lab.simulate.links import CarriedRows
from gossipdp_lab.simulate.network import Payload
from gossipdp_lab.simulate.population import Population, Training

Row = NDArray[np.float64]

TOLERANCE = 1e-9
"""For rows of about 1 and some thousand events; a lost or doubled delta is far above it."""


class InvariantBroken(AssertionError):
    """Something that must never happen did.

    Attributes:
        invariant: which one, in a few words that are the same every time.
    """

    def __init__(self, invariant: str, details: str) -> None:
        super().__init__(f"{invariant}: {details}")
        self.invariant = invariant


class FaultyPayload(Payload):
    """Nothing, as of any network, and nothing changes by what faults bring."""

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        """``rank`` follows a new graph, with another speed of its phase."""

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        """``rank``, in no exchange, holds x + c/2 of ``peer`` now, with c = 0."""


def put(population: Population, rank: int, row: torch.Tensor) -> None:
    """Give one worker another row, and no momentum; its change is no drift."""
    trained = population.num_trained
    population.expected_sum -= population.x[rank, :trained].double()
    if population.c is not None:
        population.expected_sum -= 0.5 * population.c[rank].double()
        population.c[rank].zero_()
    population.x[rank].copy_(row)
    population.expected_sum += row[:trained].double()


@dataclass(slots=True)
class _Account:
    """The change that an exchange made to the rows of its two ends."""

    change: Row
    num_applied: int = 0


@final
class Ledger(CarriedRows, FaultyPayload):
    """The rows of a simulation, where graphs change and joiners come, and checks of x + c/2.

    - One exchange at a time: none begins, or is applied, at a worker in another one.
    - Flow leaves x + c/2 of a worker unchanged.
    - An exchange that both ends applied leaves the sum over both unchanged; one that a single end
      ever applies is counted (``num_torn``), and so is what it did (``torn``).
    - Who takes over another's state has its x + c/2 then; what that brought is no drift.
    - In all, the sum over all rows (float64) moves only so, and by gradient steps.
    """

    def __init__(self, training: Training, phases: Mapping[int, Phase]) -> None:
        super().__init__(training, phases)
        population = training.population
        self.num_torn = 0
        self.torn: Row = np.zeros(population.num_trained)
        self.steps = [0] * len(population.x)
        """Gradient steps that each rank has ended, over all its lives."""
        self.total_steps = 0
        self._x: Final = population.x.numpy()
        self._c: Final = None if population.c is None else population.c.numpy()
        self._doing: dict[int, ExchangeId] = {}
        self._applied: set[int] = set()  # the ranks that have applied the exchange they are in
        self._accounts: dict[ExchangeId, _Account] = {}

    def z(self, rank: int) -> Row:
        """X + c/2 of one worker."""
        row: Row = self._x[rank]
        return row.copy() if self._c is None else row + 0.5 * self._c[rank]

    def step_ended(self, rank: int, now_s: float) -> None:
        self.steps[rank] += 1
        self.total_steps += 1
        super().step_ended(rank, now_s)

    def exchange_began(self, rank: int, begin: Begin, now_s: float) -> Any:
        if rank in self._doing:
            doing = f"begins {begin.id} while in {self._doing[rank]}"
            raise InvariantBroken("one exchange at a time", f"rank {rank} {doing} at {now_s}")
        self._doing[rank] = begin.id
        before = self.z(rank)
        data = super().exchange_began(rank, begin, now_s)
        self._expect_equal("flow leaves x + c/2", before, self.z(rank), rank, now_s)
        return data

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        if self._doing.get(rank) != id:
            doing = f"applies data of {id} while in {self._doing.get(rank)}"
            raise InvariantBroken("one exchange at a time", f"rank {rank} {doing} at {now_s}")
        before = self.z(rank)
        super().data_arrived(rank, id, data, now_s)
        self._applied.add(rank)
        account = self._accounts.setdefault(id, _Account(np.zeros_like(before)))
        account.change += self.z(rank) - before
        account.num_applied += 1
        if account.num_applied == 2:
            del self._accounts[id]
            zero = np.zeros_like(before)
            self._expect_equal("an exchange conserves x + c/2", zero, account.change, rank, now_s)

    def exchange_ended(
        self, rank: int, id: ExchangeId, now_s: float, *, is_withdrawn: bool = False
    ) -> None:
        super().exchange_ended(rank, id, now_s, is_withdrawn=is_withdrawn)
        del self._doing[rank]
        if rank in self._applied:
            self._applied.remove(rank)
        elif (account := self._accounts.pop(id, None)) is not None:  # the other end has applied it
            self.num_torn += 1
            self.torn += account.change

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        self.phases[rank].set_speed(graph.eta, graph.worker_rate, now_s)

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        wanted, whole = self.z(peer), "parameters are taken over whole"
        put(self.population, rank, torch.from_numpy(wanted))
        self._expect_equal(whole, wanted, self.z(rank), rank, now_s)
        if self._c is not None and self._c[rank].any():
            raise InvariantBroken(whole, f"rank {rank} kept momentum at {now_s}")

    def check_sum(self, now_s: float) -> None:
        total = sum((account.change for account in self._accounts.values()), self.torn.copy())
        self.population.half_applied = torch.from_numpy(total)
        drift = self.population.drift()
        if not drift < TOLERANCE:
            invariant = "the mean of x + c/2 is conserved"
            raise InvariantBroken(invariant, f"it drifted by {drift} at {now_s}")

    def _expect_equal(
        self, invariant: str, wanted: Row, found: Row, rank: int, now_s: float
    ) -> None:
        error = float(np.abs(wanted - found).max())
        if not error < TOLERANCE:
            raise InvariantBroken(invariant, f"off by {error} at rank {rank} at {now_s}")
