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
