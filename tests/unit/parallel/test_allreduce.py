"""What the synchronous baseline makes of gradients, with a network of the test's own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossipdp.parallel import allreduce_engine
from gossipdp.parallel.allreduce_engine import AllReduceEngine


class Bucket:
    """Some gradients, as DistributedDataParallel hands them over."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self.gradients = gradients

    def buffer(self) -> torch.Tensor:
        return self.gradients

    def is_last(self) -> bool:
        return True


def test_gradients_are_averaged_over_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others = torch.tensor([1.0, -2.0, 6.0]), torch.tensor([[3.0, 2.0, 0.0], [5.0, 3.0, 3.0]])

    def all_reduce(values: torch.Tensor, *, async_op: bool) -> Any:
        values += others.sum(dim=0) / 3  # the others do as this one
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([values])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(allreduce_engine, "dist", SimpleNamespace(all_reduce=all_reduce))
    engine = AllReduceEngine.__new__(AllReduceEngine)
    engine.world_size, engine._bytes, engine._waited_s = 3, 0, 0.0
    mean = torch.cat([mine[None], others]).double().mean(dim=0)
    averaged = engine._average_bucket(None, Bucket(mine)).wait()  # type: ignore[arg-type]
    torch.testing.assert_close(averaged.double(), mean)
    assert engine._bytes == 12
