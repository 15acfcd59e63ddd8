"""From the arguments of ``gossipdp simulate`` to what is simulated."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gossipdp.cli.option_checks import check_number
from gossipdp.cli.simulate_tasks import make_objective, make_optimizer
from gossipdp.graph.network_plan import LATENCY_S, check_step_spread
from gossipdp.protocol.neighbours import NEIGHBOUR_POLICIES
from gossipdp.simulate.scenario import (
    ComputeTime,
    ConstantTime,
    Link,
    LinkModel,
    LognormalTime,
    MeasuredTime,
    Scenario,
    SlowedTime,
)
from gossipdp.simulate.study import (
    METHODS,
    SYNCHRONOUS,
    Ensemble,
    Job,
    affordable_steps,
    steps_to_agree,
)
from gossipdp.simulate.trace import TAIL_LOWEST, Trace

if TYPE_CHECKING:
    from gossipdp.cli.simulate import NetworkOptions, SimulateArguments

DEFAULT_STEPS = 100.0
DEFAULT_STEP_MS, DEFAULT_LATENCY_MS = 100.0, 1e3 * LATENCY_S
NUM_RECORDS, NUM_CONSENSUS_RECORDS = 100, 300
TIMELINE_STEPS = 24.0
"""Length of the runs whose timeline is drawn: their last part is shown, once all exchange."""


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
    def is_consensus(self) -> bool:
        """Whether no gradients are taken."""
        return not self.cases[0].scenario.objective.has_gradients

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
                ensembles.append(
                    Ensemble(label, traces[begin : begin + len(self.seeds)], case=number)
                )
        return ensembles

    def timeline_jobs(self) -> list[Job]:
        """Short runs of the first case and seed, one a method, that keep what workers do."""
        case = self.cases[0]
        scenarios = (
            replace(
                case.scenario,
                num_steps=min(TIMELINE_STEPS, case.num_steps[method]),
                num_records=1,
                stop_below=0.0,
                keep_timeline=True,
            )
            for method in self.methods
        )
        return [
            Job(scenario, method) for scenario, method in zip(scenarios, self.methods, strict=True)
        ]

    def title(self) -> str:
        """What is simulated, in a line."""
        arguments, scenario = self.arguments, self.cases[0].scenario
        parts = [scenario.objective.name]
        if arguments.graph.count(",") == 0:
            parts.append(f"{arguments.graph} of {arguments.workers} workers")
        else:
            parts.append(f"{arguments.workers} workers")
        if "," not in arguments.comm_rate:
            parts.append(f"comm rate {scenario.comm_rate:g}")
        parts.append(f"fidelity {scenario.fidelity}")
        parts.append(f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"seed {self.seeds[0]}")
        return ", ".join(parts)

    def timeline_title(self) -> str:
        """The title of the timeline."""
        case = self.cases[0]
        text = (
            f"{case.scenario.graph} of {case.scenario.num_workers} workers, comm rate "
            f"{case.scenario.comm_rate:g}, fidelity {case.scenario.fidelity}"
        )
        return text

    def opening(self) -> list[str]:
        """What is about to be simulated, and how long."""
        lines = [self.title()]
        if self.arguments.steps is not None or not self.is_consensus:
            return [f"{lines[0]}, {self.cases[0].num_steps[self.methods[0]]:g} steps"]
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
        lines.append(
            f"a run ends once the consensus distance is below {TAIL_LOWEST:g} of its first value"
        )
        return lines


def make_study(arguments: SimulateArguments) -> Study:
    """What the arguments ask for.

    Raises:
        ValueError: they cannot be meant.
        OSError: a file cannot be read.
    """
    methods = _words("--methods", arguments.methods)
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"there is no method {method!r}; choose among {', '.join(METHODS)}")
    graphs = _words("--graph", arguments.graph)
    rates = [
        _number("--comm-rate", word, is_positive=True)
        for word in _words("--comm-rate", arguments.comm_rate)
    ]
    if len(set(rates)) < len(rates):
        raise ValueError(f"--comm-rate is {arguments.comm_rate!r}: each may stand there once")
    seeds = parse_seeds(arguments.seeds)
    if arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; it must be at least 1")
    if arguments.steps is not None and not (math.isfinite(arguments.steps) and arguments.steps > 0):
        raise ValueError(f"--steps is {arguments.steps}; it must be a positive number")
    if arguments.processes is not None and arguments.processes < 1:
        raise ValueError(f"--processes is {arguments.processes}; it must be at least 1")

    objective = make_objective(arguments)
    base = Scenario(
        graph=graphs[0],
        num_workers=arguments.workers,
        objective=objective,
        optimizer=make_optimizer(arguments),
        comm_rate=rates[0],
        fidelity=arguments.fidelity,
        neighbour_policy=_neighbour_policy(arguments.network),
        compute_time=_compute_time(arguments),
        links=_links(arguments.network, arguments.workers),
        model_bytes=_model_bytes(arguments.network),
        num_steps=arguments.steps or DEFAULT_STEPS,
        seed=seeds[0],
        graph_seed=arguments.graph_seed,
        num_records=NUM_RECORDS,
        eta_factor=arguments.eta_factor,
        alpha_tilde_factor=arguments.alpha_tilde_factor,
        learning_rate_decay=arguments.task.learning_rate_decay,
    )
    _check_network_plays_a_part(arguments, methods)
    _check_slow_workers_play_a_part(arguments, methods, objective.has_gradients)
    cases = []
    for graph in graphs:
        for rate in rates:
            scenario = replace(base, graph=graph, comm_rate=rate)
            _check_links(scenario)
            name = " ".join(
                [graph] * (len(graphs) > 1) + ["{method}"] + [f"r={rate:g}"] * (len(rates) > 1)
            )
            if len(graphs) == len(rates) == 1:
                name = ""
            cases.append(_case(arguments, name, scenario, methods))
    return Study(arguments, cases, methods, seeds)


def _case(
    arguments: SimulateArguments, name: str, scenario: Scenario, methods: Sequence[str]
) -> Case:
    """The case, with lengths where the user gave none."""
    if not scenario.objective.has_gradients:
        scenario = replace(scenario, num_records=NUM_CONSENSUS_RECORDS)
    if arguments.steps is not None or scenario.objective.has_gradients:
        scenario.make_constants()  # raises for a graph or a rate that cannot be
        return Case(name, scenario, dict.fromkeys(methods, scenario.num_steps), {})
    scenario = replace(scenario, stop_below=TAIL_LOWEST)
    dimension = scenario.objective.begin(1, 0).start.shape[1]
    needed = {method: steps_to_agree(scenario, method) for method in methods}
    most = {
        method: affordable_steps(scenario, method, values_per_worker=dimension)
        for method in methods
    }
    num_steps = {method: min(needed[method], most[method]) for method in methods}
    cut = {method: needed[method] for method in methods if num_steps[method] < needed[method]}
    return Case(name, scenario, num_steps, cut)


# Compute times.


def _compute_time(arguments: SimulateArguments) -> ComputeTime:
    options = arguments.compute
    time: ComputeTime
    if options.step_times is not None:
        if options.step_ms is not None or options.step_spread is not None:
            raise ValueError(
                "--step-times says all about step times: leave out --step-ms and --step-spread"
            )
        try:
            time = MeasuredTime(read_step_times(options.step_times))
        except OSError as error:
            raise ValueError(
                f"--step-times {options.step_times} cannot be read: {error.strerror}; name a file "
                "with one time in seconds a line"
            ) from None
        except UnicodeDecodeError:
            raise ValueError(
                f"--step-times {options.step_times} is not UTF-8 text: write one time in seconds a "
                "line"
            ) from None
    else:
        step_ms = DEFAULT_STEP_MS if options.step_ms is None else options.step_ms
        step_s = check_number("--step-ms", step_ms, is_positive=True) / 1e3
        spread = options.step_spread or 0.0
        check_step_spread("--step-spread", spread)
        time = LognormalTime(step_s, spread) if spread else ConstantTime(step_s)
    factors = parse_slow_workers(options.slow_worker, arguments.workers)
    return SlowedTime(time, factors) if factors else time


def read_step_times(path: Path) -> tuple[float, ...]:
    """The numbers of a file, one a line; what follows a '#' is a comment.

    Raises:
        ValueError: a line is no positive number, or there is none, or it is not UTF-8 text.
        OSError: the file cannot be read.
    """
    times_s = []
    for number, line in enumerate(path.read_text("utf-8-sig").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if text:
            times_s.append(_number(f"{path}, line {number}", text, is_positive=True))
    if not times_s:
        raise ValueError(f"--step-times {path}: there is no time in it; write one a line")
    return tuple(times_s)


def parse_slow_workers(texts: Sequence[str], num_workers: int) -> dict[int, float]:
    """Factors by rank.

    >>> parse_slow_workers(("2:4", "0:1.5,1:2"), num_workers=4)
    {2: 4.0, 0: 1.5, 1: 2.0}
    """
    factors: dict[int, float] = {}
    for text in _split(texts):
        match = re.fullmatch(r"(\d+):(.+)", text)
        if match is None:
            raise ValueError(f"--slow-worker is {text!r}; write RANK:FACTOR, such as 2:4")
        rank = int(match[1])
        if rank >= num_workers:
            raise ValueError(
                f"--slow-worker {text}: there is no rank {rank} among {num_workers} workers; "
                f"choose 0 to {num_workers - 1}"
            )
        if rank in factors:
            raise ValueError(f"--slow-worker {text}: rank {rank} is given twice")
        factors[rank] = _number(f"the factor of --slow-worker {text}", match[2], is_positive=True)
    return factors


# The network.


def _links(options: NetworkOptions, num_workers: int) -> LinkModel:
    latency_ms = DEFAULT_LATENCY_MS if options.latency_ms is None else options.latency_ms
    every = Link(
        latency_s=check_number("--latency-ms", latency_ms) / 1e3,
        bytes_per_s=math.inf
        if options.link_mbps is None
        else _bytes_per_s(check_number("--link-mbps", options.link_mbps, is_positive=True)),
    )
    return LinkModel(
        every,
        parse_slow_links(options.slow_link, every, num_workers),
        jitter=check_number("--jitter", options.jitter or 0.0),
    )


def parse_slow_links(
    texts: Sequence[str], every: Link, num_workers: int
) -> dict[tuple[int, int], Link]:
    """Links by their two ranks; without a latency of its own a link has that of every other.

    >>> parse_slow_links(("1-0:8",), Link(latency_s=0.001), num_workers=4)
    {(0, 1): Link(latency_s=0.001, bytes_per_s=1000000.0)}
    """
    links: dict[tuple[int, int], Link] = {}
    for text in _split(texts):
        match = re.fullmatch(r"(\d+)-(\d+):([^:]+)(?::([^:]+))?", text)
        if match is None:
            raise ValueError(
                f"--slow-link is {text!r}; write I-J:MBPS or I-J:MBPS:MS, such as 0-1:10:50"
            )
        i, j = sorted((int(match[1]), int(match[2])))
        if j >= num_workers or i == j:
            raise ValueError(
                f"--slow-link {text}: ranks {i} and {j} have no link; name two of the ranks 0 to "
                f"{num_workers - 1}"
            )
        if (i, j) in links:
            raise ValueError(f"--slow-link {text}: the link of {i} and {j} is given twice")
        speed = _number(f"the speed of --slow-link {text}", match[3], is_positive=True)
        latency_s = every.latency_s
        if match[4] is not None:
            latency_s = _number(f"the latency of --slow-link {text}", match[4]) / 1e3
        links[i, j] = Link(latency_s, _bytes_per_s(speed))
    return links


def _bytes_per_s(megabits_per_s: float) -> float:
    return megabits_per_s * 1e6 / 8


def _model_bytes(options: NetworkOptions) -> float | None:
    if options.model_mb is None:
        return None
    return check_number("--model-mb", options.model_mb, is_positive=True) * 1e6


def _neighbour_policy(options: NetworkOptions) -> str:
    policy = options.neighbour_policy or "fresh"
    if policy not in NEIGHBOUR_POLICIES:
        raise ValueError(
            f"there is no neighbour policy {policy!r}; choose one of "
            f"{', '.join(NEIGHBOUR_POLICIES)}"
        )
    return policy


def _check_links(scenario: Scenario) -> None:
    """Raise for a slow link that nobody uses: neither the graph nor the ring of all-reduce."""
    graph, num_workers = scenario.make_graph(), scenario.num_workers
    for i, j in scenario.links.overrides:
        if not graph.has_edge(i, j) and (j - i) not in (1, num_workers - 1):
            raise ValueError(
                f"--slow-link {i}-{j}: {scenario.graph} has no edge between these two workers"
            )


def _check_network_plays_a_part(arguments: SimulateArguments, methods: Sequence[str]) -> None:
    if arguments.fidelity == "links":
        return
    is_synchronous = any(method in SYNCHRONOUS for method in methods)
    options = arguments.network
    for option, value in (
        ("--neighbour-policy", options.neighbour_policy),
        *(
            ()
            if is_synchronous
            else (
                ("--latency-ms", options.latency_ms),
                ("--link-mbps", options.link_mbps),
                ("--jitter", options.jitter),
                ("--slow-link", options.slow_link or None),
                ("--model-mb", options.model_mb),
            )
        ),
    ):
        if value is not None:
            raise ValueError(
                f"{option} plays no part here: at fidelity ideal exchanges take no time; "
                "pass --fidelity links"
            )


def _check_slow_workers_play_a_part(
    arguments: SimulateArguments, methods: Sequence[str], has_gradients: bool
) -> None:
    if arguments.fidelity == "links" or has_gradients or arguments.timeline:
        return
    if any(method in SYNCHRONOUS for method in methods):
        return
    for option, value in (
        ("--slow-worker", arguments.compute.slow_worker or None),
        ("--step-spread", arguments.compute.step_spread),
    ):
        if value is not None:
            raise ValueError(
                f"{option} plays no part here: without gradients, and at fidelity ideal, edges "
                "fire whatever the workers do; pass --fidelity links, or another --workload"
            )


# Words and numbers.


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
