"""``gossipdp plan``: what a graph promises, printed before anything is run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import networkx as nx

    from gossipdp.cli.plan_network import NetworkPlan
    from gossipdp.graph import Plan

DEFAULT_GRAPH = "ring"
WRITTEN = ("chi1", "chi2", "eta", "alpha_tilde", "exchanges_per_unit_time")

LEARNING_RATE_RULE = """\
Learning rate, as a multiple of all-reduce's best with the same batch a worker:
  1 to 2      AdamW, comm rate 1, 4 workers
  2 to 4      AdamW, comm rate 1, 16 workers
  1 to 2      AdamW, comm rate 1, 64 workers
  1/2 to 1    AdamW, comm rate 1/8 and 1/11, with and without an outer step
  1/2 to 1    SGD with momentum 0.9, comm rate 1
Measured on grids of factors of two (docs/quality.md). AdamW's is larger
at comm rate 1, as it divides by the noise of one worker's gradient."""
"""docs/choosing.md says it in words, with the figures."""


@dataclass(frozen=True)
class PlanArguments:
    """Print the constants of a graph and whether A2CiD2 helps on it. Nothing is trained."""

    workers: int | None = None
    """Number of workers; may be left out where --edge-list says it."""

    graph: str = DEFAULT_GRAPH
    """ring, path, star, complete, exponential, hypercube, torus, random-regular or erdos-renyi."""

    comm_rate: float = 1.0
    """Exchanges per worker per gradient step."""

    edge_list: Path | None = None
    """Read the graph from a file instead: one edge 'i j' a line, ranks from 0, '#' comments."""

    seed: int = 0
    """Seed of the random graphs."""

    json: Path | None = None
    """Also write chi1, chi2, eta, alpha_tilde, exchanges_per_unit_time and edges (their number);
    with a network, its predictions too."""

    noise: Literal["white", "momentum", "drift"] | None = None
    """Gradient noise that is assumed: white, the same with SGD momentum 0.9 (default), or
    heterogeneous data alone."""

    parameters: str | None = None
    """Size of the model, such as 25.6M (float32): predict a run on a network. Needs --step-ms and
    --link-mbps."""

    model_mb: float | None = None
    """Size of the model in megabytes, instead of --parameters."""

    optimizer: Literal["sgd", "adam"] | None = None
    """What trains, sgd by default: exchanges carry Adam's second moment too, now and then."""

    step_ms: float | None = None
    """Mean duration of a gradient step in milliseconds."""

    link_mbps: float | None = None
    """Megabits per second of a worker's link, each way."""

    latency_ms: float | None = None
    """Latency of a link in milliseconds, 0.5 by default."""

    step_spread: float | None = None
    """Standard deviation of the logarithm of step times, such as 0.1; 0 by default."""

    sync_every: int | None = None
    """Beside gossip and DistributedDataParallel, whose all-reduce overlaps with the backward pass,
    a rival that averages once in so many steps; 16 by default."""


NETWORK_OPTIONS = (
    "parameters",
    "model_mb",
    "optimizer",
    "step_ms",
    "link_mbps",
    "latency_ms",
    "step_spread",
    "sync_every",
)


def run(arguments: PlanArguments) -> int:
    """Print the tables and write the JSON file; raises ValueError or OSError for bad input."""
    if "numpy" not in sys.modules:
        # Many small matrices: on a busy machine the threads of a BLAS cost up to 20 times the work.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    given = [name for name in NETWORK_OPTIONS if getattr(arguments, name) is not None]
    if arguments.noise is not None and not given:
        raise ValueError(f"--noise {arguments.noise} needs a network: add --step-ms 100")
    for name, example in (("step_ms", "--step-ms 100"), ("link_mbps", "--link-mbps 1000")):
        if given and getattr(arguments, name) is None:
            option = given[0].replace("_", "-")
            raise ValueError(f"--{option} plans a run on a network: add {example}")
    graph = _graph(arguments)
    from gossipdp.graph import plan

    network: NetworkPlan | None = None
    with Console(stderr=True).status("eigenvalues, resistances and what else is asked for"):
        planned = plan(graph, arguments.comm_rate)
        if given:
            from gossipdp.cli.plan_network import network_plan

            network = network_plan(graph, arguments)
    console = Console()
    console.print(_table(planned))
    console.print(_verdict(planned), highlight=False)
    console.print(LEARNING_RATE_RULE, highlight=False)
    written: dict[str, Any] = {name: getattr(planned, name) for name in WRITTEN}
    written["edges"] = planned.num_edges
    if network is not None:
        console.print()
        console.print(network.table())
        console.print(network.times())
        for remark in network.remarks():
            console.print(remark, highlight=False, markup=False)
        written["network"] = network.as_json()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
    return 0


def _graph(arguments: PlanArguments) -> nx.Graph[int]:
    from gossipdp.graph import build_graph, read_edge_list

    if arguments.edge_list is not None:
        if arguments.graph != DEFAULT_GRAPH:
            raise ValueError(
                f"both --graph {arguments.graph} and --edge-list {arguments.edge_list} are given: "
                "pass one of them"
            )
        try:
            read = read_edge_list(arguments.edge_list)
        except OSError as error:
            raise ValueError(
                f"--edge-list {arguments.edge_list} cannot be read: {error.strerror}; name a file "
                "with one edge 'i j' a line"
            ) from None
        num_workers = len(read) if arguments.workers is None else arguments.workers
        return build_graph(read, num_workers)
    if arguments.workers is None:
        raise ValueError("the number of workers is missing: pass --workers, such as --workers 64")
    return build_graph(arguments.graph, arguments.workers, seed=arguments.seed)


def _table(plan: Plan) -> Table:
    # Text, since the name of a file may look like markup.
    table = Table(title=Text(plan.graph), title_justify="left")
    table.add_column("quantity", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("what it is")
    rows: list[tuple[str, float, str]] = [
        ("edges", plan.num_edges, "pairs of workers that may exchange"),
        ("comm rate", plan.comm_rate, "exchanges per worker per gradient step, at most"),
        (
            "exchanges per unit time",
            plan.exchanges_per_unit_time,
            "over the whole network, while a worker takes one gradient step",
        ),
        ("chi1", plan.chi1, "1 / lambda_2 of the Laplacian"),
        ("chi2", plan.chi2, "half the largest effective resistance of an edge"),
        ("eta", plan.eta, "mixing speed of A2CiD2"),
        ("alpha_tilde", plan.alpha_tilde, "its gain of an exchange on the momentum copy"),
        (
            "decay bound, gossip",
            plan.gossip_decay_bound,
            "of the consensus distance per exchange per worker, at least (theory)",
        ),
        ("decay bound, a2cid2", plan.a2cid2_decay_bound, "the same with A2CiD2"),
        ("expected speed-up", plan.expected_speedup, "sqrt(chi1 / chi2), ratio of the bounds"),
    ]
    for quantity, value, meaning in rows:
        table.add_row(
            quantity, f"{value:,d}" if isinstance(value, int) else f"{value:.6g}", meaning
        )
    return table


def _verdict(plan: Plan) -> str:
    if plan.num_workers == 1:
        return "A2CiD2 helps here: no. One worker has nobody to exchange with."
    if plan.a2cid2_helps:
        return (
            f"A2CiD2 helps here: yes. Theory lets consensus be reached {plan.expected_speedup:.3g} "
            "times as fast as with plain gossip."
        )
    return (
        "A2CiD2 helps here: no. On this graph plain gossip mixes about as fast "
        f"(expected speed-up {plan.expected_speedup:.3g})."
    )
