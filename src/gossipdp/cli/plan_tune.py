"""``gossipdp plan --tune``: factors and edge rates for a gradient noise, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import networkx as nx
from rich.table import Table
from rich.text import Text

from gossipdp.graph.constants import Constants
from gossipdp.graph.edge_rates import FLOOR_SHARE, MAX_EDGES, EdgeRates, best_rates
from gossipdp.graph.gradient_noise import NOISE_MODELS
from gossipdp.graph.second_moments import SecondMoments
from gossipdp.graph.topology import graph_name
from gossipdp.graph.tuning import LARGEST_FACTOR, Tuning, tune

MAX_WORKERS = 256
"""Covariances of all workers with all: the work grows as the cube of their number."""

NOISE_WORDS = {
    "white": "white gradient noise",
    "momentum": "white gradient noise, SGD momentum 0.9",
    "drift": "heterogeneous data: each worker its own constant drift",
}
REAL_GAIN = 1.005


@dataclass(frozen=True)
class Row:
    """One way to run."""

    name: str
    eta_factor: float | None
    alpha_tilde_factor: float | None
    edge_rates: str
    consensus_distance: float
    decay_per_gradient_step: float


@dataclass(frozen=True)
class TunedPlan:
    """What --tune found."""

    noise: str
    default: Tuning
    rates: EdgeRates | None
    """None where there are too many edges to search."""

    at_rates: Tuning | None
    """Factors at the rates found; None where these are the default's."""

    rows: tuple[Row, ...]


def check_size(graph: nx.Graph[int], option: str) -> None:
    """Raise a ValueError unless exact moments of ``graph`` are affordable and mean anything."""
    if len(graph) < 2:
        raise ValueError(f"{option}: one worker has nobody to exchange with, pass 2 or more")
    if len(graph) > MAX_WORKERS:
        raise ValueError(
            f"{option}: {len(graph)} workers are too many to work out exactly: pass at most "
            f"{MAX_WORKERS}"
        )


def tuned_plan(
    graph: nx.Graph[int], comm_rate: float, noise: str, on_evaluation: Callable[[], None]
) -> TunedPlan:
    """Search factors, edge rates, and factors at these rates."""
    check_size(graph, "--tune")
    model = NOISE_MODELS[noise]
    constants = Constants.of(graph, comm_rate)
    default = tune(constants, model, on_evaluation=on_evaluation)

    def row(name: str, of: Constants, tuning: Tuning | None) -> Row:
        """The paper's constants or, with ``tuning``, its factors."""
        moments = SecondMoments.of(of)
        if tuning is not None:
            moments = SecondMoments(moments.modes, tuning.eta, tuning.alpha_tilde)
        return Row(
            name,
            1.0 if tuning is None else tuning.eta_factor,
            1.0 if tuning is None else tuning.alpha_tilde_factor,
            "default" if of is constants else "tuned",
            moments.stationary_distance(model),
            moments.decay_rate,
        )

    gossip = SecondMoments.gossip(constants)
    distance = gossip.stationary_distance(model)
    rows = [
        Row("plain gossip", None, None, "default", distance, gossip.decay_rate),
        row("paper's constants", constants, None),
        row("tuned multipliers", constants, default),
    ]
    rates = at_rates = None
    if len(constants.edges) <= MAX_EDGES:
        rates = best_rates(graph, comm_rate, goal="a2cid2", on_evaluation=on_evaluation)
        if rates.best is not rates.default:
            at_rates = tune(rates.best, model, on_evaluation=on_evaluation)
            rows += [
                row("tuned rates", rates.best, None),
                row("both tuned", rates.best, at_rates),
            ]
    return TunedPlan(noise, default, rates, at_rates, tuple(rows))


def as_json(plan: TunedPlan) -> dict[str, Any]:
    """The rows, the factors, and the rates where they gain."""
    written: dict[str, Any] = {
        "noise": plan.noise,
        "rows": [asdict(row) for row in plan.rows],
        "eta_factor": plan.default.eta_factor,
        "alpha_tilde_factor": plan.default.alpha_tilde_factor,
        "gain": plan.default.gain,
        "is_at_limit": plan.default.is_at_limit,
    }
    if plan.rates is not None:
        written["rates_gain"] = plan.rates.gain
        written["rates_gap"] = plan.rates.gap
    if plan.rates is not None and plan.at_rates is not None:
        written["rates"] = [[*edge, rate] for edge, rate in plan.rates.by_edge.items()]
    return written


def table(plan: TunedPlan, graph: nx.Graph[int]) -> Table:
    """A row for each way to run, and what it gains over plain gossip."""
    title = f"{graph_name(graph)}: {NOISE_WORDS[plan.noise]}"
    shown = Table(title=Text(title), title_justify="left")
    shown.add_column("", no_wrap=True)
    for heading in ("eta factor", "alpha_tilde factor", "consensus distance", "gain", "decay"):
        shown.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    plain = plan.rows[0].consensus_distance
    for row in plan.rows:
        shown.add_row(
            row.name,
            "" if row.eta_factor is None else f"{row.eta_factor:.3g}",
            "" if row.alpha_tilde_factor is None else f"{row.alpha_tilde_factor:.3g}",
            f"{row.consensus_distance:.4g}",
            f"{plain / row.consensus_distance:.3g}",
            f"{row.decay_per_gradient_step:.3g}",
        )
    return shown


def remarks(plan: TunedPlan) -> list[str]:
    """What the figures are, and what a user does with them."""
    tuning = plan.default
    lines = [
        "consensus distance: stationary, per coordinate, for a learning rate and a variance of 1; "
        "gain: how many times less than plain gossip; decay: of its mean without noise, per "
        "gradient step. Exact for the ideal network, with gradient steps as Poisson events."
    ]
    if tuning.gain > REAL_GAIN:
        lines.append(
            f"Tuned multipliers gain {tuning.gain:.3g} over the paper's constants. To see it in "
            f"the simulator: --eta-factor {tuning.eta_factor:.3g} --alpha-tilde-factor "
            f"{tuning.alpha_tilde_factor:.3g} (the second multiplies alpha_tilde - 1/2). Training "
            "itself takes the paper's constants."
        )
    else:
        lines.append("Multipliers gain nothing here: the paper's constants serve as well.")
    if tuning.is_at_limit:
        lines.append(
            f"A factor lies at the limit of the search (1/{LARGEST_FACTOR:g} to "
            f"{LARGEST_FACTOR:g}): going on lessens the distance further, and the decay with it."
        )
    if plan.rates is None:
        lines.append(f"Edge rates are searched for up to {MAX_EDGES:,} edges only.")
    elif plan.at_rates is None:
        lines.append(
            "Edge rates gain nothing here: no others make eta larger than the default's by "
            f"{plan.rates.gap + 1e-3:.1%}."
        )
    else:
        lines.append(
            f"Tuned rates make the guaranteed decay, eta, {plan.rates.gain:.3g} times as fast; no "
            f"others reach {plan.rates.gap + 1e-4:.2%} more. Each stays above {FLOOR_SHARE:g} of "
            "the default. Training takes the default rates; to simulate with these, which --json "
            "writes: Scenario(rates=...)."
        )
    return lines
