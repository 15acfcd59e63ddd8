"""The options of ``gossipdp simulate``. Imports no torch, so that ``--help`` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from gossipdp.rules import DEFAULT_GRAPH, at_least_1, number, option, output_file, positive_number


@dataclass(frozen=True)
class SimulateArguments:
    """Simulate runs on a virtual clock, to choose a graph, a comm rate and a method."""

    file: tyro.conf.Positional[Path | None] = None
    """A Python file with a mapping named scenarios, from names to Scenario objects, instead of
    options; docs/simulator.md shows one."""

    graph: str = DEFAULT_GRAPH
    """ring, path, star, complete, exponential, hypercube, torus, random-regular or erdos-renyi;
    several with commas."""

    workers: int = option(16, at_least_1)
    """Number of workers."""

    methods: str = "a2cid2,gossip"
    """Methods, with commas between them. Asynchronous: a2cid2, gossip, none, released. Synchronous:
    allreduce, dpsgd, diloco."""

    workload: Literal["consensus", "quadratic", "digits", "digits-convolutional"] = "consensus"
    """consensus: random vectors that only agree; quadratic; digits: a small perceptron;
    digits-convolutional: the demo's network."""

    comm_rate: str = "1"
    """Exchanges per worker per gradient step; several with commas; auto with --fidelity links."""

    fidelity: Literal["ideal", "links"] = "ideal"
    """ideal: exchanges happen at random, as in the paper, and take no time; links: the real
    protocol, over links that take their time."""

    steps: float | None = option(None, positive_number)
    """Length in gradient steps of an ordinary worker; by default 100, for consensus as long as the
    workers need to agree."""

    seeds: str = "3"
    """Number of runs of each kind, or a list of their seeds such as 0,1,2."""

    learning_rate: float | None = None
    """Learning rate of SGD. The default is 0.1, for digits 0.05."""

    step_ms: float = option(100.0, positive_number)
    """Mean duration of a gradient step, in milliseconds."""

    step_spread: float = 0.0
    """Variation of step times, as the standard deviation of their logarithm: with 0.1 a step takes
    10% more or less."""

    slow_worker: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """RANK:FACTOR, such as 2:4: worker 2 is four times slower. Separate several with commas."""

    latency_ms: float = option(0.5, number)
    """Time that a message travels, in milliseconds."""

    link_mbps: float | None = option(None, positive_number)
    """Speed of every link in each direction, in Mbit/s; by default unlimited."""

    model_mb: float | None = option(None, positive_number)
    """Megabytes that a worker sends in an exchange; by default its parameters."""

    json: Path | None = option(None, output_file)
    """Also write the results to this file."""

    figure: Path | None = option(None, output_file)
    """Draw loss and consensus distance in this file, a PNG; by default one under runs/."""

    timeline: bool = False
    """Also draw what each worker does when, beside --figure, as *-timeline.png."""

    processes: int | None = option(None, at_least_1)
    """Number of runs at once; by default one on each core, if that is quicker."""
