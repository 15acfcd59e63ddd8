"""From the options of ``gossipdp simulate``, or a file of scenarios, to the runs of a study."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cloudpickle

from gossipdp.rules import positive_number, shown_rate
from gossipdp_lab.simulate.module_objective import digits_objective
from gossipdp_lab.simulate.objectives import Consensus, Objective, Quadratic
from gossipdp_lab.simulate.optimizers import Sgd
from gossipdp_lab.simulate.options import SimulateArguments
from gossipdp_lab.simulate.scenario import (
    ComputeTime,
    ConstantTime,
    Link,
    LinkModel,
    LognormalTime,
    Scenario,
    SlowedTime,
    step_spread,
)
from gossipdp_lab.simulate.study import (
    SYNCHRONOUS,
    Ensemble,
    Job,
    affordable_steps,
    check_method,
    steps_to_agree,
)
from gossipdp_lab.simulate.trace import TAIL_LOWEST, Trace

DEFAULT_STEPS = 100.0
NUM_RECORDS, NUM_CONSENSUS_RECORDS = 100, 300
TIMELINE_STEPS = 24.0
"""Length of the runs whose timeline is drawn: their last part is shown, once all exchange."""

DIGITS_SGD = Sgd(learning_rate=0.05, momentum=0.9, weight_decay=5e-4)
"""As the demo trains it."""

LINK_OPTIONS = ("latency_ms", "link_mbps", "model_mb")
OUTPUT_OPTIONS = ("json", "figure", "timeline", "processes")
FILE_OPTIONS = ("file", "methods", "seeds", *OUTPUT_OPTIONS)
"""Options that a file of scenarios leaves open."""


@dataclass(frozen=True)
class Case:
    """Scenarios that differ by method and seed alone.

    Attributes:
        name: tells it from the other cases; empty if it is the only one.
        scenario: with the first seed.
        num_steps: how long each method runs.
        needed: the steps that theory says it takes to agree, if that would take too long.
    """

    name: str
    scenario: Scenario
    num_steps: dict[str, float]
    needed: dict[str, float] = dataclasses.field(default_factory=dict)

    def label(self, method: str) -> str:
        """Name one method's runs of this case."""
        return f"{self.name} {method}".strip()


@dataclass(frozen=True)
class Study:
    """Everything that one call simulates."""

    arguments: SimulateArguments
    cases: list[Case]
    methods: list[str]
    seeds: list[int]

    @property
    def objective(self) -> Objective:
        """The objective of the first case; those of the others have the same kind of results."""
        return self.cases[0].scenario.objective

    def jobs(self) -> list[Job]:
        """Return every case, method and seed, in this order."""
        return [
            Job(replace(case.scenario, num_steps=case.num_steps[method], seed=seed), method)
            for case in self.cases
            for method in self.methods
            for seed in self.seeds
        ]

    def ensembles(self, traces: Sequence[Trace]) -> list[Ensemble]:
        """Group the traces of :meth:`jobs`: one ensemble for each case and method."""
        ensembles: list[Ensemble] = []
        for number, case in enumerate(self.cases):
            for method in self.methods:
                begin = len(ensembles) * len(self.seeds)
                own = traces[begin : begin + len(self.seeds)]
                ensembles.append(Ensemble(case.label(method), own, number))
        return ensembles

    def timeline_jobs(self) -> list[Job]:
        """Return short runs of the first case and seed, one a method, with their timelines."""
        case = self.cases[0]
        short = replace(case.scenario, num_records=1, stop_below=0.0, keep_timeline=True)
        return [
            Job(replace(short, num_steps=min(TIMELINE_STEPS, case.num_steps[method])), method)
            for method in self.methods
        ]

    def title(self) -> str:
        """Describe the simulations in a line."""
        arguments, scenario = self.arguments, self.cases[0].scenario
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"seed {self.seeds[0]}"
        if arguments.file is not None:
            return f"scenarios of {arguments.file.name}, {seeds}"
        workers = f"{arguments.workers} workers"
        has_one_graph = arguments.graph.count(",") == 0
        parts = [
            self.objective.name,
            f"{arguments.graph} of {workers}" if has_one_graph else workers,
            *(
                []
                if "," in arguments.comm_rate
                else [f"comm rate {shown_rate(scenario.comm_rate)}"]
            ),
            f"fidelity {scenario.fidelity}",
            seeds,
        ]
        return ", ".join(parts)

    def timeline_title(self) -> str:
        """Describe the timeline in a line."""
        scenario, slow = self.cases[0].scenario, ""
        if isinstance(scenario.compute_time, SlowedTime):
            for rank, factor in scenario.compute_time.factors.items():
                slow += f"; worker {rank} takes {factor:g} times as long"
        return (
            f"{scenario.graph} of {scenario.num_workers} workers, comm rate "
            f"{shown_rate(scenario.comm_rate)}{slow}"
        )

    def opening(self) -> list[str]:
        """Describe the simulations that are about to begin, and their lengths."""
        if self.arguments.file is not None:
            return [self.title()]
        if self.arguments.steps is not None or self.objective.has_gradients:
            return [f"{self.title()}, {self.cases[0].num_steps[self.methods[0]]:g} steps"]
        lines = [self.title()]
        for case in self.cases:
            for method in self.methods:
                text = f"{case.label(method)}: {case.num_steps[method]:,.0f} steps at most"
                if method in case.needed:
                    text += (
                        f", since the {case.needed[method]:,.0f} of theory would take long; "
                        "--steps sets another length"
                    )
                lines.append(text)
        end = f"below {TAIL_LOWEST:g} of its first value"
        return [*lines, f"a run ends once the consensus distance is {end}"]


def make_study(arguments: SimulateArguments) -> Study:
    """Return the runs that the arguments ask for; raise ValueError for a mistake in them."""
    methods = _words("--methods", arguments.methods)
    seeds = parse_seeds(arguments.seeds)
    if arguments.file is not None:
        return Study(arguments, _cases_of_file(arguments, methods, seeds), methods, seeds)
    graphs = _words("--graph", arguments.graph)
    words = _words("--comm-rate", arguments.comm_rate)
    rates = [word if word == "auto" else positive_number("--comm-rate", word) for word in words]
    if len(set(rates)) < len(rates):
        raise ValueError(f"--comm-rate is {arguments.comm_rate!r}: each may stand there once")
    base = _base_scenario(arguments, seeds[0])
    for method in methods:
        check_method(base, method)
    _refuse_useless(arguments, methods, base.objective)
    cases = []
    for graph in graphs:
        for rate in rates:
            name = " ".join(
                [graph] * (len(graphs) > 1) + [f"r={shown_rate(rate)}"] * (len(rates) > 1)
            )
            scenario = replace(base, graph=graph, comm_rate=rate)
            cases.append(_case(arguments, name, scenario, methods))
    return Study(arguments, cases, methods, seeds)


def _base_scenario(arguments: SimulateArguments, seed: int) -> Scenario:
    """Return the scenario without its graph and comm rate."""
    objective: Objective
    match arguments.workload:
        case "consensus":
            objective = Consensus()
        case "quadratic":
            objective = Quadratic()
        case "digits":
            objective = digits_objective()
        case _:
            objective = digits_objective(network="convolutional")
    optimizer = DIGITS_SGD if arguments.workload.startswith("digits") else Sgd()
    if arguments.learning_rate is not None:
        optimizer = replace(optimizer, learning_rate=arguments.learning_rate)
    latency_s, speed, model_mb = arguments.latency_ms / 1e3, arguments.link_mbps, arguments.model_mb
    return Scenario(
        num_workers=arguments.workers,
        objective=objective,
        optimizer=optimizer,
        fidelity=arguments.fidelity,
        compute_time=_compute_time(arguments),
        links=LinkModel(Link(latency_s, math.inf if speed is None else speed * 1e6 / 8)),
        model_bytes=None if model_mb is None else model_mb * 1e6,
        num_steps=arguments.steps or DEFAULT_STEPS,
        seed=seed,
        num_records=NUM_RECORDS if objective.has_gradients else NUM_CONSENSUS_RECORDS,
    )


def _refuse_useless(
    arguments: SimulateArguments, methods: Sequence[str], objective: Objective
) -> None:
    """Raise ValueError for an option that was given and would have no effect."""
    is_synchronous = any(method in SYNCHRONOUS for method in methods)
    if not objective.has_gradients:
        why = f"in --workload {arguments.workload}: leave it out"
        _refuse(arguments, ("learning_rate",), why)
    if arguments.fidelity == "ideal" and not is_synchronous:
        why = "here: at fidelity ideal exchanges take no time; pass --fidelity links"
        _refuse(arguments, LINK_OPTIONS, why)
        if not (objective.has_gradients or arguments.timeline):
            why = (
                "here: without gradients, and at fidelity ideal, edges fire whatever the workers "
                "do; pass --fidelity links, or another --workload"
            )
            _refuse(arguments, ("slow_worker", "step_spread"), why)


def _refuse(arguments: SimulateArguments, names: Collection[str], why: str) -> None:
    """Raise ValueError if one of these options is not at its default."""
    for name in names:
        if getattr(arguments, name) != getattr(SimulateArguments, name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect {why}")


def _case(
    arguments: SimulateArguments, name: str, scenario: Scenario, methods: Sequence[str]
) -> Case:
    """Return the case, with lengths if the user gave none."""
    scenario.make_constants()  # raises for an impossible graph or rate
    if arguments.steps is not None or scenario.objective.has_gradients:
        return Case(name, scenario, dict.fromkeys(methods, scenario.num_steps))
    scenario = replace(scenario, stop_below=TAIL_LOWEST)
    values = scenario.objective.begin(1, 0).start.shape[1]
    needed = {method: steps_to_agree(scenario, method) for method in methods}
    num_steps = {
        method: min(steps, affordable_steps(scenario, method, values_per_worker=values))
        for method, steps in needed.items()
    }
    cut = {method: needed[method] for method in methods if num_steps[method] < needed[method]}
    return Case(name, scenario, num_steps, cut)


def _compute_time(arguments: SimulateArguments) -> ComputeTime:
    step_s, spread = arguments.step_ms / 1e3, step_spread("--step-spread", arguments.step_spread)
    base: ComputeTime = LognormalTime(step_s, spread) if spread else ConstantTime(step_s)
    factors: dict[int, float] = {}
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


def _cases_of_file(
    arguments: SimulateArguments, methods: Sequence[str], seeds: Sequence[int]
) -> list[Case]:
    """Return a case for each scenario of ``arguments.file``."""
    assert arguments.file is not None
    for field in dataclasses.fields(arguments):
        if field.name not in FILE_OPTIONS and getattr(arguments, field.name) != field.default:
            raise ValueError(
                f"--{field.name.replace('_', '-')} does not go with {arguments.file}: set it in "
                "the Scenario objects there"
            )
    scenarios = load_scenarios(arguments.file)
    for scenario in scenarios.values():
        scenario.make_constants()
        for method in methods:
            check_method(scenario, method)
    kinds = {
        (each.objective.has_gradients, each.objective.metric_name) for each in scenarios.values()
    }
    if len(kinds) > 1:
        raise ValueError(
            f"the objectives in {arguments.file} have results of different kinds, which one table "
            "cannot hold: write a file for each kind"
        )
    return [
        Case(
            name if len(scenarios) > 1 else "",
            replace(scenario, seed=seeds[0]),
            dict.fromkeys(methods, scenario.num_steps),
        )
        for name, scenario in scenarios.items()
    ]


def load_scenarios(path: Path) -> dict[str, Scenario]:
    """Run a Python file and return the mapping from names to scenarios that it defines.

    Raises:
        ValueError: there is no such file, or its ``scenarios`` is not such a mapping.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; name a Python file that defines scenarios")
    name = f"scenarios_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file: let its name end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of their annotations there
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)  # as for a script; other processes get it too
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs {error.name}, which is not installed") from error
    cloudpickle.register_pickle_by_value(module)  # other processes cannot import it
    scenarios = getattr(module, "scenarios", None)
    is_mapping = isinstance(scenarios, Mapping) and all(
        isinstance(key, str) and isinstance(value, Scenario) for key, value in scenarios.items()
    )
    if not is_mapping or not scenarios:
        raise ValueError(
            f"{path} must define scenarios, a mapping from names to Scenario objects, such as "
            'scenarios = {"ring": Scenario(graph="ring")}'
        )
    return dict(scenarios)


def _words(option: str, text: str) -> list[str]:
    """Return the words between commas; each may occur once."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError(f"{option} is {text!r}: write names with commas between them")
    if len(set(words)) < len(words):
        raise ValueError(f"{option} is {text!r}: each may stand there once")
    return words


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a list, or as many from 0 as a single number says.

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
