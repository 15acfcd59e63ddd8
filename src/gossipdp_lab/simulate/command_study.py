"""From the options of ``gossipdp simulate`` to its runs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from gossipdp.rules import positive_number, shown_rate
from gossipdp_lab.simulate.module_objective import digits_objective
from gossipdp_lab.simulate.objectives import Consensus, Objective
from gossipdp_lab.simulate.options import SimulateArguments
from gossipdp_lab.simulate.scenario import (
    ComputeTime,
    ConstantTime,
    Link,
    LinkModel,
    Scenario,
    SlowedTime,
)
from gossipdp_lab.simulate.study import SYNCHRONOUS, Job, check_method
from gossipdp_lab.simulate.trace import TAIL_LOWEST

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

DIGITS_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
"""As the demo trains it."""

LINK_OPTIONS = ("latency_ms", "link_mbps", "model_mb")


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
    job: Job
    needed: float


def make_runs(arguments: SimulateArguments) -> list[Run]:
    """Return the runs that the arguments ask for; raise ValueError for a mistake in them."""
    methods, graphs = _words("--methods", arguments.methods), _words("--graph", arguments.graph)
    words = _words("--comm-rate", arguments.comm_rate)
    rates = [word if word == "auto" else positive_number("--comm-rate", word) for word in words]
    if len(set(rates)) < len(rates):
        raise ValueError(f"--comm-rate is {arguments.comm_rate!r}: each may stand there once")
    base = _base_scenario(arguments)
    for method in methods:
        check_method(method)
    _refuse_useless(arguments, methods, base.objective)
    runs = []
    cases = [(graph, rate) for graph in graphs for rate in rates]
    for case, (graph, rate) in enumerate(cases):
        scenario = replace(base, graph=graph, comm_rate=rate)
        scenario.make_constants()  # raises for an impossible graph or rate
        for method in methods:
            parts = [graph] * (len(graphs) > 1) + [f"r={shown_rate(rate)}"] * (len(rates) > 1)
            runs.append(_run(arguments, " ".join([*parts, method]), case, Job(scenario, method)))
    return runs


def _run(arguments: SimulateArguments, label: str, case: int, job: Job) -> Run:
    """Return the run, with a length if the user gave none."""
    scenario, method = job
    if arguments.steps is not None or scenario.objective.has_gradients:
        return Run(label, case, job, scenario.num_steps)
    constants, most = scenario.make_constants(), math.inf
    if method == "none" or not constants.edges:
        needed = STEPS_WITHOUT_AGREEMENT
    elif method in SYNCHRONOUS:
        needed = LEAST_STEPS
    else:
        # The expected distance is at most 2 exp(-rate t) of its first value.
        rate = 1.0 / (2.0 * constants.chi1) if method == "gossip" else constants.eta
        needed = max(LEAST_STEPS, math.ceil(MARGIN * math.log(2.0 / TAIL_LOWEST) / rate))
        per_step = constants.exchanges_per_unit_time * Consensus().dimension
        most = max(LEAST_STEPS, math.floor(MOST_VALUES[scenario.fidelity] / per_step))
    scenario = replace(scenario, num_steps=min(needed, most), stop_below=TAIL_LOWEST)
    return Run(label, case, Job(scenario, method), needed)


def timeline_jobs(runs: Sequence[Run]) -> list[Job]:
    """Return short runs of the first case, one a method, with their timelines."""
    return [
        Job(
            replace(
                job.scenario,
                num_steps=min(TIMELINE_STEPS, job.scenario.num_steps),
                num_records=1,
                stop_below=0.0,
                keep_timeline=True,
            ),
            job.method,
        )
        for _, case, job, _ in runs
        if case == 0
    ]


def title(arguments: SimulateArguments) -> str:
    """Describe the simulations in a line."""
    workers = f"{arguments.workers} workers"
    return ", ".join(
        [
            arguments.workload,
            workers if "," in arguments.graph else f"{arguments.graph} of {workers}",
            *([] if "," in arguments.comm_rate else [f"comm rate {arguments.comm_rate}"]),
            f"fidelity {arguments.fidelity}",
            f"seed {arguments.seed}",
        ]
    )


def timeline_title(scenario: Scenario) -> str:
    """Describe the timeline in a line."""
    slow = ""
    if isinstance(scenario.compute_time, SlowedTime):
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
        text = f"{label}: {job.scenario.num_steps:,.0f} steps at most"
        if job.scenario.num_steps < needed:
            text += (
                f", since the {needed:,.0f} of theory would take long; --steps sets another length"
            )
        lines.append(text)
    end = f"below {TAIL_LOWEST:g} of its first value"
    return [*lines, f"a run ends once the consensus distance is {end}"]


def _base_scenario(arguments: SimulateArguments) -> Scenario:
    """Return the scenario without its graph and comm rate."""
    objective: Objective = Consensus()
    if arguments.workload == "digits":
        objective = digits_objective()
    latency_s, speed, model_mb = arguments.latency_ms / 1e3, arguments.link_mbps, arguments.model_mb
    return Scenario(
        num_workers=arguments.workers,
        objective=objective,
        optimizer=DIGITS_SGD,
        fidelity=arguments.fidelity,
        compute_time=_compute_time(arguments),
        links=LinkModel(Link(latency_s, math.inf if speed is None else speed * 1e6 / 8)),
        model_bytes=None if model_mb is None else model_mb * 1e6,
        num_steps=arguments.steps or DEFAULT_STEPS,
        seed=arguments.seed,
        num_records=NUM_RECORDS if objective.has_gradients else NUM_CONSENSUS_RECORDS,
    )


def _refuse_useless(
    arguments: SimulateArguments, methods: Sequence[str], objective: Objective
) -> None:
    """Raise ValueError for an option that was given and would have no effect."""
    if arguments.fidelity == "links" or any(method in SYNCHRONOUS for method in methods):
        return
    why = "here: at fidelity ideal exchanges take no time; pass --fidelity links"
    _refuse(arguments, LINK_OPTIONS, why)
    if not (objective.has_gradients or arguments.timeline):
        why = (
            "here: without gradients, and at fidelity ideal, edges fire whatever the workers do; "
            "pass --fidelity links, or --workload digits"
        )
        _refuse(arguments, ("slow_worker",), why)


def _refuse(arguments: SimulateArguments, names: Collection[str], why: str) -> None:
    """Raise ValueError if one of these options is not at its default."""
    for name in names:
        if getattr(arguments, name) != getattr(SimulateArguments, name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect {why}")


def _compute_time(arguments: SimulateArguments) -> ComputeTime:
    base, factors = ConstantTime(arguments.step_ms / 1e3), dict[int, float]()
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
    return SlowedTime(base, factors) if factors else base


def _words(option: str, text: str) -> list[str]:
    """Return the words between commas; each may occur once."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError(f"{option} is {text!r}: write names with commas between them")
    if len(set(words)) < len(words):
        raise ValueError(f"{option} is {text!r}: each may stand there once")
    return words
