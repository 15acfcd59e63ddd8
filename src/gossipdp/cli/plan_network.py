"""``gossipdp plan --step-ms ...``: a model on a network, beside all-reduce, graph by graph."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from rich.table import Table
from rich.text import Text

from gossipdp.cli.option_checks import check_number
from gossipdp.graph.constants import Constants
from gossipdp.graph.network_plan import (
    LATENCY_S,
    NOISE_MODELS,
    GradientNoise,
    check_step_spread,
    stationary_distance,
)
from gossipdp.graph.topology import build_graph, torus_shape
from gossipdp.simulate.network import Conditions, Network, make_workers
from gossipdp.tasks.options import check_numbers

if TYPE_CHECKING:
    from gossipdp.cli.plan import PlanArguments

DEFAULT_NOISE = "momentum"
CANDIDATES = ("ring", "exponential", "torus", "complete")

CLOSE_ENOUGH = 1.1
"""Among graphs whose consensus distance is within this factor of the least, the one with the
fewest edges is preferred: fewer connections, and exchanges on shorter paths."""

SIMULATED_WORKERS = 16
"""Larger graphs are simulated with as many workers of the same kind: what share of the exchanges
takes place is set by their duration and that of steps, hardly by the number of workers."""

WARM_UP_STEPS = 40
SIMULATED_STEPS = 200
EXCHANGES_TO_SEE = 20
DEMANDS_TO_SEE = 400
LEAST_SIMULATED_RATE = 0.1
"""At lower comm rates several gradient steps are simulated as one: exchanges would be too rare."""

LONGEST_EXCHANGE_STEPS = 100.0
"""Exchanges longer than this are simulated as long, and the rate scaled: links are full anyway."""

PLANNED_STEPS = 1000

LEAST_GAIN = 0.02
"""A smaller share of the time is less than such a model can tell."""

BACKWARD_SHARE = 2 / 3
"""Of a gradient step: a backward pass multiplies twice as many matrices as a forward pass."""

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DistributedDataParallel's defaults. They count float32 gradients, also where fewer bytes travel;
the bucket that is full first is smaller."""

BFLOAT16_SHARE = 0.5
"""Of a float32 model's bytes."""

DEFAULT_SYNC_EVERY = 16

RIVALS = {
    "ddp": "DDP, float32",
    "ddp_bf16": "DDP, bfloat16 (its hook)",
    "local_averaging": "an average of all every {sync_every} steps (DiLoCo, local SGD)",
}
AT_EVERY_STEP = ("ddp", "ddp_bf16")

MAX_WORKERS = 256
"""The exact consensus distance costs the cube of the number of workers."""

NOISE_WORDS = {
    "white": "white gradient noise",
    "momentum": "white gradient noise, SGD momentum 0.9",
    "drift": "heterogeneous data: each worker its own constant drift",
}


@dataclass(frozen=True)
class TrainingConditions:
    """A model and the machines and links it trains on, the same for every worker.

    A worker takes part in one exchange at a time, so that its bandwidth does not depend on its
    degree; both directions carry data at once.
    """

    model_bytes: float
    """Of the parameters that an exchange or an all-reduce moves."""

    step_s: float
    """Mean duration of a gradient step."""

    bytes_per_s: float
    """Of a worker's link, in each direction."""

    latency_s: float = LATENCY_S
    step_spread: float = 0.0
    """Standard deviation of the logarithm of step times, drawn anew in every step; at most 3."""

    moments_share: float = 0.0
    """Of the optimizer's state in exchanges, on average, as a share of model_bytes."""

    sync_every: int = DEFAULT_SYNC_EVERY
    """Gradient steps from one average to the next, of the rival that averages seldom."""

    @classmethod
    def of(cls, arguments: PlanArguments) -> TrainingConditions:
        """Those that the options say."""
        assert arguments.step_ms is not None
        assert arguments.link_mbps is not None
        latency_ms, spread = arguments.latency_ms, arguments.step_spread or 0.0
        check_step_spread("--step-spread", spread)
        check_numbers(arguments, sync_every=1)
        latency_s = LATENCY_S
        if latency_ms is not None:
            latency_s = check_number("--latency-ms", latency_ms) / 1e3
        return cls(
            model_bytes=model_bytes(arguments.parameters, arguments.model_mb),
            step_s=check_number("--step-ms", arguments.step_ms, is_positive=True) / 1e3,
            bytes_per_s=check_number("--link-mbps", arguments.link_mbps, is_positive=True) * 125e3,
            latency_s=latency_s,
            step_spread=spread,
            moments_share=_adams_share(arguments.comm_rate)
            if arguments.optimizer == "adam"
            else 0.0,
            sync_every=arguments.sync_every or DEFAULT_SYNC_EVERY,
        )

    @property
    def exchange_bytes(self) -> float:
        """What an exchange moves each way, on average."""
        return self.model_bytes * (1.0 + self.moments_share)

    @property
    def exchange_s(self) -> float:
        """How long an exchange takes once both ends agree: exchange_bytes/bytes_per_s + latency."""
        return self.exchange_bytes / self.bytes_per_s + self.latency_s

    def all_reduce_s(self, num_workers: int, models: float = 1.0) -> float:
        """Ring all-reduce of so many models: 2(n-1)/n bytes/bytes_per_s + 2(n-1) latency."""
        hops = 2.0 * (num_workers - 1)
        sent_s = hops / num_workers * models * self.model_bytes / self.bytes_per_s
        return sent_s + hops * self.latency_s

    def overlapped_step_s(self, num_workers: int, share: float = 1.0) -> float:
        """A step of DistributedDataParallel, which sends gradients while the backward pass goes on.

        Gradients come at an even pace during the backward pass of the slowest worker. Buckets of
        them are all-reduced one after another, each once it is full, the last when the backward
        pass has ended; their latencies overlap, so that they count once. ``share``: of the bytes of
        float32 gradients that travel.

        With bucket k full at f_k, and b_k the bytes of it and of all later ones, the step takes
        max_k (f_k + 2(n-1)/n b_k/bytes_per_s) + 2(n-1) latency. Both f and b are linear in k but
        for the first and the last bucket: so only these and their neighbours are looked at.
        """
        slowest_s, total = self.slowest_step_s(num_workers), self.model_bytes
        first = min(total, FIRST_BUCKET_BYTES)
        last = math.ceil((total - first) / BUCKET_BYTES)

        def ended_s(bucket: int) -> float:
            begin = first + (bucket - 1) * BUCKET_BYTES if bucket else 0.0
            end = min(total, first + bucket * BUCKET_BYTES)
            full_s = slowest_s * (1.0 - BACKWARD_SHARE * (1.0 - end / total))
            return full_s + self.all_reduce_s(num_workers, share * (1.0 - begin / total))

        return max(ended_s(min(max(bucket, 0), last)) for bucket in (0, 1, last - 1, last))

    def slowest_step_s(self, num_workers: int, steps_at_once: float = 1.0) -> float:
        """Mean of the longest of n lognormal step times: what a barrier waits for.

        E max = int F^-1(u) n u^(n-1) du, here over the normal z = Phi^-1(u), with F^-1(u) =
        step_s exp(sigma z - sigma^2/2). With a barrier once in so many steps: of their mean.
        """
        sigma = self.spread_of_mean(steps_at_once)
        if sigma == 0.0 or num_workers == 1:
            return self.step_s
        from scipy.special import log_ndtr

        z = np.linspace(-9.0, 9.0 + sigma, 20_001)
        log_weight = (num_workers - 1) * log_ndtr(z) - 0.5 * z**2 - 0.5 * sigma**2 + sigma * z
        density = num_workers * np.exp(log_weight) / math.sqrt(2.0 * math.pi)
        return self.step_s * float(density.sum()) * float(z[1] - z[0])

    def spread_of_mean(self, num_steps: float) -> float:
        """The spread of the mean of steps, as if it were lognormal too: the variance adds up."""
        return math.sqrt(math.log1p(math.expm1(self.step_spread**2) / num_steps))

    def rivals_s(self, num_workers: int) -> dict[str, float]:
        """Seconds of `PLANNED_STEPS` steps, by the keys of `RIVALS`."""
        every = self.sync_every
        averaged_s = (
            self.slowest_step_s(num_workers, every) + self.all_reduce_s(num_workers) / every
        )
        steps_s = {
            "ddp": self.overlapped_step_s(num_workers),
            "ddp_bf16": self.overlapped_step_s(num_workers, BFLOAT16_SHARE),
            "local_averaging": averaged_s,
        }
        return {name: PLANNED_STEPS * seconds for name, seconds in steps_s.items()}


@dataclass(frozen=True)
class GraphPrediction:
    """A graph under stated conditions, at the comm rate that it achieves."""

    name: str
    num_edges: int
    nominal_comm_rate: float
    """Mean exchanges per worker per gradient step that the rates ask for; on graphs of unequal
    degrees less than the budget."""

    achieved_comm_rate: float
    """Those that take place."""

    consensus_distance: float
    """Stationary, of A2CiD2 with the paper's constants, all rates lessened alike."""

    worker_bytes_per_s: float
    """That a worker sends on average, and as much that it receives."""

    link_bytes_per_s: float
    """Each way on a link between two neighbours, on average over links."""


def predict(
    name: str,
    constants: Constants,
    conditions: TrainingConditions,
    noise: GradientNoise,
    *,
    served_share: float,
) -> GraphPrediction:
    """What a graph makes of a network on which a share of the exchanges asked for take place."""
    num_workers, num_edges = len(constants.workers), len(constants.edges)
    if not (math.isfinite(served_share) and served_share > 0 and num_edges):
        raise ValueError(f"{name}: no exchanges take place, so that workers never agree")
    rates = tuple(served_share * rate for rate in constants.rates)
    served = Constants(constants.workers, constants.edges, rates)
    achieved = 2.0 * served.exchanges_per_unit_time / num_workers
    per_worker = achieved / conditions.step_s * conditions.exchange_bytes
    return GraphPrediction(
        name=name,
        num_edges=num_edges,
        nominal_comm_rate=achieved / served_share,
        achieved_comm_rate=achieved,
        consensus_distance=stationary_distance(served, noise),
        worker_bytes_per_s=per_worker,
        link_bytes_per_s=per_worker * num_workers / (2 * num_edges),
    )


def candidates(num_workers: int) -> dict[str, nx.Graph[int]]:
    """Those of `CANDIDATES` that exist for n workers and are not another of them."""
    names = [name for name in CANDIDATES if name != "torus" or torus_shape(num_workers)[0] > 1]
    found: dict[str, nx.Graph[int]] = {}
    for name in names:
        graph = build_graph(name, num_workers)
        if all(set(graph.edges) != set(other.edges) for other in found.values()):
            found[name] = graph
    return found


def recommended(predictions: list[GraphPrediction]) -> GraphPrediction:
    """The graph that serves best.

    Gradients wait on no graph, so that all train equally long; what differs is how far apart
    workers drift. The least consensus distance wins, but graphs within `CLOSE_ENOUGH` of it are
    as good, and of these the one with the fewest edges is taken.
    """
    least = min(prediction.consensus_distance for prediction in predictions)
    close = [each for each in predictions if each.consensus_distance <= CLOSE_ENOUGH * least]
    return min(close, key=lambda each: (each.num_edges, each.consensus_distance))


@dataclass(frozen=True)
class NetworkPlan:
    """A model on a network."""

    noise: str
    conditions: TrainingConditions
    num_workers: int
    predictions: tuple[GraphPrediction, ...]
    """The graph that was asked for, then the candidates."""

    best: GraphPrediction

    @property
    def training_s(self) -> float:
        """Of `PLANNED_STEPS` gradient steps, which wait for nobody."""
        return PLANNED_STEPS * self.conditions.step_s

    @property
    def rivals_s(self) -> dict[str, float]:
        """See `TrainingConditions.rivals_s`."""
        return self.conditions.rivals_s(self.num_workers)

    @property
    def strongest_rival(self) -> str:
        """The one that takes the least time."""
        return _quickest(self.rivals_s)

    def as_json(self) -> dict[str, Any]:
        """Everything that is printed, in bytes and seconds."""
        conditions = self.conditions
        slowest_s = conditions.slowest_step_s(self.num_workers)
        all_reduce_s = conditions.all_reduce_s(self.num_workers)
        return {
            "noise": self.noise,
            "conditions": asdict(conditions),
            "exchange_s": conditions.exchange_s,
            "steps": PLANNED_STEPS,
            "training_s": self.training_s,
            "rivals_s": self.rivals_s,
            "strongest_rival": self.strongest_rival,
            # The bounds of all-reduce at every step: nothing overlapped, or all of it.
            "all_reduce_s": PLANNED_STEPS * (slowest_s + all_reduce_s),
            "all_reduce_overlapped_s": PLANNED_STEPS * max(slowest_s, all_reduce_s),
            "graphs": [asdict(prediction) for prediction in self.predictions],
            "recommended": self.best.name,
        }

    def times(self) -> Table:
        """How long training takes, beside the rivals."""
        shown = Table()
        shown.add_column(f"{PLANNED_STEPS:,d} gradient steps a worker")
        shown.add_column("seconds", justify="right")
        shown.add_row("gossip", f"{self.training_s:,.4g}")
        for name, seconds in self.rivals_s.items():
            shown.add_row(self._called(name), f"{seconds:,.4g}")
        return shown

    def _called(self, rival: str) -> str:
        return RIVALS[rival].format(sync_every=self.conditions.sync_every)

    def _beside(self, rival: str) -> str:
        saved = 1.0 - self.training_s / self.rivals_s[rival]
        gain = f"takes {saved:.0%} less time" if saved >= LEAST_GAIN else "gains no time over it"
        return f"{self._called(rival)}; gossip {gain}."

    def table(self) -> Table:
        """A row for each graph."""
        size = f"{self.num_workers} workers, {self.conditions.model_bytes / 1e6:,.4g} MB"
        shown = Table(title=Text(f"{size}: {NOISE_WORDS[self.noise]}"), title_justify="left")
        shown.add_column("graph", no_wrap=True)
        for heading in (
            "edges",
            "achieved comm rate",
            "MB/s a worker",
            "MB/s a link",
            "consensus distance",
        ):
            shown.add_column(heading, justify="right")
        for each in self.predictions:
            shown.add_row(
                each.name,
                f"{each.num_edges:,d}",
                f"{each.achieved_comm_rate:.3g}",
                f"{each.worker_bytes_per_s / 1e6:,.4g}",
                f"{each.link_bytes_per_s / 1e6:,.4g}",
                f"{each.consensus_distance:.4g}",
            )
        return shown

    def remarks(self) -> list[str]:
        """Times beside all-reduce, the graph to take, and what was assumed."""
        conditions, own, num_workers = self.conditions, self.predictions[0], self.num_workers
        share, every = conditions.moments_share, conditions.sync_every
        moments = f", {share:.0%} of a model more for Adam's second moment" if share else ""
        lines = [
            f"Strongest rival: {self._beside(self.strongest_rival)} Strongest of those that "
            f"average at every step: {self._beside(_quickest(self.rivals_s, AT_EVERY_STEP))} This "
            "is time alone; docs/quality.md says what the loss is after as many steps.",
            f"Rivals wait for the slowest of {num_workers}: "
            f"{1e3 * conditions.slowest_step_s(num_workers):,.4g} ms a step, with a barrier every "
            f"{every} steps {1e3 * conditions.slowest_step_s(num_workers, every):,.4g} ms. A ring "
            f"all-reduce of float32 takes {1e3 * conditions.all_reduce_s(num_workers):,.4g} ms. "
            "DDP sends buckets of 25 MiB during the backward pass, two thirds of a step.",
            f"An exchange takes {1e3 * conditions.exchange_s:,.4g} ms. MB/s are sent, and as many "
            f"received{moments}. Achieved comm rates are simulated with the real protocol"
            + (
                f" on graphs of {SIMULATED_WORKERS} workers of the same kind."
                if num_workers > SIMULATED_WORKERS
                else "."
            ),
            f"Of {', '.join(CANDIDATES)}: {self.best.name} serves best. All train equally long; it "
            "has the fewest edges of those whose consensus distance (stationary, a2cid2 at the "
            f"achieved comm rate) is within {CLOSE_ENOUGH - 1:.0%} of the least.",
        ]
        if own.achieved_comm_rate < 0.9 * own.nominal_comm_rate:
            lines.append(
                f"On {own.name} the network sustains {own.achieved_comm_rate:.3g} of the "
                f"{own.nominal_comm_rate:.3g} exchanges per worker per gradient step asked for."
            )
        return lines


def _quickest(times_s: dict[str, float], among: Collection[str] = RIVALS) -> str:
    return min(among, key=times_s.__getitem__)


def _adams_share(comm_rate: float) -> float:
    """Of its second moment, as it travels by default at beta_2 = 0.999, beside the parameters."""
    from gossipdp.parallel.moments import default_period

    return 1.0 / default_period(0.999, comm_rate)


def model_bytes(parameters: str | None, model_mb: float | None) -> float:
    """Bytes of a model of ``parameters`` float32 numbers (25.6M, 7B), or of so many megabytes."""
    if (parameters is None) == (model_mb is None):
        raise ValueError("the size of the model: pass one of --parameters and --model-mb")
    if model_mb is not None:
        return check_number("--model-mb", model_mb, is_positive=True) * 1e6
    assert parameters is not None
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}.get(parameters[-1:].upper())
    try:
        count = float(parameters[:-1]) * scale if scale else float(parameters)
    except ValueError:
        count = math.nan
    if not (math.isfinite(count) and count >= 1):
        raise ValueError(
            f"--parameters {parameters!r} is not a number of parameters: write 25600000 or 25.6M "
            "(K, M or B)"
        )
    return 4.0 * count


def network_plan(graph: nx.Graph[int], arguments: PlanArguments) -> NetworkPlan:
    """Predict ``graph`` under the conditions that the options say, and the candidates."""
    num_workers, seed, comm_rate = len(graph), arguments.seed, arguments.comm_rate
    if not 2 <= num_workers <= MAX_WORKERS:
        raise ValueError(
            f"--step-ms with {num_workers} workers: one has nobody to exchange with, and many are "
            f"too many to work out exactly; pass 2 or more, and at most {MAX_WORKERS}"
        )
    conditions = TrainingConditions.of(arguments)
    noise = arguments.noise or DEFAULT_NOISE
    chosen = candidates(num_workers)
    is_read = arguments.edge_list is not None
    predictions = []
    for kind, each in ({"edge list" if is_read else arguments.graph: graph} | chosen).items():
        simulated = each
        if num_workers > SIMULATED_WORKERS and not (each is graph and is_read):
            simulated = build_graph(kind, SIMULATED_WORKERS, seed=seed)
        share = served_share(simulated, conditions, comm_rate, seed)
        constants = Constants.of(each, comm_rate)
        predictions.append(
            predict(kind, constants, conditions, NOISE_MODELS[noise], served_share=share)
        )
    best = recommended([each for each in predictions if each.name in chosen])
    return NetworkPlan(noise, conditions, num_workers, tuple(predictions), best)


def served_share(
    graph: nx.Graph[int], conditions: TrainingConditions, comm_rate: float, seed: int
) -> float:
    """Exchanges of the real protocol over simulated links, as a share of those asked for.

    Those asked for are the ticks of the workers' clocks, not their expected number: how many there
    happen to be says nothing of the network.
    """
    steps_at_once = max(1.0, LEAST_SIMULATED_RATE / comm_rate)
    constants = Constants.of(graph, comm_rate * steps_at_once)
    step_s = conditions.step_s * steps_at_once
    spread = conditions.spread_of_mean(steps_at_once)
    exchange_s = min(conditions.exchange_s, LONGEST_EXCHANGE_STEPS * step_s)
    latency_s = min(conditions.latency_s, 0.5 * exchange_s)
    random = Random(f"{seed} plan")
    # Any byte is life on a real link, but here data arrive whole: silence must be longer.
    workers = make_workers(constants, seed=seed, timeout_s=20.0 * (step_s + exchange_s))
    network = Network(
        workers,
        constants.edges,
        Conditions(
            latency_s=lambda sender, receiver: latency_s,
            transfer_s=lambda sender, receiver: exchange_s - latency_s,
            step_s=lambda rank: step_s * random.lognormvariate(-(spread**2) / 2, spread),
        ),
    )

    def num_demands() -> int:
        return sum(worker.clock.num_ticks for worker in workers.values())

    warm_up_s = WARM_UP_STEPS * step_s + 2.0 * exchange_s
    network.engine.run(until=warm_up_s)
    exchanges_before, demands_before = network.num_exchanges, num_demands()
    steps_to_see = max(SIMULATED_STEPS, DEMANDS_TO_SEE / constants.exchanges_per_unit_time)
    seen_s = max(steps_to_see * step_s, EXCHANGES_TO_SEE * exchange_s)
    network.engine.run(until=warm_up_s + seen_s)
    share = (network.num_exchanges - exchanges_before) / (num_demands() - demands_before)
    # Demands of the warm-up that are served late may make it a little more than all.
    return min(1.0, share) * exchange_s / conditions.exchange_s
