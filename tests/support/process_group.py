"""torch.distributed begun and ended in the process of the tests."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from gossipdp_lab.baselines import leave


@contextlib.contextmanager
def process_group(backend: str, store: Any, world_size: int) -> Iterator[None]:
    """Be rank 0 of ``world_size`` processes; the group is kept, since a later test may fork."""
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
    try:
        yield
    finally:
        leave()
