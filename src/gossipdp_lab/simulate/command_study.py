"""From the options of ``gossipdp simulate`` to what is simulated."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from gossipdp.cli.option_checks import check_number, read_text
from gossipdp_lab.simulate.module_objective import digits_objective
from gossipdp_lab.simulate.objectives import Consensus, Objective, Quadratic
from gossipdp_lab.simulate.optimizers import AdamW, RowOptimizer, Sgd
from gossipdp_lab.simulate.policies import find_policy
from gossipdp_lab.simulate.scenario import (
    LATENCY_S,
    ComputeTime,
    ConstantTime,
    Link,
    LinkModel,
    LognormalTime,
    MeasuredTime,
    Scenario,
    SlowedTime,
    check_step_spread,
)
from gossipdp_lab.simulate.study import (
    METHODS_OF,
    SYNCHRONOUS,
    Ensemble,
    Job,
    affordable_steps,
    check_method,
    steps_to_agree,
)
from gossipdp_lab.simulate.trace import TAIL_LOWEST, Trace
from gossipdp_lab.tasks.options import moment_periods, outer_step

if TYPE_CHECKING:
    from gossipdp_lab.simulate.command import SimulateArguments

DEFAULT_STEPS = 100.0
NUM_RECORDS, NUM_CONSENSUS_RECORDS = 100, 300
TIMELINE_STEPS = 24.0
"""Length of the runs whose timeline is drawn: their last part is shown, once all exchange."""

DIGITS = ("digits", "digits-convolutional")
WORKLOADS = ("consensus", "quadratic", *DIGITS)
DIGITS_SGD = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=5e-4)
"""As the demo trains it."""

WORKLOADS_OF = {
    "dimension": ("consensus", "quadratic"),
    "noise": ("quadratic",),
    "heterogeneity": ("quadratic",),
    "curvature": ("quadratic",),
    "batch_size": DIGITS,
    "disjoint": DIGITS,
    "dirichlet": DIGITS,
}
"""The workloads for which an option plays a part."""
OPTIMIZER_OPTIONS = (
    *("optimizer", "learning_rate", "momentum", "weight_decay"),
    "learning_rate_decay",
)
LINK_OPTIONS = ("latency_ms", "link_mbps", "jitter", "slow_link", "model_mb")


@dataclass(frozen=True)
class Case:
    """One graph at one comm rate: scenarios that differ by method and seed alone.

    Attributes:
        name: what tells it from the other cases; empty where there is but one.
        scenario: with the first seed.
        num_steps: how long each method runs.
        needed: the steps that theory says it takes to agree, where that would take too long.
    """

    name: str
    scenario: Scenario
    num_steps: dict[str, float]
    needed: dict[str, float]


@dataclass(frozen=True)
class Study:
    """All that one call simulates."""

    arguments: SimulateArguments
    cases: list[Case]
    methods: list[str]
    seeds: list[int]

    @property
    def objective(self) -> Objective:
        """What all minimise."""
        return self.cases[0].scenario.objective

    def jobs(self) -> list[Job]:
        """Every case, method and seed, in this order."""
        return [
            Job(replace(case.scenario, num_steps=case.num_steps[method], seed=seed), method)
            for case in self.cases
            for method in self.methods
            for seed in self.seeds
        ]

    def ensembles(self, traces: Sequence[Trace]) -> list[Ensemble]:
        """What became of :meth:`jobs`: one ensemble for each case and method."""
        ensembles: list[Ensemble] = []
        for number, case in enumerate(self.cases):
            for method in self.methods:
                begin = len(ensembles) * len(self.seeds)
                label = case.name.format(method=method) or method
                ensembles.append(Ensemble(label, traces[begin : begin + len(self.seeds)], number))
        return ensembles

    def timeline_jobs(self) -> list[Job]:
        """Short runs of the first case and seed, one a method, that keep what workers do."""
        case = self.cases[0]
        short = replace(case.scenario, num_records=1, stop_below=0.0, keep_timeline=True)
        return [
            Job(replace(short, num_steps=min(TIMELINE_STEPS, case.num_steps[method])), method)
            for method in self.methods
        ]

    def title(self) -> str:
        """What is simulated, in a line."""
        arguments, scenario = self.arguments, self.cases[0].scenario
        workers = f"{arguments.workers} workers"
        has_one_graph = arguments.graph.count(",") == 0
        parts = [
            self.objective.name,
            f"{arguments.graph} of {workers}" if has_one_graph else workers,
            *([] if "," in arguments.comm_rate else [f"comm rate {scenario.comm_rate:g}"]),
            f"fidelity {scenario.fidelity}",
            f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"seed {self.seeds[0]}",
        ]
        return ", ".join(parts)

    def timeline_title(self) -> str:
        """The title of the timeline."""
        scenario, slow = self.cases[0].scenario, ""
        if isinstance(scenario.compute_time, SlowedTime):
            for rank, factor in scenario.compute_time.factors.items():
                slow += f"; worker {rank} takes {factor:g} times as long"
        return (
            f"{scenario.graph} of {scenario.num_workers} workers, comm rate "
            f"{scenario.comm_rate:g}{slow}"
        )

    def opening(self) -> list[str]:
        """What is about to be simulated, and how long."""
        if self.arguments.steps is not None or self.objective.has_gradients:
            return [f"{self.title()}, {self.cases[0].num_steps[self.methods[0]]:g} steps"]
        lines = [self.title()]
        for case in self.cases:
            for method in self.methods:
                label = case.name.format(method=method) or method
                text = f"{label}: {case.num_steps[method]:,.0f} steps at most"
                if method in case.needed:
                    text += (
                        f", since the {case.needed[method]:,.0f} of theory would take long; "
                        "--steps sets another length"
                    )
                lines.append(text)
        end = f"below {TAIL_LOWEST:g} of its first value"
        return [*lines, f"a run ends once the consensus distance is {end}"]


def make_study(arguments: SimulateArguments) -> Study:
    """What the arguments ask for."""
    methods = _words("--methods", arguments.methods)
    graphs = _words("--graph", arguments.graph)
    words = _words("--comm-rate", arguments.comm_rate)
    rates = [_number("--comm-rate", word, is_positive=True) for word in words]
    if len(set(rates)) < len(rates):
        raise ValueError(f"--comm-rate is {arguments.comm_rate!r}: each may stand there once")
    seeds = parse_seeds(arguments.seeds)
    if arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; it must be at least 1")
    if arguments.steps is not None and not (math.isfinite(arguments.steps) and arguments.steps > 0):
        raise ValueError(f"--steps is {arguments.steps}; it must be a positive number")
    if arguments.processes is not None and arguments.processes < 1:
        raise ValueError(f"--processes is {arguments.processes}; it must be at least 1")
    policy, model_mb = arguments.neighbour_policy or "fresh", arguments.model_mb
    find_policy(policy)

    objective = _make_objective(arguments)
    base = Scenario(
        num_workers=arguments.workers,
        objective=objective,
        optimizer=_make_optimizer(arguments),
        fidelity=arguments.fidelity,
        neighbour_policy=policy,
        compute_time=_compute_time(arguments),
        links=_links(arguments),
        model_bytes=None
        if model_mb is None
        else check_number("--model-mb", model_mb, is_positive=True) * 1e6,
        num_steps=arguments.steps or DEFAULT_STEPS,
        seed=seeds[0],
        graph_seed=arguments.graph_seed,
        num_records=NUM_RECORDS if objective.has_gradients else NUM_CONSENSUS_RECORDS,
        eta_factor=arguments.eta_factor,
        alpha_tilde_factor=arguments.alpha_tilde_factor,
        learning_rate_decay=arguments.learning_rate_decay,
        outer=outer_step(arguments.outer_momentum, arguments.outer_lr),
        exchange_moments=moment_periods(_split(arguments.exchange_moments)),
        sync_every=Scenario.sync_every if arguments.sync_every is None else arguments.sync_every,
    )
    for method in methods:
        check_method(base, method)
    for name, knowing in METHODS_OF.items():
        if not set(methods) & set(knowing):
            options = ("outer_momentum", "outer_lr") if name == "outer" else (name,)
            _refuse(arguments, options, f"with these methods, but with {', '.join(knowing)}")
    is_synchronous = any(method in SYNCHRONOUS for method in methods)
    if arguments.fidelity == "ideal":
        pointless = ("neighbour_policy", *(() if is_synchronous else LINK_OPTIONS))
        why = "here: at fidelity ideal exchanges take no time; pass --fidelity links"
        _refuse(arguments, pointless, why)
        if not (is_synchronous or objective.has_gradients or arguments.timeline):
            why = (
                "here: without gradients, and at fidelity ideal, edges fire whatever the workers "
                "do; pass --fidelity links, or another --workload"
            )
            _refuse(arguments, ("slow_worker", "step_spread"), why)
    cases = []
    for graph in graphs:
        for rate in rates:
            name = " ".join(
                [graph] * (len(graphs) > 1) + ["{method}"] + [f"r={rate:g}"] * (len(rates) > 1)
            )
            scenario = replace(base, graph=graph, comm_rate=rate)
            is_alone = len(graphs) == len(rates) == 1
            cases.append(_case(arguments, "" if is_alone else name, scenario, methods))
    return Study(arguments, cases, methods, seeds)


def _case(
    arguments: SimulateArguments, name: str, scenario: Scenario, methods: Sequence[str]
) -> Case:
    """The case, with lengths where the user gave none."""
    graph, num_workers = scenario.make_graph(), scenario.num_workers
    scenario.make_constants()  # raises for a rate that cannot be
    for i, j in scenario.links.overrides:
        if not graph.has_edge(i, j) and (j - i) not in (1, num_workers - 1):  # of all-reduce
            raise ValueError(
                f"--slow-link {i}-{j}: {scenario.graph} has no edge between these two workers"
            )
    if arguments.steps is not None or scenario.objective.has_gradients:
        return Case(name, scenario, dict.fromkeys(methods, scenario.num_steps), {})
    scenario = replace(scenario, stop_below=TAIL_LOWEST)
    values = scenario.objective.begin(1, 0).start.shape[1]
    needed = {method: steps_to_agree(scenario, method) for method in methods}
    num_steps = {
        method: min(steps, affordable_steps(scenario, method, values_per_worker=values))
        for method, steps in needed.items()
    }
    cut = {method: needed[method] for method in methods if num_steps[method] < needed[method]}
    return Case(name, scenario, num_steps, cut)


def _refuse(arguments: SimulateArguments, names: Collection[str], why: str) -> None:
    """Raise for an option that was given and would play no part."""
    for name in names:
        if getattr(arguments, name) not in (None, False, ()):
            raise ValueError(f"--{name.replace('_', '-')} plays no part {why}")


def _compute_time(arguments: SimulateArguments) -> ComputeTime:
    path, time = arguments.step_times, ConstantTime()
    step_ms = 1e3 * time.step_s if arguments.step_ms is None else arguments.step_ms
    step_s = check_number("--step-ms", step_ms, is_positive=True) / 1e3
    spread = arguments.step_spread or 0.0
    check_step_spread("--step-spread", spread)
    base: ComputeTime = LognormalTime(step_s, spread) if spread else ConstantTime(step_s)
    if path is not None:
        if arguments.step_ms is not None or arguments.step_spread is not None:
            raise ValueError(
                "--step-times says all about step times: leave out --step-ms and --step-spread"
            )
        base = MeasuredTime(read_step_times(path))
    factors: dict[int, float] = {}
    for text in _split(arguments.slow_worker):
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
        factors[rank] = _number(f"the factor of --slow-worker {text}", match[2], is_positive=True)
    return SlowedTime(base, factors) if factors else base


def read_step_times(path: Path) -> tuple[float, ...]:
    """The numbers of a file, one a line; what follows a '#' is a comment."""
    lines = read_text("--step-times", path, "one time in seconds a line").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    times_s = tuple(
        _number(f"{path}, line {number}", text, is_positive=True)
        for number, text in enumerate(texts, start=1)
        if text
    )
    if not times_s:
        raise ValueError(f"--step-times {path}: there is no time in it; write one a line")
    return times_s


def _links(arguments: SimulateArguments) -> LinkModel:
    def link(latency_s: float, megabits_per_s: float) -> Link:
        return Link(latency_s, megabits_per_s * 1e6 / 8)

    latency_ms = 1e3 * LATENCY_S if arguments.latency_ms is None else arguments.latency_ms
    latency_s = check_number("--latency-ms", latency_ms) / 1e3
    speed = arguments.link_mbps
    if speed is not None:
        check_number("--link-mbps", speed, is_positive=True)
    slow: dict[tuple[int, int], Link] = {}
    for text in _split(arguments.slow_link):
        match = re.fullmatch(r"(\d+)-(\d+):([^:]+)(?::([^:]+))?", text)
        if match is None:
            raise ValueError(
                f"--slow-link is {text!r}; write I-J:MBPS or I-J:MBPS:MS, such as 0-1:10:50"
            )
        i, j = sorted((int(match[1]), int(match[2])))
        if j >= arguments.workers or i == j:
            raise ValueError(
                f"--slow-link {text}: ranks {i} and {j} have no link; name two of the ranks 0 to "
                f"{arguments.workers - 1}"
            )
        if (i, j) in slow:
            raise ValueError(f"--slow-link {text}: the link of {i} and {j} is given twice")
        own_speed = _number(f"the speed of --slow-link {text}", match[3], is_positive=True)
        own_latency_s = latency_s
        if match[4] is not None:
            own_latency_s = _number(f"the latency of --slow-link {text}", match[4]) / 1e3
        slow[i, j] = link(own_latency_s, own_speed)
    jitter = check_number("--jitter", arguments.jitter or 0.0)
    return LinkModel(link(latency_s, math.inf if speed is None else speed), slow, jitter=jitter)


def _make_objective(arguments: SimulateArguments) -> Objective:
    """The objective of ``--workload`` with its options."""
    name = arguments.workload
    objective: Objective
    if name not in WORKLOADS and ":" not in name:
        raise ValueError(
            f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}, or name a "
            "function of yours that returns an objective: package.module:function or "
            "file.py:function"
        )
    why = f"in --workload {name}: leave it out"
    _refuse(arguments, [key for key, names in WORKLOADS_OF.items() if name not in names], why)
    dimension = 64 if arguments.dimension is None else arguments.dimension
    if name == "consensus":
        objective = Consensus(dimension)
    elif name == "quadratic":
        mu, smoothness = _parse_curvature(arguments.curvature or "1:1")
        noise = 1.0 if arguments.noise is None else arguments.noise
        objective = Quadratic(dimension, mu, smoothness, noise, arguments.heterogeneity or 0.0)
    elif name in DIGITS:
        objective = digits_objective(
            network="perceptron" if name == "digits" else "convolutional",
            batch_size=32 if arguments.batch_size is None else arguments.batch_size,
            disjoint=arguments.disjoint,
            dirichlet_alpha=arguments.dirichlet,
        )
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` would; other processes get it too
        objective = load_objective(name)
    if not objective.has_gradients:
        _refuse(arguments, OPTIMIZER_OPTIONS, why)
    return objective


def _make_optimizer(arguments: SimulateArguments) -> RowOptimizer:
    """The optimizer that was asked for; what was left open is as the workload has it."""
    default: RowOptimizer = DIGITS_SGD if arguments.workload in DIGITS else Sgd()
    if arguments.optimizer == "adamw":
        default = AdamW()
        if arguments.momentum is not None:
            raise ValueError("--momentum is sgd's; adamw has betas of its own: leave it out")
    names = ("learning_rate", "momentum", "weight_decay")
    asked = {name: getattr(arguments, name) for name in names}
    return replace(default, **{name: value for name, value in asked.items() if value is not None})  # type: ignore[type-var]


def _parse_curvature(text: str) -> tuple[float, float]:
    """The least and the largest eigenvalue."""
    least, _, largest = text.partition(":")
    try:
        eigenvalues = float(least), float(largest)
    except ValueError:
        eigenvalues = math.nan, math.nan
    if not (math.isfinite(sum(eigenvalues)) and 0 <= eigenvalues[0] <= eigenvalues[1]):
        raise ValueError(f"--curvature is {text!r}; write LEAST:LARGEST, such as 0.1:1")
    return eigenvalues


def load_objective(place: str) -> Objective:
    """The objective that a function of the user's returns, called without arguments."""
    module_name, _, function_name = place.rpartition(":")
    if not module_name or not function_name:
        raise ValueError(
            f"{place!r} names no function; write package.module:function or file.py:function"
        )
    if module_name.endswith(".py"):
        module = _import_file(Path(module_name).resolve())
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # something that the user's module needs
            raise ValueError(
                f"there is no module {module_name!r} on the import path; name a file instead: "
                "file.py:function"
            ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    objective = function()
    if not isinstance(objective, Objective):
        raise ValueError(
            f"{place} returned a {type(objective).__name__}; it must return a "
            "gossipdp_lab.simulate.Objective, for instance a ModuleObjective"
        )
    return objective


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    name = f"gossipdp_objective_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of their annotations there
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # other processes cannot import it
    return module


def _split(texts: Sequence[str]) -> list[str]:
    return [word.strip() for text in texts for word in text.split(",")]


def _words(option: str, text: str) -> list[str]:
    """The words between commas, each once."""
    words = _split([text])
    if not all(words):
        raise ValueError(f"{option} is {text!r}: write names with commas between them")
    if len(set(words)) < len(words):
        raise ValueError(f"{option} is {text!r}: each may stand there once")
    return words


def _number(option: str, text: str, *, is_positive: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{option} is {text!r}; it must be a number") from None
    return check_number(option, value, is_positive=is_positive)


def parse_seeds(text: str) -> list[int]:
    """The seeds of a list, or as many from 0 as a single number says.

    >>> parse_seeds("4,7"), parse_seeds("3"), parse_seeds("5,")
    ([4, 7], [0, 1, 2], [5])
    """
    words = text.split(",")
    numbers = [word.strip() for word in (words[:-1] if words[-1].strip() == "" else words)]
    if not numbers or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--seeds is {text!r}; write a list such as 0,1,2, or how many, such as 3")
    seeds = [int(number) for number in numbers]
    if len(words) == 1:
        seeds = list(range(seeds[0]))
    if not seeds:
        raise ValueError(f"--seeds is {text!r}: at least one run is needed")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds is {text!r}: each seed may stand there once")
    return seeds
