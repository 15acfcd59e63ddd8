"""What a framework's own loop may ask of ``GossipDataParallel``, and when."""

from collections.abc import Mapping
from typing import Any

from gossipdp.parallel.module import GossipDataParallel
from gossipdp.runtime.environment import Environment


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse ``method="allreduce"``, at once and not only when training begins.

    Raises:
        ValueError: it is asked for.
    """
    if options.get("method") == "allreduce":
        raise ValueError(
            "method='allreduce' averages gradients within the wrapper's forward pass, and a "
            "framework calls the model itself: use the framework's own DistributedDataParallel"
        )


def known_num_workers(model: GossipDataParallel | None) -> int:
    """Workers in the run; without a model as far as the launcher says, which is at least this."""
    return max(1, Environment.read().num_workers) if model is None else model.num_workers
