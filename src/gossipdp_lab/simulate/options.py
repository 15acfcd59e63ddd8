"""The options of ``gossipdp simulate``. Imports no torch, so that ``--help`` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from gossipdp.rules import DEFAULT_GRAPH, at_least_1, number, option, output_file, positive_number


@dataclass(frozen=True)
class SimulateArguments:
    """Simulate runs on a virtual clock, to choose graph and method."""

    file: tyro.conf.Positional[Path | None] = None
    """A Python file with a mapping named scenarios, from names to Scenario objects, instead of
    options; docs/simulator.md shows one."""

    graph: str = DEFAULT_GRAPH
    """ring, path, star, complete, exponential, hypercube, torus, random-regular or erdos-renyi;
    several with commas."""

    workers: int = option(16, at_least_1)
    """Workers."""

    methods: str = "a2cid2,gossip"
    """a2cid2, gossip, none, released; or synchronous: allreduce, dpsgd, diloco."""

    workload: Literal["consensus", "quadratic", "digits", "digits-convolutional"] = "consensus"
    """consensus: random vectors, no gradients; quadratic; digits: a perceptron;
    digits-convolutional: the demo's network."""

    comm_rate: str = "1"
    """Exchanges per worker per gradient step; several with commas; auto with links."""

    fidelity: Literal["ideal", "links"] = "ideal"
    """ideal: random exchanges that take no time; links: the real protocol."""

    steps: float | None = option(None, positive_number)
    """Gradient steps of an ordinary worker; by default 100, for consensus until workers agree."""

    seeds: str = "3"
    """Runs of each kind, or a list of their seeds such as 0,1,2."""

    learning_rate: float | None = None
    """SGD's; by default 0.1, for digits 0.05."""

    step_ms: float = option(100.0, positive_number)
    """Mean duration of a gradient step."""

    step_spread: float = 0.0
    """Spread of step times: 0.1 is 10% more or less."""

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

    figure: Path | None = option(None, output_file)
    """PNG of loss and consensus distance; by default one under runs/."""

    timeline: bool = False
    """Also draw what each worker does when."""

    processes: int | None = option(None, at_least_1)
    """Runs at once; by default one a core, if that is quicker."""
