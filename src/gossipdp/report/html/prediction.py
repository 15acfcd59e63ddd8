"""What the graph promised, beside what happened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gossipdp.report.html.run_view import RunView
from gossipdp.report.html.svg import duration, number

if TYPE_CHECKING:
    import networkx as nx

    from gossipdp.graph.constants import Constants


@dataclass(frozen=True)
class Comparison:
    """One row: a quantity, the plan's word and the run's."""

    quantity: str
    planned: str
    happened: str


def constants_of(view: RunView) -> Constants | None:
    """The constants of the run's graph; None without exchanges or without a graph in the log."""
    configuration = view.configuration
    edges, comm_rate = configuration.get("edges"), configuration.get("comm_rate")
    gossips = configuration.get("method") in ("a2cid2", "gossip")
    if not gossips or not edges or comm_rate is None:
        return None
    from gossipdp.graph.constants import Constants

    return Constants.of(_graph(view), comm_rate)


def _graph(view: RunView) -> nx.Graph[int]:
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(view.log.num_workers))
    graph.add_edges_from(map(tuple, view.configuration["edges"]))
    return graph


def compare(view: RunView, counts: dict[tuple[int, int], int]) -> list[Comparison]:
    """The plan beside the run; empty where there is nothing to compare.

    Args:
        view: the run.
        counts: completed exchanges by (lower rank, higher rank).
    """
    constants = constants_of(view)
    achieved = view.achieved_comm_rate
    if constants is None or achieved is None:
        return []
    from gossipdp.graph.planning import plan

    rates = expected_shares(constants)
    planned = plan(_graph(view), view.configuration["comm_rate"])
    accelerated = view.configuration["method"] == "a2cid2"
    bound = planned.a2cid2_decay_bound if accelerated else planned.gossip_decay_bound
    half_life = math.log(2) / bound
    num_workers = len(view.ranks)
    took_s = view.duration_s
    per_worker_s = 2 * view.exchanges / num_workers / took_s if took_s else 0.0
    mean_steps = sum(view.gradient_steps.values()) / max(1, len(view.gradient_steps))
    total = sum(counts.values())
    rows = [
        Comparison(
            "exchanges per worker per gradient step", f"{planned.comm_rate:g}", f"{achieved:.3g}"
        ),
        Comparison(
            "exchanges in the whole network per gradient step of a mean worker",
            f"{planned.exchanges_per_unit_time:.3g}",
            f"{view.exchanges / mean_steps:.3g}",
        ),
        Comparison(
            "time in which half of a disagreement is gone, at most, in exchanges per worker",
            f"{half_life:.2g}",
            f"{duration(half_life / per_worker_s)} at the run's pace"
            if per_worker_s
            else "no exchange",
        ),
        Comparison(
            "A2CiD2 mixes so many times faster than plain gossip",
            f"{planned.expected_speedup:.2g}",
            "used" if accelerated else "not used: method gossip",
        ),
    ]
    if total and rates:
        shares = {pair: counts.get(pair, 0) / total for pair in rates}
        least, most = (
            min(rates, key=lambda pair: shares[pair]),
            max(rates, key=lambda pair: shares[pair]),
        )
        for word, pair in (("least", least), ("most", most)):
            rows.append(
                Comparison(
                    f"share of the {word} used link, {pair[0]} – {pair[1]}",
                    f"{rates[pair]:.1%}",
                    f"{shares[pair]:.1%}",
                )
            )
    return rows


def expected_shares(constants: Constants) -> dict[tuple[int, int], float]:
    """The share of all exchanges that each link is planned to have: lambda_ij over their sum."""
    rates = {
        (worker, neighbour): rate
        for worker in constants.workers
        for neighbour, rate in constants.neighbours(worker).items()
        if worker < neighbour
    }
    total = sum(rates.values())
    return {pair: rate / total for pair, rate in rates.items()}


def constants_told(constants: Constants) -> str:
    """chi1, chi2, eta and alpha_tilde, in a line."""
    return (
        f"χ₁ {number(constants.chi1)}, χ₂ {number(constants.chi2)}, η {number(constants.eta)}, "
        f"α̃ {number(constants.alpha_tilde)}"
    )
