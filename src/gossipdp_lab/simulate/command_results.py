"""The table, the notes and the JSON of ``gossipdp simulate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

import gossipdp
from gossipdp_lab.simulate.command_study import Run
from gossipdp_lab.simulate.objectives import Objective
from gossipdp_lab.simulate.options import SimulateArguments
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.study import SYNCHRONOUS
from gossipdp_lab.simulate.trace import TAIL_LOWEST, Record, Trace, lowest_share

Results = Sequence[tuple[Run, Trace]]


def table(results: Results, objective: Objective) -> Table:
    """Return a row for each run, with the values at its end."""
    made = Table()
    for number, (run, trace) in enumerate(results):
        last, (slowest, fastest) = trace.records[-1], _gradient_steps(trace)
        cells = {"": run.label}
        if objective.has_gradients:
            cells["final loss"] = _text(last.loss)
            if objective.metric_name is not None:
                cells[objective.metric_name.replace("_", " ")] = _text(last.metric)
        cells["consensus distance"] = _text(last.consensus_distance, digits=3)
        if not objective.has_gradients:
            cells["decay per exchange"] = _text(trace.decay_per_exchange())
        cells |= {
            "exchanges per worker": f"{_exchanges_per_worker(trace):,.1f}",
            "gradient steps": f"{slowest:,.0f}"
            + (f" to {fastest:,.0f}" if fastest > slowest else ""),
            "idle": f"{last.idle_share:.1%}",
            "time (s)": f"{last.time_s:,.1f}",
        }
        for column in cells if number == 0 else ():
            made.add_column(column, justify="right" if column else "left", overflow="fold")
        made.add_row(*cells.values())
    return made


def _text(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "diverged"
    return f"{value:.{digits}g}"


def _exchanges_per_worker(trace: Trace) -> float:
    return 2.0 * trace.records[-1].exchanges / trace.num_workers


def _gradient_steps(trace: Trace) -> tuple[float, float]:
    """Return the steps of the slowest and the fastest worker.

    If steps are counted and not simulated, all workers have taken equally many.
    """
    per_worker = trace.records[-1].gradient_steps / trace.num_workers
    steps = trace.worker_steps if any(trace.worker_steps) else [per_worker]
    return min(steps), max(steps)


def notes(results: Results, scenario: Scenario) -> list[str]:
    """Return lines that complete the table."""
    lines = []
    if not scenario.objective.has_gradients:
        for run, trace in results:
            if trace.num_workers > 1:
                lines += _decay_notes(run.label, trace)
        lines += _speed_ups(results)
    if scenario.fidelity == "ideal" and any(trace.method in SYNCHRONOUS for _, trace in results):
        lines.append(
            "at fidelity ideal links cost only allreduce time; to compare times pass --fidelity "
            "links"
        )
    return lines


def _decay_notes(label: str, trace: Trace) -> list[str]:
    share, decay = lowest_share(trace.column("consensus_distance")), trace.decay_per_exchange()
    fell = f"{label}: the consensus distance fell to {share:.2g} of its first value"
    if share <= TAIL_LOWEST or trace.method == "none":
        return []
    if math.isnan(decay):
        return [f"{fell}, too little for its decay: let it run for more steps"]
    return [
        f"{fell}, not to {TAIL_LOWEST:g}: its decay may still be that of faster modes; let it run "
        "for more steps"
    ]


def _speed_ups(results: Results) -> list[str]:
    lines = []
    for number in dict.fromkeys(run.case for run, _ in results):
        case = [(run, trace) for run, trace in results if run.case == number]
        decays = {trace.method: trace.decay_per_exchange() for _, trace in case}
        ratio = decays.get("a2cid2", math.nan) / decays.get("gossip", math.nan)
        if math.isfinite(ratio):
            words = case[0][0].label.split()[:-1]
            where = f"{' '.join(words)}: " if words else ""
            lines.append(
                f"{where}per exchange a2cid2 brings workers together {ratio:.3g} times as fast as "
                "gossip"
            )
    return lines


def as_json(arguments: SimulateArguments, results: Results) -> dict[str, Any]:
    """Return the content of ``--json``, where NaN and infinite values are to be null."""
    asked = {name: value for name, value in asdict(arguments).items() if name != "json"}
    return {
        "runs": [_run_as_json(run, trace) for run, trace in results],
        "metric_name": results[0][0].job.scenario.objective.metric_name,
        "configuration": asked,
        "version": gossipdp.__version__,
    }


def _run_as_json(run: Run, trace: Trace) -> dict[str, Any]:
    slowest, fastest = _gradient_steps(trace)
    return {
        "graph": str(run.job.scenario.graph),
        "comm_rate": run.job.scenario.comm_rate,
        "method": run.job.method,
        **{name: trace.column(name).tolist() for name in Record._fields},
        "decay_per_exchange": trace.decay_per_exchange(),
        "achieved_comm_rate": trace.achieved_comm_rate,
        "exchanges_per_worker": _exchanges_per_worker(trace),
        "models_per_step": trace.models_per_step,
        "gradient_steps_of_slowest_worker": slowest,
        "gradient_steps_of_fastest_worker": fastest,
    }
