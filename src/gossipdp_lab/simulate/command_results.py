"""The table, the notes and the JSON of ``gossipdp simulate``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

import gossipdp
from gossipdp_lab.simulate.command_study import OUTPUT_OPTIONS, Study
from gossipdp_lab.simulate.options import SimulateArguments
from gossipdp_lab.simulate.study import SYNCHRONOUS, Ensemble, Estimate
from gossipdp_lab.simulate.trace import TAIL_LOWEST, Record, Trace

MEANING_OF_SPREAD = "sample standard deviation over seeds; 0 for one seed"


def _decay(ensemble: Ensemble) -> Estimate:
    return ensemble.over_seeds(Trace.decay_per_exchange)


def _exchanges_per_worker(ensemble: Ensemble) -> Estimate:
    return ensemble.over_seeds(lambda trace: 2.0 * trace.records[-1].exchanges / trace.num_workers)


def table(study: Study, ensembles: Sequence[Ensemble]) -> Table:
    """Return a row for each ensemble, with the values at its end."""
    has_gradients, metric_name = study.objective.has_gradients, study.objective.metric_name
    result = Table()
    for number, ensemble in enumerate(ensembles):
        slowest, fastest = (f"{steps:,.0f}" for steps in ensemble.gradient_steps)
        distance = ensemble.last("consensus_distance")
        cells = {"": ensemble.label}
        if has_gradients:
            cells["final loss"] = _text(ensemble.last("loss"))
            if metric_name is not None:
                cells[metric_name.replace("_", " ")] = _text(ensemble.last("metric"))
        cells["consensus distance"] = _text(distance, digits=3, spread=has_gradients)
        if not has_gradients:
            cells["decay per exchange"] = _text(_decay(ensemble))
        cells |= {
            "exchanges per worker": f"{_exchanges_per_worker(ensemble).mean:,.1f}",
            "gradient steps": slowest if slowest == fastest else f"{slowest} to {fastest}",
            "idle": f"{ensemble.last('idle_share').mean:.1%}",
            "time (s)": f"{ensemble.last('time_s').mean:,.1f}",
        }
        for column in cells if number == 0 else ():
            result.add_column(column, justify="right" if column else "left", overflow="fold")
        result.add_row(*cells.values())
    return result


def _text(estimate: Estimate, digits: int = 4, *, spread: bool = True) -> str:
    if not math.isfinite(estimate.mean):
        return "-" if math.isnan(estimate.mean) else "diverged"
    text = f"{estimate.mean:.{digits}g}"
    return f"{text} ± {estimate.spread:.2g}" if spread and len(estimate.by_seed) > 1 else text


def notes(study: Study, ensembles: Sequence[Ensemble]) -> list[str]:
    """Return lines that complete the table: its spread, missing runs, the time that it took."""
    lines = []
    has_gradients = study.objective.has_gradients
    if len(study.seeds) > 1:
        lines.append(f"mean ± standard deviation over {len(study.seeds)} seeds")
    diverged = [each.label for each in ensembles if _has_diverged(study, each)]
    if not has_gradients:
        for ensemble in ensembles:
            if ensemble.label not in diverged and ensemble.traces[0].num_workers > 1:
                lines += _decay_notes(ensemble)
        lines += _speed_ups(study, ensembles)
    if diverged:
        cause = "learning rate" if has_gradients else "eta_factor or alpha_tilde_factor"
        lines.append(f"diverged: {', '.join(diverged)}; try a lower {cause}")
    synchronous = [method for method in study.methods if method in SYNCHRONOUS]
    if synchronous and study.cases[0].scenario.fidelity == "ideal":
        links = study.cases[0].scenario.links.every
        speed = f" and {links.bytes_per_s * 8e-6:g} Mbit/s" if links.bytes_per_s < math.inf else ""
        lines.append(
            f"at fidelity ideal links cost only {' and '.join(synchronous)} time, at a latency of "
            f"{links.latency_s * 1e3:g} ms{speed}; to compare times pass --fidelity links"
        )
    num_events, wall_s = _effort(ensembles)
    speed = f"{num_events / wall_s:,.0f}/s"
    return [*lines, f"{num_events:,} events in {wall_s:.1f} s of computing: {speed}"]


def _decay_notes(ensemble: Ensemble) -> list[str]:
    share, decay = ensemble.lowest_share, _decay(ensemble).mean
    fell = f"{ensemble.label}: the consensus distance fell to {share:.2g} of its first value"
    if share <= TAIL_LOWEST:
        agree = f"{ensemble.label}: the workers agree after a few exchanges at once"
        return [agree] if math.isnan(decay) else []
    if ensemble.method == "none":
        return [f"{ensemble.label}: workers that exchange nothing never agree"]
    if math.isnan(decay):
        return [f"{fell}, too little for its decay: let it run for more steps"]
    return [
        f"{fell}, not to {TAIL_LOWEST:g}: its decay may still be that of faster modes; let it run "
        "for more steps"
    ]


def _speed_ups(study: Study, ensembles: Sequence[Ensemble]) -> list[str]:
    lines = []
    for number, case in enumerate(study.cases):
        decays = {each.method: _decay(each).mean for each in ensembles if each.case == number}
        ratio = decays.get("a2cid2", math.nan) / decays.get("gossip", math.nan)
        if math.isfinite(ratio):
            where = f"{case.name}: " if case.name else ""
            lines.append(
                f"{where}per exchange a2cid2 brings workers together {ratio:.3g} times as fast as "
                "gossip"
            )
    return lines


def _has_diverged(study: Study, ensemble: Ensemble) -> bool:
    distances = ensemble.mean("consensus_distance")
    last = ensemble.last("consensus_distance").mean
    # Exchanges alone bring workers together: what grows under them is not over yet.
    has_grown = not study.objective.has_gradients and last > 2 * distances[0]
    return bool(has_grown) or not math.isfinite(last)


def _effort(ensembles: Sequence[Ensemble]) -> tuple[int, float]:
    """Return the events of all traces, and the seconds that they took."""
    traces = [trace for ensemble in ensembles for trace in ensemble.traces]
    return sum(trace.num_events for trace in traces), sum(trace.wall_s for trace in traces)


def as_json(study: Study, ensembles: Sequence[Ensemble]) -> dict[str, Any]:
    """Return the content of ``--json``, with null for NaN and infinite values."""
    cases = [
        {
            "name": case.name,
            "graph": str(case.scenario.graph),
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
        "metric_name": study.objective.metric_name,
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
        "achieved_comm_rate": ensemble.over_seeds(lambda trace: trace.achieved_comm_rate),
        "exchanges_per_worker": _exchanges_per_worker(ensemble),
        "models_per_step": ensemble.over_seeds(lambda trace: trace.models_per_step),
    }
    if not study.objective.has_gradients:
        figures = {"decay_per_exchange": _decay(ensemble), **figures}
        series["lowest_share"] = ensemble.lowest_share
    for name, estimate in figures.items():
        series |= {
            name: estimate.mean,
            f"{name}_spread": estimate.spread,
            f"{name}_by_seed": list(estimate.by_seed),
        }
    slowest, fastest = ensemble.gradient_steps
    num_events, wall_s = _effort([ensemble])
    return series | {
        "gradient_steps_of_slowest_worker": slowest,
        "gradient_steps_of_fastest_worker": fastest,
        "events": num_events,
        "events_per_s": num_events / wall_s,
        "digests": [trace.digest() for trace in ensemble.traces],
    }


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def configuration(arguments: SimulateArguments) -> dict[str, Any]:
    """Return the options, without those that say where to write and how to compute."""
    asked = {name: value for name, value in asdict(arguments).items() if name not in OUTPUT_OPTIONS}
    return asked | {"file": asked["file"] and str(asked["file"])}


def command(arguments: SimulateArguments) -> str:
    """Return the command that gives the same figures."""
    words = ["gossipdp", "simulate"]
    defaults = configuration(type(arguments)())
    for name, value in configuration(arguments).items():
        if value == defaults[name]:
            continue
        option = [] if name == "file" else [f"--{name.replace('_', '-')}"]
        words += [*option, ",".join(value) if isinstance(value, tuple) else str(value)]
    return shlex.join(words)
