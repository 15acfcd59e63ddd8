"""How a run was set up, in words and numbers: for its log. No secret is among them."""

import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gossipdp
from gossipdp.graph.topology import build_graph, graph_name
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.options import GossipOptions

MAX_EDGES = 5000
"""Beyond them the graph is named but not listed."""
OPTIONS = (
    "method",
    "comm_rate",
    "neighbour_policy",
    "pace",
    "max_lag",
    "seed",
    "wire_format",
    "shared_memory",
    "max_bytes_per_s",
    "on_poison",
    "timeout_s",
    "checkpoint_every",
)
HYPERPARAMETERS = ("lr", "momentum", "betas", "weight_decay")


def describe(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    options: GossipOptions,
    engine: Engine,
    budget_samples: int | None,
) -> dict[str, Any]:
    """The configuration of one worker, for its log; plain values that JSON can hold.

    ``edges`` holds the graph's pairs of ranks, so that a reader needs no name to know the graph.
    """
    graph = build_graph(options.graph, engine.num_workers, seed=options.seed)
    parameters = list(module.parameters())
    described: dict[str, Any] = {
        "graph": graph_name(graph),
        "workers": engine.num_workers,
        "budget_samples": budget_samples,
        **{name: getattr(options, name) for name in OPTIONS},
        "parameters": sum(parameter.numel() for parameter in parameters),
        "precision": ", ".join(sorted({_short(parameter.dtype) for parameter in parameters})),
        "device": ", ".join(sorted({parameter.device.type for parameter in parameters})),
        "optimizer": "; ".join(_optimizer(optimizer) for optimizer in optimizers),
        "script": Path(sys.argv[0]).name,
        "host": platform.node(),
        "versions": (
            f"gossipdp {gossipdp.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}"
        ),
    }
    if graph.number_of_edges() <= MAX_EDGES:
        described["edges"] = sorted(sorted(edge) for edge in graph.edges)
    return {name: value for name, value in described.items() if value not in (None, "")}


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Its kind and the numbers of its first group."""
    group = optimizer.param_groups[0]
    numbers = [f"{name}={_number(group[name])}" for name in HYPERPARAMETERS if group.get(name)]
    return f"{type(optimizer).__name__}({', '.join(numbers)})"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
