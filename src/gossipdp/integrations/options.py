"""What a framework's own loop may ask of ``GossipDataParallel``, and when."""

from collections.abc import Mapping
from typing import Any


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
