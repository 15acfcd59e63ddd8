"""The description of a simulated run: step times, links, and everything else it depends on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random
from typing import TYPE_CHECKING, Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import Graph, build_graph
from gossipdp.protocol.neighbours import Fresh, NeighbourPolicy
from gossipdp.rules import (
    DEFAULT_GRAPH,
    Checked,
    at_least_1,
    comm_rate,
    number,
    one_of,
    option,
    positive_number,
)
from gossipdp_lab.simulate.objectives import Consensus, Objective

if TYPE_CHECKING:
    import networkx as nx

StepTimes: TypeAlias = Callable[[int], float]
"""Draws how long the next gradient step of a rank takes, in seconds."""
ExchangeTimes: TypeAlias = Callable[[int, int], float]
"""Draws how long the data of one exchange occupy the link between two ranks, in seconds."""
MakeOptimizer: TypeAlias = Callable[[list[Tensor]], Optimizer | Sequence[Optimizer]]
"""Makes the optimizer of one worker, or several, from ``[row]``: its trained parameters as one
vector. Those whose steps depend on shapes are made of views of the row."""
Fidelity: TypeAlias = Literal["ideal", "links"]

TOO_LARGE_SPREAD = 3.0
"""With a larger spread the mean comes from steps so rare that a run does not see them: nearly all
its steps take almost no time, and the run has too many of them."""


class ComputeTime(ABC):
    """The durations of gradient steps: a description, from which each run draws by its seed."""

    @property
    @abstractmethod
    def step_s(self) -> float:
        """Return the mean duration of an ordinary worker's step: the unit of time of a run."""

    @abstractmethod
    def begin(self, seed: int) -> StepTimes:
        """Return the step times of one run. Each rank draws from a source of its own."""


@final
@dataclass(frozen=True)
class ConstantTime(Checked, ComputeTime):
    """All steps take ``step_s`` seconds."""

    step_s: float = option(0.1, positive_number)

    def begin(self, seed: int) -> StepTimes:
        return lambda rank: self.step_s


@final
@dataclass(frozen=True)
class LognormalTime(Checked, ComputeTime):
    """Step times of mean ``step_s`` whose logarithm has standard deviation ``spread``.

    A ``spread`` of 3 or more raises a ValueError: hardly any run would see its mean.
    """

    step_s: float = option(0.1, positive_number)
    spread: float = option(0.1, partial(number, below=TOO_LARGE_SPREAD))

    def begin(self, seed: int) -> StepTimes:
        # A random source a rank, so that no worker's draws depend on another's.
        source = cache(lambda rank: Random(f"{seed} compute {rank}"))
        median = math.log(self.step_s) - self.spread**2 / 2  # so that the mean is step_s
        return lambda rank: source(rank).lognormvariate(median, self.spread)


@final
@dataclass(frozen=True)
class SlowedTime(ComputeTime):
    """``base``, with ranks that take ``factors[rank]`` times as long."""

    base: ComputeTime
    factors: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, factor in self.factors.items():
            positive_number(f"the slow factor of rank {rank}", factor)

    @property
    def step_s(self) -> float:
        return self.base.step_s

    def begin(self, seed: int) -> StepTimes:
        draw = self.base.begin(seed)
        return lambda rank: draw(rank) * self.factors.get(rank, 1.0)


def _speed(name: str, value: float) -> float:
    return value if value == math.inf else positive_number(name, value)


@dataclass(frozen=True)
class Link(Checked):
    """One link, the same in both directions.

    Args:
        latency_s: how long a byte travels, in seconds; by default as within one data center.
        bytes_per_s: how fast bytes leave, in each direction.
    """

    latency_s: float = option(0.0005, number)
    bytes_per_s: float = option(math.inf, _speed)


@dataclass(frozen=True)
class LinkModel(Checked):
    """All links of a network.

    The data of an exchange occupy their link for model_bytes / bytes_per_s, times a lognormal
    factor of mean 1, and arrive a latency later.

    There is one draw an exchange, not one an end: real workers send chunk by chunk, within a window
    of what the other has sent, so the slower direction holds back the faster one.

    Args:
        every: every link but the overrides.
        overrides: the links (i, j), in either order, that are different.
        jitter: standard deviation of the logarithm of that factor; 0 for none.
    """

    every: Link = Link()
    overrides: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    jitter: float = option(0.0, number)

    def __post_init__(self) -> None:
        super().__post_init__()
        for pair in self.overrides:
            if pair[0] == pair[1]:
                raise ValueError(f"link {pair} joins a rank with itself: give two ranks")
            if pair[::-1] in self.overrides:
                raise ValueError(f"link {pair} is given twice, in both orders: give it once")

    def link(self, sender: int, receiver: int) -> Link:
        """Return the link between two ranks."""
        pair = (sender, receiver)
        return self.overrides.get(pair) or self.overrides.get(pair[::-1], self.every)

    def latency_s(self, sender: int, receiver: int) -> float:
        """Return how long a message from one rank to another travels."""
        return self.link(sender, receiver).latency_s

    def begin(self, seed: int, model_bytes: float) -> ExchangeTimes:
        """Return the transfer times of one run for a model of ``model_bytes``."""
        random = Random(f"{seed} links")

        def transfer_s(sender: int, receiver: int) -> float:
            seconds = model_bytes / self.link(sender, receiver).bytes_per_s
            if self.jitter:
                seconds *= random.lognormvariate(-(self.jitter**2) / 2, self.jitter)
            return seconds

        return transfer_s


@dataclass(frozen=True)
class Scenario(Checked):
    """One simulated run, except for its method. Frozen and picklable.

    Args:
        graph: a name that :func:`~gossipdp.graph.build_graph` knows, a graph that it built, or a
            networkx graph.
        num_workers: number of workers.
        objective: the loss that the workers minimise.
        optimizer: makes the optimizer of each worker, as ``partial(torch.optim.SGD, lr=0.1)`` does.
        comm_rate: r, exchanges per worker per gradient step; "auto": as many as each worker's links
            allow, at "links" only.
        fidelity: "ideal", the paper's edges: they fire as Poisson processes, and exchanges are
            instantaneous (gradients come by ``compute_time``, in the paper they are Poisson events
            too); "links", the real protocol: messages and data take their time.
        neighbour_policy: chooses the neighbour to ask; has an effect at "links" only. The default
            is that of real workers.
        compute_time: durations of gradient steps; its nominal step is the unit of time.
        links: the links; at "links", and for the synchronous methods.
        model_bytes: bytes that one worker sends in an exchange; None: those of a row.
        num_steps: length of the run in units of time: the gradient steps of an ordinary worker.
        seed: of everything random in the run.
        num_records: number of points of its time series, evenly spaced.
        stop_below: end once the consensus distance is below this share of its first value.
        exchange_moments: the optimizer's tensors that are averaged too, at "links" only, as in
            ``Exchange(moments=)``: True for the library's choice, or periods by name.
        schedule: the factor on the learning rate at a share of the run, 0 to 1; None: always 1.
        keep_timeline: record what each worker does when.
    """

    graph: str | Graph | nx.Graph[int] = DEFAULT_GRAPH
    num_workers: int = 16
    objective: Objective = field(default_factory=Consensus)
    optimizer: MakeOptimizer = field(default_factory=lambda: partial(torch.optim.SGD, lr=0.1))
    comm_rate: float | str = option(1.0, comm_rate)
    fidelity: Fidelity = option("ideal", partial(one_of, ("ideal", "links")))
    neighbour_policy: type[NeighbourPolicy] = Fresh
    compute_time: ComputeTime = field(default_factory=ConstantTime)
    links: LinkModel = field(default_factory=LinkModel)
    model_bytes: float | None = option(None, positive_number)
    num_steps: float = option(100.0, positive_number)
    seed: int = 0
    num_records: int = option(100, at_least_1)
    stop_below: float = option(0.0, partial(number, below=1.0))
    exchange_moments: bool | Mapping[str, int] = False
    schedule: Callable[[float], float] | None = None
    keep_timeline: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.comm_rate == "auto" and self.fidelity != "links":
            raise ValueError(
                "comm_rate 'auto' follows what exchanges cost, and at fidelity 'ideal' they cost "
                "nothing: choose fidelity 'links'"
            )
        if self.exchange_moments and self.fidelity != "links":
            raise ValueError(
                "exchange_moments has no effect at fidelity 'ideal', whose exchanges carry no "
                "moments: choose fidelity 'links'"
            )
        named = {} if isinstance(self.exchange_moments, bool) else self.exchange_moments
        for name, every in named.items():
            at_least_1(f"exchange_moments[{name!r}]", every)

    @property
    def end_s(self) -> float:
        """Return the latest end of the run, in virtual seconds."""
        return self.num_steps * self.compute_time.step_s

    def begin_steps(self) -> StepTimes:
        """Return the step times of workers that are not in step, by the seed.

        Each worker's first time is only the rest of a step, in the middle of which it begins.
        """
        draw_s, source = self.compute_time.begin(self.seed), Random(f"{self.seed} offsets")
        left = {rank: source.random() for rank in range(self.num_workers)}
        return lambda rank: left.pop(rank, 1.0) * draw_s(rank)

    def make_constants(self) -> Constants:
        """Build and check the graph; return its rates and constants, at :attr:`comm_rate`."""
        graph, rate = build_graph(self.graph, self.num_workers), self.comm_rate
        return Constants.of(graph, 1.0 if isinstance(rate, str) else rate)
