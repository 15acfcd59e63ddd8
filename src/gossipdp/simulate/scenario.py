"""Everything that a simulated run depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import networkx as nx

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.simulate.compute_time import ComputeTime, ConstantTime
from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.link_model import LinkModel
from gossipdp.simulate.objective import Objective
from gossipdp.simulate.optimizers import RowOptimizer, Sgd

Fidelity: TypeAlias = Literal["ideal", "links"]


@dataclass(frozen=True)
class Scenario:
    """One simulated run, but for its method. Frozen and picklable.

    Args:
        graph: a name that :func:`~gossipdp.graph.build_graph` knows, or a networkx graph.
        num_workers: number of workers.
        objective: what the workers minimise.
        optimizer: how they step.
        comm_rate: r, exchanges per worker per gradient step.
        fidelity: "ideal", the paper's model: edges fire as Poisson processes and exchanges are
            instantaneous; "links", the real protocol: messages and data take their time.
        neighbour_policy: whom to ask; plays a part at "links" only.
        compute_time: how long gradient steps take; its nominal step is the unit of time.
        links: what links are like; at "links", and for the synchronous methods.
        model_bytes: what one worker sends in an exchange; None: the bytes of a row.
        num_steps: length of the run in units of time: the gradient steps of an ordinary worker.
        seed: of everything random in the run.
        graph_seed: of the random graphs.
        num_records: how many points its time series have, evenly spaced.
        stop_below: end once the consensus distance is below this share of its first value.
        eta_factor: multiplies eta.
        alpha_tilde_factor: multiplies the excess alpha_tilde - 1/2.
        rates: lambda_ij of each edge in place of the default ones; at most ``comm_rate`` a worker.
        learning_rate_decay: warm-up and cosine decay over the run, in place of a constant rate.
        keep_timeline: record what each worker does when.
    """

    graph: str | nx.Graph[int] = "ring"
    num_workers: int = 16
    objective: Objective = field(default_factory=Consensus)
    optimizer: RowOptimizer = field(default_factory=Sgd)
    comm_rate: float = 1.0
    fidelity: Fidelity = "ideal"
    neighbour_policy: str = "fresh"
    compute_time: ComputeTime = field(default_factory=ConstantTime)
    links: LinkModel = field(default_factory=LinkModel)
    model_bytes: float | None = None
    num_steps: float = 100.0
    seed: int = 0
    graph_seed: int = 0
    num_records: int = 100
    stop_below: float = 0.0
    eta_factor: float = 1.0
    alpha_tilde_factor: float = 1.0
    rates: dict[tuple[int, int], float] | None = None
    learning_rate_decay: bool = False
    keep_timeline: bool = False

    def __post_init__(self) -> None:
        for name in ("comm_rate", "num_steps", "eta_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a positive number")
        if not (math.isfinite(self.alpha_tilde_factor) and self.alpha_tilde_factor >= 0):
            raise ValueError(
                f"alpha_tilde_factor is {self.alpha_tilde_factor}; it must be at least 0"
            )
        if not 0 <= self.stop_below < 1:
            raise ValueError(f"stop_below is {self.stop_below}; it must be 0, or less than 1")
        if self.num_records < 1:
            raise ValueError(f"num_records is {self.num_records}; it must be at least 1")
        if self.model_bytes is not None and not self.model_bytes > 0:
            raise ValueError(f"model_bytes is {self.model_bytes}; it must be positive")
        if self.fidelity not in ("ideal", "links"):
            raise ValueError(f"there is no fidelity {self.fidelity!r}; choose ideal or links")

    def make_graph(self) -> nx.Graph[int]:
        """The graph, checked."""
        return build_graph(self.graph, self.num_workers, seed=self.graph_seed)

    def make_constants(self) -> Constants:
        """The graph's rates and constants, at :attr:`comm_rate`."""
        return Constants.of(self.make_graph(), self.comm_rate, self.rates)
