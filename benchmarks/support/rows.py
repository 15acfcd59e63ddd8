"""Ways to train together, each as its own documentation says to use it.

A row owns model, optimizer and what travels; the loop, the data, the clock and the schedule are the
benchmark's, the same for all its rows.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class RowPlan:
    """The arguments of a row.

    samples: of the run, all workers together.
    batch_sizes: samples of one step, by rank.
    periods: steps from one average of all workers to the next, by rank.
    make_optimizer: given parameters, the optimizer that is the same for every row.
    method, options: of GossipDataParallel.
    own_pace: a row that can lets a fast worker take more steps, instead of equally many.
    host: the address of this worker's machine.
    outer: rate and momentum of DiLoCo's outer step; None: those of the row.
    """

    rank: int
    samples: int
    seed: int
    batch_sizes: Sequence[int]
    periods: Sequence[int]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    method: str = "a2cid2"
    options: Mapping[str, Any] = field(default_factory=dict)
    own_pace: bool = False
    host: str = "127.0.0.1"
    outer: tuple[float, float] | None = None

    @property
    def batch_size(self) -> int:
        return self.batch_sizes[self.rank]

    @property
    def period(self) -> int:
        return self.periods[self.rank]

    @property
    def _turn(self) -> list[int]:
        """Steps in the least time in which all workers, by rank, take whole ones."""
        return [period // math.gcd(*self.periods) for period in self.periods]

    @property
    def _turn_samples(self) -> list[int]:
        return [size * steps for size, steps in zip(self.batch_sizes, self._turn, strict=True)]

    @property
    def share(self) -> float:
        """Part of all samples that is this worker's, where workers wait for one another."""
        return self._turn_samples[self.rank] / sum(self._turn_samples)

    @property
    def own_steps(self) -> int:
        """Steps of this worker in the whole run, where workers wait for one another."""
        return -(-self.samples // sum(self._turn_samples)) * self._turn[self.rank]


class Row(ABC):
    """One worker's part of one way to train together."""

    model: nn.Module
    holds_all: ClassVar[bool] = True
    """True if each worker holds the model of all; False if that is the workers' mean."""

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        self.net, self.plan = net, plan
        self.steps = 0

    def progress(self) -> float:
        """Return the done share of the run, 0 to 1; at 1 its samples are used up."""
        return self.steps / self.plan.own_steps

    @abstractmethod
    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""

    @abstractmethod
    def step(self, loss: Tensor) -> None:
        """Gradients, what this row does with them, and the optimizer's step."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the average of all workers in ``net``."""

    def account(self) -> dict[str, float]:
        """Return the count of this row: exchanges (or averages) of this worker."""
        return {}

    def num_batches(self) -> int:
        """Return the batches in the model that this worker holds, of all workers if it holds all.

        A model that is averaged every ``period`` steps counts when it has just been averaged.
        """
        return len(self.plan.periods) * (self.steps - self.steps % self.plan.period)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class OneOptimizer(Row):
    """A row whose steps are those of one torch optimizer."""

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        self.model = net
        self.optimizer = plan.make_optimizer(net.parameters())

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint: references, not copies."""
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


class Gossip(OneOptimizer):
    """GossipDataParallel: methods a2cid2, gossip, and none, which averages once, at the end."""

    holds_all = False

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        # Here, so that a process of another row starts without it.
        from gossipdp import Counting, Exchange, GossipDataParallel

        super().__init__(net, plan)
        options = dict(plan.options)
        pace = options.pop("pace", "free")
        self.model = self.gossip = GossipDataParallel(
            net,
            self.optimizer,
            method=plan.method,  # type: ignore[arg-type]
            budget_samples=plan.samples,
            counting=Counting(samples_per_step=plan.batch_size),
            seed=plan.seed,
            exchange=Exchange(pace=pace),
            **options,
        )

    def progress(self) -> float:
        # A budget of all workers together ends a little late, as steps are counted from afar.
        return self.gossip.progress() if self.plan.own_pace else super().progress()

    def account(self) -> dict[str, float]:
        stats = self.gossip.stats()
        return {"exchanges": stats.exchanges, "failed": stats.exchanges_failed}

    def num_batches(self) -> int:
        return self.steps

    def finish(self) -> None:
        self.gossip.consolidate()


class DistributedDataParallel(OneOptimizer):
    """torch's own, over gloo, with its defaults."""

    model: nn.parallel.DistributedDataParallel

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        dist.init_process_group("gloo")
        # All begin alike; a broadcast would also send what is frozen.
        self.model = nn.parallel.DistributedDataParallel(net, init_sync=False)

    def account(self) -> dict[str, float]:
        return {"exchanges": self.steps}

    def finish(self) -> None:
        """All hold the same already."""

    def close(self) -> None:
        # Here, so that a process starts without it.
        from gossipdp_lab.baselines import leave

        leave()


class DecentDP(Row):
    """PyPI's decent-dp: each step averages with one neighbour of a ring, overlapped with the next.

    Its optimizers, one a bucket, step in the backward pass.
    """

    holds_all = False
    model: Any  # its own class has no annotations

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        dist.init_process_group("gloo")
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger

        logger.remove()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._rate = 0.0
        self.model = DecentralizedDataParallel(
            net, self._make_optimizer, topology="ring", _local_world_size=len(plan.periods)
        )
        self.model.train()

    def _make_optimizer(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        made = self.plan.make_optimizer([parameter for _, parameter in named])
        self._optimizers.append(made)
        self.set_rate(self._rate)
        return made

    def set_rate(self, rate: float) -> None:
        self._rate = rate
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.steps += 1

    def account(self) -> dict[str, float]:
        return {"exchanges": self.steps}

    def num_batches(self) -> int:
        return self.steps

    def finish(self) -> None:
        self.model.global_avg(will_revert=False)


DECENT_DP = {"decent_dp": "decent-dp", "loguru": "loguru"}
TORCHFT = {"torchft": "torchft", "opentelemetry.exporter.otlp": "torchft"}
"""Modules that rows import and gossipdp does not install, and the packages that bring them."""


def missing_package(needs: Mapping[str, str]) -> str | None:
    """Say which of these packages is missing and how to install it; None if none is."""
    for module, package in needs.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of what ``module`` lies in
            found = False
        if not found:
            advice = f"pip install {package}, in any environment"
            return f"{module} is not installed ({advice})"
    return None


def trained(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


@torch.no_grad()
def average_parameters(net: nn.Module, share: float) -> None:
    """Make all workers' parameters their average, in which this worker's weigh ``share``."""
    flat = nn.utils.parameters_to_vector(trained(net)) * share
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, trained(net))
