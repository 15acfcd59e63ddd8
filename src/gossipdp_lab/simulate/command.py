"""``gossipdp simulate``: what a run would do, on a virtual clock."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import UseAppendAction

FILE_WIDTH = 140
"""Of the table where it does not go to a terminal, so that its cells stay whole."""


@dataclass(frozen=True)
class SimulateArguments:
    """Simulate runs on a virtual clock, to choose a graph, a comm rate and a method."""

    graph: str = "ring"
    """ring, path, star, complete, exponential, hypercube, torus, random-regular or erdos-renyi;
    several with commas."""

    workers: int = 16
    """Number of workers."""

    methods: str = "a2cid2,gossip"
    """Methods, with commas between them. Asynchronous: a2cid2, gossip, none, released. Synchronous:
    allreduce, dpsgd, diloco."""

    workload: str = "consensus"
    """consensus (random vectors that only agree), quadratic, digits, digits-convolutional, or
    module:function for a torch module of your own."""

    comm_rate: str = "1"
    """Exchanges per worker per gradient step; several with commas."""

    fidelity: Literal["ideal", "links"] = "ideal"
    """ideal: exchanges happen at random, as in the paper, and take no time. links: the real
    protocol; messages and exchanges take time."""

    steps: float | None = None
    """Length of the run, in gradient steps of an ordinary worker. The default is 100; for consensus
    it is as long as the workers need to agree."""

    seeds: str = "3"
    """How many runs of each kind, or a list of their seeds such as 0,1,2."""

    graph_seed: int = 0
    """Seed of the random graphs."""

    eta_factor: float = 1.0
    """Multiplies the mixing speed eta of a2cid2."""

    alpha_tilde_factor: float = 1.0
    """Multiplies alpha_tilde - 1/2 of a2cid2."""

    step_ms: float | None = None
    """Mean duration of a gradient step, in milliseconds; by default 100."""

    step_spread: float | None = None
    """How much step times vary: the standard deviation of their logarithm. With 0.1
    a step takes 10% more or less; by default all take equally long."""

    step_times: Path | None = None
    """Draw step times from this file instead. It has one time in seconds a line; '#' begins a
    comment."""

    slow_worker: UseAppendAction[tuple[str, ...]] = ()
    """Make a worker slower: RANK:FACTOR. 2:4 makes worker 2 four times slower. Separate several
    with commas, or repeat the option."""

    latency_ms: float | None = None
    """How long a message travels, in milliseconds; by default 0.5."""

    link_mbps: float | None = None
    """Speed of every link in each direction, in Mbit/s; by default unlimited."""

    jitter: float | None = None
    """How much transfer times vary: the standard deviation of their logarithm; by default 0."""

    slow_link: UseAppendAction[tuple[str, ...]] = ()
    """Give one link its own speed, and if you like its own latency: I-J:MBPS or I-J:MBPS:MS.
    0-1:10:50 gives the link between workers 0 and 1 10 Mbit/s and 50 milliseconds. Separate
    several with commas, or repeat the option."""

    model_mb: float | None = None
    """Megabytes that a worker sends in an exchange; by default the size of its parameters."""

    neighbour_policy: str | None = None
    """How a worker chooses whom to ask: fresh (the default), poisson, available or scheduled."""

    optimizer: Literal["sgd", "adamw"] | None = None
    """sgd or adamw."""

    learning_rate: float | None = None
    """The optimizer's learning rate."""

    momentum: float | None = None
    """The momentum of sgd."""

    weight_decay: float | None = None
    """The weight decay of sgd or adamw."""

    learning_rate_decay: bool = False
    """Let the learning rate rise at first, then fall as half a cosine until the end of the run."""

    outer_momentum: float | None = None
    """Momentum of the outer step. With a2cid2 and gossip there is one if this or --outer-lr is
    given; the other is then 0.5 or 1. diloco always has one, by default as in its paper."""

    outer_lr: float | None = None
    """Learning rate of the outer step."""

    sync_every: int | None = None
    """diloco: gradient steps from one average to the next; by default 16."""

    exchange_moments: UseAppendAction[tuple[str, ...]] = ()
    """a2cid2, gossip, diloco: also average tensors of the optimizer: NAME:PERIOD. exp_avg_sq:16
    averages AdamW's second moment at every 16th exchange that a worker asks for. Separate several
    with commas, or repeat the option."""

    dimension: int | None = None
    """Length of a worker's vector, for consensus and quadratic; by default 64."""

    noise: float | None = None
    """quadratic: variance of the noise of a gradient, sigma^2, over all coordinates; default 1."""

    heterogeneity: float | None = None
    """quadratic: mean squared gradient of the workers at the common optimum, zeta^2; default 0."""

    curvature: str | None = None
    """quadratic: its eigenvalues, LEAST:LARGEST; by default 1:1. With 0:0 only noise and drift are
    left."""

    batch_size: int | None = None
    """digits: samples per gradient step of one worker."""

    disjoint: bool = False
    """digits: no two workers see the same training data."""

    dirichlet: float | None = None
    """digits: draw each worker's shares of the classes from a Dirichlet distribution with this
    parameter. With 0.1 most workers see few classes; with 100 all see about the same."""

    json: Path | None = None
    """Also write the results to this file."""

    figure: Path | None = None
    """Where to draw loss and consensus distance, a PNG; by default under runs/."""

    timeline: bool = False
    """Also draw what each worker does over time, beside --figure, as *-timeline.png."""

    processes: int | None = None
    """How many runs at once. By default one on each core, if that is quicker than one after the
    other."""


def run(arguments: SimulateArguments) -> int:
    """Simulate, show the results and write the files; returns the exit status.

    Raises ValueError for bad input, before anything is simulated or written.
    """
    from gossipdp_lab.simulate.command_study import make_study

    study = make_study(arguments)
    figure = _figure_of(arguments)

    from rich.console import Console

    from gossipdp_lab.progress import ProgressView
    from gossipdp_lab.simulate.command_results import as_json, notes, table
    from gossipdp_lab.simulate.figures import draw_simulation, draw_timeline
    from gossipdp_lab.simulate.study import simulate_all

    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)

    def say(*lines: str) -> None:
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(*study.opening())
    jobs = study.jobs()
    timeline_jobs = study.timeline_jobs() if arguments.timeline else []
    with ProgressView("simulating", console=console) as view:
        traces = simulate_all(
            [*jobs, *timeline_jobs], processes=arguments.processes, on_progress=view.advance
        )
    ensembles = study.ensembles(traces[: len(jobs)])
    console.print(table(study, ensembles))
    say(*notes(study, ensembles))
    if arguments.json is not None:
        text = json.dumps(as_json(study, ensembles), indent=1, allow_nan=False)
        arguments.json.write_text(text + "\n", "utf-8")
        say(f"results: {arguments.json}")
    figure.parent.mkdir(parents=True, exist_ok=True)
    draw_simulation(ensembles, figure, title=study.title())
    say(f"figure: {figure}")
    if arguments.timeline:
        path = figure.with_name(f"{figure.stem}-timeline{figure.suffix}")
        draw_timeline(traces[len(jobs) :], path, title=study.timeline_title())
        say(f"timeline: {path}")
    return 0


def _figure_of(arguments: SimulateArguments) -> Path:
    """The figure; raises ValueError where it cannot be written, and makes nothing."""
    parts = [arguments.workload, arguments.graph, str(arguments.workers)]
    name = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in parts)
    figure = arguments.figure or Path("runs", f"simulate-{name}", "figure.png")
    if figure.suffix != ".png":
        raise ValueError(f"--figure {figure}: it is a PNG; let its name end in .png")
    there = next(parent for parent in figure.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{figure} cannot be written under {there}: pass --figure PATH")
    return figure
