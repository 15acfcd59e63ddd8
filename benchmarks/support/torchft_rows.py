"""Rows of PyPI's torchft: each worker is a replica group of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from support.rows import OneOptimizer, RowPlan
from torch import Tensor, nn

TIMEOUT_S = 120.0


class TorchftRow(OneOptimizer):
    """A worker with torchft's manager.

    TORCHFT_LIGHTHOUSE names the lighthouse; replicas may come and go. What the manager says over
    HTTP is counted with the rest. Time-outs are torchft's own variables, TORCHFT_TIMEOUT_SEC and
    TORCHFT_QUORUM_TIMEOUT_SEC.
    """

    asks_ahead: ClassVar[bool] = False
    """True if the manager may look for the others while the forward pass goes on."""

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        from torchft import Manager, ProcessGroupGloo

        patience = timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(plan.host, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(
                timeout=timedelta(seconds=float(os.environ["TORCHFT_TIMEOUT_SEC"]))
            ),
            min_replica_size=1,
            use_async_quorum=self.asks_ahead,
            load_state_dict=self.load,
            state_dict=self.state,
            replica_id=f"worker{plan.rank}",
            store_addr=plan.host,
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
            hostname=plan.host,
            timeout=patience,
            quorum_timeout=patience,
            init_sync=False,  # all begin with the same parameters
        )

    def account(self) -> dict[str, float]:
        return {"exchanges": self.manager.current_step()}

    def num_batches(self) -> int:
        return int(self.manager.batches_committed()) * self.plan.period

    def state(self) -> dict[str, Any]:
        return super().state() | {"manager": self.manager.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.manager.load_state_dict(state["manager"])

    def finish(self) -> None:
        raise AssertionError("the race ends by the clock")


class TorchftLocalSgd(TorchftRow):
    """LocalSGD of torchft."""

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        from torchft.local_sgd import LocalSGD

        self._averages = LocalSGD(self.manager, net, self.optimizer, sync_every=plan.period)
        self._averages.__enter__()


class TorchftDDP(TorchftRow):
    """DistributedDataParallel of torchft, with its wrapper of the optimizer, and its hook repaired.

    As released (0.2.0), the hook asserts what does not hold if a peer's death breaks an all-reduce
    of gloo: all survivors die of it. The manager has noted the error by then, and skips the step.
    """

    asks_ahead = True

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        from torchft import DistributedDataParallel, Optimizer

        def hook(manager: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            manager.allreduce(bucket.buffer()).wait()
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        # DDP reads the annotations of a hook.
        hook.__annotations__ |= {
            "bucket": dist.GradBucket,
            "return": torch.futures.Future[Tensor],
        }

        class Repaired(DistributedDataParallel):  # type: ignore[misc]  # of an untyped package
            _comm_hook = staticmethod(hook)

        self.model = Repaired(self.manager, net)
        self._commits = Optimizer(self.manager, self.optimizer)
        self._commits.zero_grad()

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self._commits.step()
        self.steps += 1
        self._commits.zero_grad()  # the next quorum, ahead of the next forward pass
