"""What ``gossipdp simulate`` prints and writes of its ensembles."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import gossipdp
from gossipdp.simulate.study import SYNCHRONOUS, Ensemble, Estimate
from gossipdp.simulate.trace import TAIL_LOWEST, Record

if TYPE_CHECKING:
    from rich.table import Table

    from gossipdp.cli.simulate import SimulateArguments
    from gossipdp.cli.simulate_scenarios import Study

MEANING_OF_SPREAD = "sample standard deviation over seeds; 0 for one seed"


def table(study: Study, ensembles: Sequence[Ensemble]) -> Table:
    """A row for each ensemble, with what it ended at."""
    from rich.table import Table

    columns = ["", "consensus distance"]
    if study.is_consensus:
        columns.append("decay per exchange")
    else:
        columns.insert(1, "final loss")
        if (metric_name := study.cases[0].scenario.objective.metric_name) is not None:
            columns.insert(2, metric_name.replace("_", " "))
    columns += ["exchanges per worker", "gradient steps", "idle", "time (s)"]
    result = Table()
    for column in columns:
        result.add_column(column, justify="right" if column else "left", overflow="fold")
    for ensemble in ensembles:
        slowest, fastest = ensemble.gradient_steps
        distance = ensemble.last("consensus_distance")
        cells = {
            "": ensemble.label,
            "final loss": _text(ensemble.last("loss")),
            "consensus distance": _text(distance, digits=3, spread=not study.is_consensus),
            "decay per exchange": _text(ensemble.decay_per_exchange),
            "exchanges per worker": f"{ensemble.exchanges_per_worker.mean:,.1f}",
            "gradient steps": f"{slowest:,.0f} to {fastest:,.0f}"
            if round(slowest) < round(fastest)
            else f"{slowest:,.0f}",
            "idle": f"{ensemble.last('idle_share').mean:.1%}",
            "time (s)": f"{ensemble.last('time_s').mean:,.1f}",
        }
        metric = _text(ensemble.last("metric"))
        result.add_row(*(cells.get(column, metric) for column in columns))
    return result


def _text(estimate: Estimate, digits: int = 4, *, spread: bool = True) -> str:
    if not math.isfinite(estimate.mean):
        return "-" if math.isnan(estimate.mean) else "diverged"
    text = f"{estimate.mean:.{digits}g}"
    return f"{text} ± {estimate.spread:.2g}" if spread and len(estimate.by_seed) > 1 else text


def notes(study: Study, ensembles: Sequence[Ensemble]) -> list[str]:
    """What the table leaves open: its spread, what is missing in it, how quick it was."""
    lines = []
    if len(study.seeds) > 1:
        lines.append(f"mean ± standard deviation over {len(study.seeds)} seeds")
    if study.is_consensus and study.arguments.workers > 1:  # one worker has nobody to agree with
        lines += _decay_notes(study, ensembles)
    lines += _divergence_notes(study, ensembles)
    synchronous = [method for method in study.methods if method in SYNCHRONOUS]
    if synchronous and study.arguments.fidelity == "ideal":
        links = study.cases[0].scenario.links.every
        speed = f" and {links.bytes_per_s * 8e-6:g} Mbit/s" if links.bytes_per_s < math.inf else ""
        lines.append(
            f"at fidelity ideal links cost only {' and '.join(synchronous)} time, at a latency of "
            f"{links.latency_s * 1e3:g} ms{speed}; to compare times pass --fidelity links"
        )
    traces = [trace for ensemble in ensembles for trace in ensemble.traces]
    num_events, wall_s = sum(trace.num_events for trace in traces), sum(t.wall_s for t in traces)
    line = f"{num_events:,} events in {wall_s:.1f} s of computing: {num_events / wall_s:,.0f}/s"
    exchanging = {trace.arithmetic for trace in traces if trace.method != "none"}
    if exchanging:
        line += f"; exchanges computed by {' and '.join(sorted(exchanging))}"
    lines.append(line)
    return lines


def _decay_notes(study: Study, ensembles: Sequence[Ensemble]) -> list[str]:
    lines = []
    for ensemble in ensembles:
        if _has_diverged(study, ensemble):
            continue
        share = ensemble.lowest_share
        decay = ensemble.decay_per_exchange.mean
        fell = f"{ensemble.label}: the consensus distance fell to {share:.2g} of its first value"
        if share <= TAIL_LOWEST:
            if math.isnan(decay):
                lines.append(f"{ensemble.label}: the workers agree after a few exchanges at once")
        elif ensemble.method == "none":
            lines.append(f"{ensemble.label}: workers that exchange nothing never agree")
        elif math.isnan(decay):
            lines.append(f"{fell}, too little for its decay: give more --steps")
        else:
            lines.append(
                f"{fell}, not to {TAIL_LOWEST:g}: its decay may still be that of faster modes; "
                "give more --steps"
            )
    for number, case in enumerate(study.cases):
        decays = {
            ensemble.method: ensemble.decay_per_exchange.mean
            for ensemble in ensembles
            if ensemble.case == number
        }
        ratio = decays.get("a2cid2", math.nan) / decays.get("gossip", math.nan)
        if math.isfinite(ratio):
            where = f"{case.name.format(method='').strip()}: " if case.name else ""
            lines.append(
                f"{where}per exchange a2cid2 brings workers together {ratio:.3g} times as fast as "
                "gossip"
            )
    return lines


def _divergence_notes(study: Study, ensembles: Sequence[Ensemble]) -> list[str]:
    diverged = [ensemble.label for ensemble in ensembles if _has_diverged(study, ensemble)]
    if not diverged:
        return []
    cause = "--alpha-tilde-factor" if study.is_consensus else "--learning-rate"
    return [f"diverged: {', '.join(diverged)}; try a lower {cause} or --eta-factor"]


def _has_diverged(study: Study, ensemble: Ensemble) -> bool:
    distance = ensemble.last("consensus_distance").mean
    # Exchanges alone bring workers together: what grows under them is not over yet.
    has_grown = study.is_consensus and distance > 2 * ensemble.mean("consensus_distance")[0]
    return has_grown or not math.isfinite(distance)


def as_json(study: Study, ensembles: Sequence[Ensemble]) -> dict[str, Any]:
    """What ``--json`` writes: NaN and what is infinite become null."""
    cases = [
        {
            "graph": case.scenario.graph,
            "comm_rate": case.scenario.comm_rate,
            "methods": {
                ensemble.method: _method_as_json(study, ensemble)
                for ensemble in ensembles
                if ensemble.case == number
            },
        }
        for number, case in enumerate(study.cases)
    ]
    written: dict[str, Any] = (
        {"methods": cases[0]["methods"]} if len(cases) == 1 else {"cases": cases}
    )
    written |= {
        "seeds": study.seeds,
        "spread": MEANING_OF_SPREAD,
        "metric_name": study.cases[0].scenario.objective.metric_name,
        "configuration": configuration(study.arguments),
        "command": command(study.arguments),
        "version": gossipdp.__version__,
    }
    cleaned: dict[str, Any] = _without_nan(written)
    return cleaned


def _method_as_json(study: Study, ensemble: Ensemble) -> dict[str, Any]:
    series: dict[str, Any] = {"time_s": ensemble.mean("time_s").tolist()}
    for name in Record._fields:
        if name != "time_s":
            series[name] = ensemble.mean(name).tolist()
            series[f"{name}_spread"] = ensemble.spread(name).tolist()
    figures = {
        "achieved_comm_rate": ensemble.achieved_comm_rate,
        "exchanges_per_worker": ensemble.exchanges_per_worker,
    }
    if study.is_consensus:
        figures = {"decay_per_exchange": ensemble.decay_per_exchange, **figures}
    for name, estimate in figures.items():
        series |= {
            name: estimate.mean,
            f"{name}_spread": estimate.spread,
            f"{name}_by_seed": list(estimate.by_seed),
        }
    if study.is_consensus:
        series["lowest_share"] = ensemble.lowest_share
    slowest, fastest = ensemble.gradient_steps
    num_events = sum(trace.num_events for trace in ensemble.traces)
    wall_s = sum(trace.wall_s for trace in ensemble.traces)
    return series | {
        "gradient_steps_of_slowest_worker": slowest,
        "gradient_steps_of_fastest_worker": fastest,
        "events": num_events,
        "events_per_s": num_events / wall_s,
        "arithmetic": ensemble.traces[0].arithmetic,
        "digests": [trace.digest() for trace in ensemble.traces],
    }


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def configuration(arguments: SimulateArguments) -> dict[str, Any]:
    """What was asked for, option by option, without where to write and how to compute it."""
    asked = asdict(arguments)
    for group in ("compute", "network", "task"):
        asked |= asked.pop(group)
    for option in ("json", "figure", "timeline", "processes"):
        del asked[option]
    return asked | {"step_times": asked["step_times"] and str(asked["step_times"])}


def command(arguments: SimulateArguments) -> str:
    """The command that gives the same figures."""
    words = ["gossipdp", "simulate"]
    defaults = configuration(type(arguments)())
    for name, value in configuration(arguments).items():
        if value == defaults[name]:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(value) if isinstance(value, tuple) else str(value))
    return shlex.join(words)
