"""``gossipdp plan --step-ms ...``: a model on a network, beside all-reduce, graph by graph."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import networkx as nx
from rich.table import Table
from rich.text import Text

from gossipdp.graph.constants import Constants
from gossipdp.graph.network_plan import (
    CANDIDATES,
    CLOSE_ENOUGH,
    GraphPrediction,
    TrainingConditions,
    candidates,
    predict,
    recommended,
)
from gossipdp.graph.stationary import NOISE_MODELS
from gossipdp.graph.topology import build_graph
from gossipdp.simulate.engine import Engine
from gossipdp.simulate.network import Network, make_workers
from gossipdp.simulate.traffic import Conditions

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

MAX_WORKERS = 256
"""The exact consensus distance costs the cube of the number of workers."""

NOISE_WORDS = {
    "white": "white gradient noise",
    "momentum": "white gradient noise, SGD momentum 0.9",
    "drift": "heterogeneous data: each worker its own constant drift",
}


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
        """Of `PLANNED_STEPS` gradient steps a worker; they wait for nobody."""
        return PLANNED_STEPS * self.conditions.step_s

    @property
    def all_reduce_s(self) -> float:
        """The same with a barrier and an all-reduce after every step, nothing overlapped."""
        return PLANNED_STEPS * self.conditions.synchronous_step_s(self.num_workers)

    @property
    def all_reduce_overlapped_s(self) -> float:
        """The least that all-reduce can take, all of it overlapped with computing."""
        conditions = self.conditions
        slowest_s = conditions.slowest_step_s(self.num_workers)
        return PLANNED_STEPS * max(slowest_s, conditions.all_reduce_s(self.num_workers))

    def as_json(self) -> dict[str, Any]:
        """Everything that is printed, in bytes and seconds."""
        return {
            "noise": self.noise,
            "conditions": asdict(self.conditions),
            "exchange_s": self.conditions.exchange_s,
            "steps": PLANNED_STEPS,
            "training_s": self.training_s,
            "all_reduce_s": self.all_reduce_s,
            "all_reduce_overlapped_s": self.all_reduce_overlapped_s,
            "graphs": [asdict(prediction) for prediction in self.predictions],
            "recommended": self.best.name,
        }

    def table(self) -> Table:
        """A row for each graph."""
        title = (
            f"{self.num_workers} workers, {self.conditions.model_bytes / 1e6:,.4g} MB: "
            f"{NOISE_WORDS[self.noise]}"
        )
        shown = Table(title=Text(title), title_justify="left")
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
        conditions, own = self.conditions, self.predictions[0]
        num_workers = self.num_workers
        lines = [
            f"{PLANNED_STEPS:,d} gradient steps a worker: {self.training_s:,.4g} s, since they "
            f"wait for nobody. With ring all-reduce: {self.all_reduce_s:,.4g} s if nothing of it "
            f"overlaps with computing, at least {self.all_reduce_overlapped_s:,.4g} s if all of it "
            f"does. Each step waits for the slowest of {num_workers}, "
            f"{1e3 * conditions.slowest_step_s(num_workers):,.4g} ms; the all-reduce takes "
            f"{1e3 * conditions.all_reduce_s(num_workers):,.4g} ms. Frameworks lie "
            "between the two.",
            f"An exchange takes {1e3 * conditions.exchange_s:,.4g} ms. MB/s are sent, and as many "
            "received. Achieved comm rates are simulated with the real protocol"
            + (
                f" on graphs of {SIMULATED_WORKERS} workers of the same kind."
                if self.num_workers > SIMULATED_WORKERS
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


def model_bytes(parameters: str | None, model_mb: float | None) -> float:
    """Bytes of a model of ``parameters`` float32 numbers (25.6M, 7B), or of so many megabytes."""
    if (parameters is None) == (model_mb is None):
        raise ValueError("the size of the model: pass one of --parameters and --model-mb")
    if model_mb is not None:
        if not (math.isfinite(model_mb) and model_mb > 0):
            raise ValueError(f"--model-mb {model_mb} must be a positive number of megabytes")
        return model_mb * 1e6
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


def network_plan(
    graph: nx.Graph[int],
    name: str | None,
    conditions: TrainingConditions,
    *,
    comm_rate: float,
    noise: str,
    seed: int,
) -> NetworkPlan:
    """Predict ``graph``, ``name`` being None for one read from a file, and the candidates."""
    num_workers = len(graph)
    if num_workers < 2:
        raise ValueError("--step-ms: one worker has nobody to exchange with, pass 2 or more")
    if num_workers > MAX_WORKERS:
        raise ValueError(
            f"--step-ms: {num_workers} workers are too many to work out exactly: pass at most "
            f"{MAX_WORKERS}"
        )
    chosen = candidates(num_workers)
    graphs = {name or "edge list": graph} | chosen
    predictions = []
    for kind, each in graphs.items():
        simulated = each
        if num_workers > SIMULATED_WORKERS and not (each is graph and name is None):
            simulated = build_graph(kind, SIMULATED_WORKERS, seed=seed)
        predictions.append(
            predict(
                kind,
                Constants.of(each, comm_rate),
                conditions,
                NOISE_MODELS[noise],
                served_share=served_share(simulated, conditions, comm_rate, seed),
            )
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
    # Of the sum of so many steps, as if it were lognormal too: the variance adds up.
    spread = math.sqrt(math.log1p(math.expm1(conditions.step_spread**2) / steps_at_once))
    exchange_s = min(conditions.exchange_s, LONGEST_EXCHANGE_STEPS * step_s)
    latency_s = min(conditions.latency_s, 0.5 * exchange_s)
    random = Random(f"{seed} plan")
    # Any byte is life on a real link, but here data arrive whole: silence must be longer.
    workers = make_workers(constants, seed=seed, timeout_s=20.0 * (step_s + exchange_s))
    network = Network(
        Engine(),
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
