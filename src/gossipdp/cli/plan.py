"""``gossipdp plan``: the constants of a graph, and the rate that links allow, before a run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from gossipdp import rules
from gossipdp.protocol.exchange_rate import Bound, affordable_rate
from gossipdp.rules import DEFAULT_GRAPH, WireFormatName, option

if TYPE_CHECKING:
    from gossipdp.graph import Constants

WRITTEN = ("chi1", "chi2", "eta", "alpha_tilde", "exchanges_per_unit_time")

BYTES_OF_A_VALUE = {"auto": 1, "full": 4, "bfloat16": 2, "lattice8": 1}
BOUNDS: dict[Bound, str] = {
    "ceiling": "4 a step is the most: more was not tried.",
    "link": "The link is the bound: exchanges fill half of a worker's time.",
}


@dataclass(frozen=True)
class PlanArguments:
    """Print a graph's constants and whether A2CiD2 helps on it."""

    workers: int | None = option(None, rules.at_least_1)
    """Workers."""

    graph: str = DEFAULT_GRAPH
    """ring, path, star, complete, exponential or torus."""

    comm_rate: float | Literal["auto"] = 1.0
    """Exchanges per worker per gradient step; auto: as many as the links allow."""

    parameters: float | None = option(None, rules.positive_number)
    """Trained parameters of the model."""

    wire_format: WireFormatName = "auto"
    """full, bfloat16 or lattice8: 4, 2 or 1 bytes a parameter; auto: 1, as on CPUs; GPUs: full."""

    step_ms: float | None = option(None, rules.positive_number)
    """Duration of a gradient step."""

    link_mbps: float | None = option(None, rules.positive_number)
    """Speed of a link in each direction, or Network(max_megabits_per_s=) if less, Mbit/s."""

    latency_ms: float = option(0.5, rules.number)
    """Time that a message travels."""

    json: Path | None = option(None, rules.output_file)
    """Also write the constants to this file."""


def run(arguments: PlanArguments) -> int:
    """Print the tables and write the JSON file; raise ValueError or OSError for bad input."""
    if "numpy" not in sys.modules:
        # Many small matrices: on a busy machine the threads of a BLAS cost up to 20 times the work.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.workers is None:
        raise ValueError("the number of workers is missing: pass --workers, such as --workers 64")
    from gossipdp.graph import Constants, build_graph

    graph = build_graph(arguments.graph, arguments.workers)
    own_rate, comm_rate = _own_rate(arguments), arguments.comm_rate
    if comm_rate == "auto":
        if own_rate is None:
            raise ValueError(
                "--comm-rate auto follows the links: pass --parameters, --step-ms and --link-mbps, "
                "or a number"
            )
        comm_rate = own_rate.comm_rate
    with Console(stderr=True).status("eigenvalues and resistances"):
        constants = Constants.of(graph, comm_rate)
    console = Console()
    console.print(_table(graph.name, comm_rate, constants))
    console.print(_verdict(constants), highlight=False)
    written: dict[str, Any] = {name: getattr(constants, name) for name in WRITTEN}
    written["edges"] = len(constants.edges)
    if own_rate is not None:
        console.print(own_rate.text(), highlight=False)
        written["auto"] = own_rate._asdict()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
    return 0


class OwnRate(NamedTuple):
    """The rate of ``comm_rate="auto"`` on given links, if the processor allows it."""

    comm_rate: float
    bound: Bound
    exchange_bytes: float
    exchange_seconds: float
    step_seconds: float

    def text(self) -> str:
        rate, num_steps = self.comm_rate, self.exchange_seconds / self.step_seconds
        often = f", one in {1 / rate:.3g} steps" if rate < 1 else ""
        bytes_per_second = self.exchange_bytes * rate / self.step_seconds
        return (
            f'comm_rate="auto" here: {rate:.3g} exchanges a step{often}. {BOUNDS[self.bound]}\n'
            f"An exchange sends {self.exchange_bytes / 1e6:.3g} MB each way and takes "
            f"{self.exchange_seconds:.3g} s, {num_steps:.3g} gradient steps.\n"
            f"A worker sends {bytes_per_second / 1e6:.3g} MB/s "
            f"({bytes_per_second * 8e-6:.3g} Mbit/s) on average, and receives as much.\n"
            f"Training does not wait: {1 / self.step_seconds:.3g} steps/s. On a busy processor the "
            "rate is lower."
        )


def _own_rate(arguments: PlanArguments) -> OwnRate | None:
    num_values, step_ms, mbps = arguments.parameters, arguments.step_ms, arguments.link_mbps
    if num_values is None or step_ms is None or mbps is None:
        if (num_values, step_ms, mbps) != (None, None, None):
            raise ValueError(
                "a rate that sets itself follows from --parameters, --step-ms and --link-mbps: "
                "pass all three, or none"
            )
        return None
    num_bytes = num_values * BYTES_OF_A_VALUE[arguments.wire_format]
    exchange_s = arguments.latency_ms / 1e3 + num_bytes * 8e-6 / mbps
    step_s = step_ms / 1e3
    return OwnRate(*affordable_rate(step_s, exchange_s), num_bytes, exchange_s, step_s)


def _table(name: str, comm_rate: float, constants: Constants) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("quantity", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("meaning")
    rows: list[tuple[str, float, str]] = [
        ("edges", len(constants.edges), "pairs of workers that may exchange"),
        ("comm rate", comm_rate, "exchanges per worker per gradient step, at most"),
        (
            "exchanges per unit time",
            constants.exchanges_per_unit_time,
            "over the whole network, while a worker takes one gradient step",
        ),
        ("chi1", constants.chi1, "1 / lambda_2 of the Laplacian"),
        ("chi2", constants.chi2, "half the largest effective resistance of an edge"),
        ("eta", constants.eta, "mixing speed of A2CiD2"),
        ("alpha_tilde", constants.alpha_tilde, "its gain of an exchange on the momentum copy"),
        (
            "decay bound, gossip",
            constants.gossip_decay_bound,
            "of the consensus distance per exchange per worker, at least (theory)",
        ),
        ("decay bound, a2cid2", constants.a2cid2_decay_bound, "the same with A2CiD2"),
        ("expected speed-up", constants.expected_speedup, "sqrt(chi1 / chi2), ratio of the bounds"),
    ]
    for quantity, value, meaning in rows:
        shown = f"{value:,d}" if isinstance(value, int) else f"{value:.6g}"
        table.add_row(quantity, shown, meaning)
    return table


def _verdict(constants: Constants) -> str:
    if not constants.edges:
        return "A2CiD2 helps here: no. One worker has no neighbour."
    if constants.a2cid2_helps:
        return (
            "A2CiD2 helps here: yes. Theory lets consensus be reached "
            f"{constants.expected_speedup:.3g} times as fast as with plain gossip."
        )
    return (
        "A2CiD2 helps here: no. On this graph plain gossip mixes about as fast "
        f"(expected speed-up {constants.expected_speedup:.3g})."
    )
