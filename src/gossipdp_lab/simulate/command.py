"""``gossipdp simulate``: its options, the runs that they ask for, and what they brought.

It takes everything from the package, as a user does: those names import torch on first use, so
that ``--help`` is quick.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import tyro
from rich.console import Console
from rich.table import Table

import gossipdp
from gossipdp.rules import (
    DEFAULT_GRAPH,
    at_least_1,
    number,
    option,
    output_file,
    positive_number,
    shown_rate,
)
from gossipdp_lab import simulate
from gossipdp_lab.console import ProgressView, say, table_of

FILE_WIDTH = 140
"""Width of the table if it does not go to a terminal, so that its cells stay whole."""

DEFAULT_STEPS = 100.0
NUM_RECORDS, NUM_CONSENSUS_RECORDS = 100, 300
TIMELINE_STEPS = 24.0
"""Length of the runs whose timeline is drawn: their last part is shown, once all exchange."""

MARGIN = 1.3
"""The bounds are about expectations; single runs lie on both sides of them."""
LEAST_STEPS = 20.0
STEPS_WITHOUT_AGREEMENT = 100.0
MOST_VALUES = {"ideal": 2.5e8, "links": 3e6}
"""Values that may be exchanged in one run, so that it takes some seconds at most."""


@dataclass(frozen=True)
class SimulateArguments:
    """Simulate runs on a virtual clock, to choose graph and method."""

    graph: str = DEFAULT_GRAPH
    """ring, path, star, complete, exponential or torus;
    several with commas."""

    workers: int = option(16, at_least_1)
    """Workers."""

    methods: str = "a2cid2,gossip"
    """a2cid2, gossip, none, released; or synchronous: allreduce."""

    workload: Literal["consensus", "digits"] = "consensus"
    """consensus: random vectors, no gradients; digits: a perceptron."""

    comm_rate: str = "1"
    """Exchanges per worker per gradient step; several with commas; auto with links."""

    fidelity: Literal["ideal", "links"] = "ideal"
    """ideal: random exchanges that take no time; links: the real protocol."""

    steps: float | None = option(None, positive_number)
    """Gradient steps of an ordinary worker; by default 100, for consensus until workers agree."""

    seed: int = 0
    """Seed of everything random."""

    step_ms: float = option(100.0, positive_number)
    """Duration of a gradient step."""

    slow_worker: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """RANK:FACTOR; 2:4 makes worker 2 four times slower."""

    latency_ms: float = option(0.5, number)
    """Time that a message travels."""

    link_mbps: float | None = option(None, positive_number)
    """Speed of a link in each direction, Mbit/s; by default unlimited."""

    model_mb: float | None = option(None, positive_number)
    """Megabytes sent in an exchange; by default the parameters."""

    json: Path | None = option(None, output_file)
    """Also write the results to this file."""

    timeline: bool = False
    """Also draw what each worker does when."""


def run(arguments: SimulateArguments) -> int:
    """Simulate, show the results and write the files; return the exit status.

    Raises:
        ValueError: bad input; nothing has been simulated or written yet.
    """
    import msgspec

    from gossipdp_lab.simulate.figures import Line, draw_simulation, draw_timeline

    runs = make_runs(arguments)
    figure = _figure_of(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    say(console, *opening(arguments, runs))
    short = timeline_jobs(runs) if arguments.timeline else []
    with ProgressView("simulating", console=console) as view:
        jobs = [*(run.job for run in runs), *short]
        traces = simulate.simulate_all(jobs, on_progress=view.advance)
    results = list(zip(runs, traces, strict=False))
    console.print(table(results))
    say(console, *notes(results))
    if arguments.json is not None:
        encoded = msgspec.json.encode(as_json(arguments, results))  # NaN and inf as null
        arguments.json.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
        say(console, f"results: {arguments.json}")
    figure.parent.mkdir(parents=True, exist_ok=True)
    lines = [Line(run.label, run.case, trace) for run, trace in results]
    draw_simulation(lines, figure, title=title(arguments))
    say(console, f"figure: {figure}")
    if short:
        path = figure.with_name("timeline.png")
        draw_timeline(traces[len(runs) :], path, title=timeline_title(runs[0].job.scenario))
        say(console, f"timeline: {path}")
    return 0


def _figure_of(arguments: SimulateArguments) -> Path:
    """Return where the figure goes; raise ValueError if it cannot be written there."""
    graphs = arguments.graph.replace(",", "-")
    figure = Path("runs", f"simulate-{arguments.workload}-{graphs}-{arguments.workers}/figure.png")
    there = next(parent for parent in figure.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{figure} cannot be written under {there}: go to another directory")
    return figure


# From the options to the runs.


class Run(NamedTuple):
    """One row of the table.

    Attributes:
        label: its name there and in figures.
        case: the number of its graph and comm rate, from 0.
        job: its scenario and method.
        needed: the steps in which theory expects agreement.
    """

    label: str
    case: int
    job: simulate.Job
    needed: float


def make_runs(arguments: SimulateArguments) -> list[Run]:
    """Return the runs that the arguments ask for; raise ValueError for a mistake in them."""
    from gossipdp_lab.simulate.study import check_method

    methods, graphs = _words("--methods", arguments.methods), _words("--graph", arguments.graph)
    words = _words("--comm-rate", arguments.comm_rate)
    rates = [word if word == "auto" else positive_number("--comm-rate", word) for word in words]
    if len(set(rates)) < len(rates):
        raise ValueError(f"--comm-rate is {arguments.comm_rate!r}: each may stand there once")
    base = _base_scenario(arguments)
    for method in methods:
        check_method(method, base.fidelity)
    _refuse_useless(arguments, [simulate.Job(base, method) for method in methods])
    runs = []
    for case, (graph, rate) in enumerate(product(graphs, rates)):
        scenario = replace(base, graph=graph, comm_rate=rate)
        scenario.make_constants()  # raises for an impossible graph or rate
        for method in methods:
            parts = [graph] * (len(graphs) > 1) + [f"r={shown_rate(rate)}"] * (len(rates) > 1)
            job = simulate.Job(scenario, method)
            runs.append(_run(arguments, " ".join([*parts, method]), case, job))
    return runs


def _run(arguments: SimulateArguments, label: str, case: int, job: simulate.Job) -> Run:
    """Return the run, with a length if the user gave none."""
    from gossipdp_lab.simulate.trace import TAIL_LOWEST

    scenario, method = job
    if arguments.steps is not None or scenario.objective.has_gradients:
        return Run(label, case, job, scenario.num_steps)
    constants, most = scenario.make_constants(), math.inf
    if method == "none" or not constants.edges:
        needed = STEPS_WITHOUT_AGREEMENT
    elif job.is_synchronous:
        needed = LEAST_STEPS
    else:
        # The expected distance is at most 2 exp(-rate t) of its first value.
        rate = 1.0 / (2.0 * constants.chi1) if method == "gossip" else constants.eta
        needed = max(LEAST_STEPS, math.ceil(MARGIN * math.log(2.0 / TAIL_LOWEST) / rate))
        per_step = constants.exchanges_per_unit_time * simulate.Consensus().dimension
        most = max(LEAST_STEPS, math.floor(MOST_VALUES[scenario.fidelity] / per_step))
    scenario = replace(scenario, num_steps=min(needed, most), stop_below=TAIL_LOWEST)
    return Run(label, case, simulate.Job(scenario, method), needed)


def timeline_jobs(runs: Sequence[Run]) -> list[simulate.Job]:
    """Return short runs of the first case, one a method, with their timelines."""
    jobs = []
    for scenario, method in (run.job for run in runs if run.case == 0):
        steps = min(TIMELINE_STEPS, scenario.num_steps)
        short = replace(
            scenario, num_steps=steps, num_records=1, stop_below=0.0, keep_timeline=True
        )
        jobs.append(simulate.Job(short, method))
    return jobs


def title(arguments: SimulateArguments) -> str:
    """Describe the simulations in a line."""
    parts = [arguments.workload, f"{arguments.workers} workers"]
    if "," not in arguments.graph:
        parts[1] = f"{arguments.graph} of {parts[1]}"
    if "," not in arguments.comm_rate:
        parts.append(f"comm rate {arguments.comm_rate}")
    return ", ".join([*parts, f"fidelity {arguments.fidelity}", f"seed {arguments.seed}"])


def timeline_title(scenario: simulate.Scenario) -> str:
    """Describe the timeline in a line."""
    slow = ""
    if isinstance(scenario.compute_time, simulate.SlowedTime):
        for rank, factor in scenario.compute_time.factors.items():
            slow += f"; worker {rank} takes {factor:g} times as long"
    return (
        f"{scenario.graph} of {scenario.num_workers} workers, comm rate "
        f"{shown_rate(scenario.comm_rate)}{slow}"
    )


def opening(arguments: SimulateArguments, runs: Sequence[Run]) -> list[str]:
    """Describe the simulations that are about to begin, and their lengths."""
    first = runs[0].job.scenario
    if arguments.steps is not None or first.objective.has_gradients:
        return [f"{title(arguments)}, {first.num_steps:g} steps"]
    lines = [title(arguments)]
    for label, _, job, needed in runs:
        length = job.scenario.num_steps
        why = f", since the {needed:,.0f} of theory would take long; --steps sets another length"
        lines.append(f"{label}: {length:,.0f} steps at most{why if length < needed else ''}")
    end = f"below {first.stop_below:g} of its first value"
    return [*lines, f"a run ends once the consensus distance is {end}"]


def _base_scenario(arguments: SimulateArguments) -> simulate.Scenario:
    """Return the scenario without its graph and comm rate."""
    from gossipdp_lab.tasks.digits import SGD

    objective: simulate.Objective = simulate.Consensus()
    if arguments.workload == "digits":
        objective = simulate.digits_objective()
    speed, model_mb = arguments.link_mbps, arguments.model_mb
    bytes_per_s = math.inf if speed is None else speed * 1e6 / 8
    return simulate.Scenario(
        num_workers=arguments.workers,
        objective=objective,
        optimizer=SGD,
        fidelity=arguments.fidelity,
        compute_time=_compute_time(arguments),
        links=simulate.LinkModel(simulate.Link(arguments.latency_ms / 1e3, bytes_per_s)),
        model_bytes=None if model_mb is None else model_mb * 1e6,
        num_steps=arguments.steps or DEFAULT_STEPS,
        seed=arguments.seed,
        num_records=NUM_RECORDS if objective.has_gradients else NUM_CONSENSUS_RECORDS,
    )


def _refuse_useless(arguments: SimulateArguments, jobs: Sequence[simulate.Job]) -> None:
    """Raise ValueError for an option that was given and would have no effect."""
    if arguments.fidelity == "links" or any(job.is_synchronous for job in jobs):
        return
    why = "at fidelity ideal exchanges take no time; pass --fidelity links"
    useless = dict.fromkeys(("latency_ms", "link_mbps", "model_mb"), why)
    if not (jobs[0].scenario.objective.has_gradients or arguments.timeline):
        useless["slow_worker"] = (
            "without gradients, and at fidelity ideal, edges fire whatever the workers do; "
            "pass --fidelity links, or --workload digits"
        )
    for name, why in useless.items():
        if getattr(arguments, name) != getattr(SimulateArguments, name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect here: {why}")


def _compute_time(arguments: SimulateArguments) -> simulate.ComputeTime:
    base, factors = simulate.ConstantTime(arguments.step_ms / 1e3), dict[int, float]()
    for text in (word.strip() for each in arguments.slow_worker for word in each.split(",")):
        match = re.fullmatch(r"(\d+):(.+)", text)
        if match is None:
            raise ValueError(f"--slow-worker is {text!r}; write RANK:FACTOR, such as 2:4")
        rank = int(match[1])
        if rank >= arguments.workers:
            raise ValueError(
                f"--slow-worker {text}: there is no rank {rank} among {arguments.workers} "
                f"workers; choose 0 to {arguments.workers - 1}"
            )
        if rank in factors:
            raise ValueError(f"--slow-worker {text}: rank {rank} is given twice")
        factors[rank] = positive_number(f"the factor of --slow-worker {text}", match[2])
    return simulate.SlowedTime(base, factors) if factors else base


def _words(option: str, text: str) -> list[str]:
    """Return the words between commas; each may occur once."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError(f"{option} is {text!r}: write names with commas between them")
    if len(set(words)) < len(words):
        raise ValueError(f"{option} is {text!r}: each may stand there once")
    return words


# The results.

Results: TypeAlias = "Sequence[tuple[Run, simulate.Trace]]"


def table(results: Results) -> Table:
    """Return a row for each run, with the values at its end."""
    rows = []
    for run, trace in results:
        objective, last = run.job.scenario.objective, trace.records[-1]
        slowest, fastest = _gradient_steps(trace)
        cells = {"": run.label}
        if objective.has_gradients:
            cells["final loss"] = _text(last.loss)
            if objective.metric_name is not None:
                cells[objective.metric_name.replace("_", " ")] = _text(last.metric)
        cells["consensus distance"] = _text(last.consensus_distance, digits=3)
        if not objective.has_gradients:
            cells["decay per exchange"] = _text(trace.decay_per_exchange())
        cells |= {
            "exchanges per worker": f"{trace.exchanges_per_worker:,.1f}",
            "gradient steps": f"{slowest:,.0f}"
            + (f" to {fastest:,.0f}" if fastest > slowest else ""),
            "idle": f"{last.idle_share:.1%}",
            "time (s)": f"{last.time_s:,.1f}",
        }
        rows.append(cells)
    made = table_of(rows)
    for column in made.columns:
        column.overflow = "fold"
    return made


def _text(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "diverged"
    return f"{value:.{digits}g}"


def _gradient_steps(trace: simulate.Trace) -> tuple[float, float]:
    """Return the steps of the slowest and the fastest worker.

    If steps are counted and not simulated, all workers have taken equally many.
    """
    per_worker = trace.records[-1].gradient_steps / trace.num_workers
    steps = trace.worker_steps if any(trace.worker_steps) else [per_worker]
    return min(steps), max(steps)


def notes(results: Results) -> list[str]:
    """Return lines that complete the table."""
    lines, scenario = [], results[0][0].job.scenario
    if not scenario.objective.has_gradients:
        for run, trace in results:
            if trace.num_workers > 1:
                lines += _decay_notes(run.label, trace)
        lines += _speed_ups(results)
    if scenario.fidelity == "ideal" and any(run.job.is_synchronous for run, _ in results):
        lines.append(
            "at fidelity ideal links cost only allreduce time; to compare times pass --fidelity "
            "links"
        )
    return lines


def _decay_notes(label: str, trace: simulate.Trace) -> list[str]:
    from gossipdp_lab.simulate.trace import TAIL_LOWEST, lowest_share

    share = lowest_share(trace.column("consensus_distance"))
    if share <= TAIL_LOWEST or trace.method == "none":
        return []
    why = f"not to {TAIL_LOWEST:g}: its decay may still be that of faster modes;"
    if math.isnan(trace.decay_per_exchange()):
        why = "too little for its decay:"
    fell = f"{label}: the consensus distance fell to {share:.2g} of its first value"
    return [f"{fell}, {why} let it run for more steps"]


def _speed_ups(results: Results) -> list[str]:
    lines = []
    for _, case in groupby(results, key=lambda result: result[0].case):
        runs, traces = zip(*case, strict=True)
        decays = {trace.method: trace.decay_per_exchange() for trace in traces}
        ratio = decays.get("a2cid2", math.nan) / decays.get("gossip", math.nan)
        if math.isfinite(ratio):
            words = runs[0].label.split()[:-1]
            where = f"{' '.join(words)}: " if words else ""
            lines.append(
                f"{where}per exchange a2cid2 brings workers together {ratio:.3g} times as fast as "
                "gossip"
            )
    return lines


def as_json(arguments: SimulateArguments, results: Results) -> dict[str, Any]:
    """Return the content of ``--json``, where NaN and infinite values are to be null."""
    asked = asdict(arguments)
    del asked["json"]
    return {
        "runs": [_run_as_json(run, trace) for run, trace in results],
        "metric_name": results[0][0].job.scenario.objective.metric_name,
        "configuration": asked,
        "version": gossipdp.__version__,
    }


def _run_as_json(run: Run, trace: simulate.Trace) -> dict[str, Any]:
    slowest, fastest = _gradient_steps(trace)
    return {
        "graph": str(run.job.scenario.graph),
        "comm_rate": run.job.scenario.comm_rate,
        "method": run.job.method,
        **{name: trace.column(name).tolist() for name in simulate.Record._fields},
        "decay_per_exchange": trace.decay_per_exchange(),
        "achieved_comm_rate": trace.achieved_comm_rate,
        "exchanges_per_worker": trace.exchanges_per_worker,
        "models_per_step": trace.models_per_step,
        "gradient_steps_of_slowest_worker": slowest,
        "gradient_steps_of_fastest_worker": fastest,
    }
