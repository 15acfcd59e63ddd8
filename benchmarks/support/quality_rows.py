"""The rows of quality and time_to_loss: ways to train together that a user would choose between.

A row's name may end in ``@H``: then it averages or exchanges every H steps.
A row of gossip may end in ``@1/K``: K exchanges a step.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from support.rows import (
    DECENT_DP,
    TORCHFT,
    DecentDP,
    DistributedDataParallel,
    Gossip,
    OneOptimizer,
    Row,
    RowPlan,
    average_parameters,
    missing_package,
    trained,
)
from torch import Tensor, nn

BETAS, WEIGHT_DECAY = (0.9, 0.999), 0.1
OUTER_MOMENTUM, OUTER_RATE, GENTLE_MOMENTUM = 0.7, 1.0, 0.5
OUTER = (OUTER_RATE, OUTER_MOMENTUM)
"""Rate and momentum of DiLoCo's outer step, where nothing else is asked for."""
POWER_SGD_RANK, POWER_SGD_AFTER = 4, 10
"""Its rank; steps of plain all-reduce before it: torch's own 1,000 are more than most runs take."""

TORCHFT_PATIENCE_S = 120.0


def make_optimizer(
    parameters: Iterable[Tensor], weight_decay: float = WEIGHT_DECAY
) -> torch.optim.AdamW:
    """Make the optimizer, the same for every row; norms and biases are not decayed."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, betas=BETAS)


class Bfloat16DDP(DistributedDataParallel):
    """DDP with torch's hook that sends gradients in bfloat16."""

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
            return bf16_compress_hook(state, bucket)

        # Under its own name DDP takes that hook for NCCL alone; gloo reduces bfloat16 as well.
        self.model.register_comm_hook(None, hook)


class PowerSgdDDP(DistributedDataParallel):
    """DDP with torch's PowerSGD hook, after a short time of plain all-reduce, as it is meant."""

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )

        state = PowerSGDState(
            None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=POWER_SGD_AFTER
        )
        self.model.register_comm_hook(state, powerSGD_hook)


class WeightedBfloat16DDP(Bfloat16DDP):
    """The same where a slow worker has a smaller batch: gradients weigh by their samples."""

    def step(self, loss: Tensor) -> None:
        super().step(loss * (len(self.plan.periods) * self.plan.share))  # DDP takes the mean


def _flat(net: nn.Module) -> Tensor:
    """Return a copy of its parameters, one after the other."""
    return nn.utils.parameters_to_vector(trained(net)).detach()


def outer_optimizer(
    parameters: Iterable[nn.Parameter], outer: tuple[float, float]
) -> torch.optim.SGD:
    """Make an outer optimizer. outer: its rate and momentum; without momentum it is plain SGD."""
    rate, momentum = outer
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum, nesterov=momentum > 0)


class OuterNesterov:
    """The outer optimizer of DiLoCo: torch's SGD on what the inner one did since the last time."""

    def __init__(self, net: nn.Module, outer: tuple[float, float] = OUTER) -> None:
        self._net = net
        self._anchor = nn.Parameter(_flat(net))
        self._optimizer = outer_optimizer([self._anchor], outer)

    def drift(self) -> Tensor:
        """From where the last outer step ended to the parameters as they are now."""
        return _flat(self._net) - self._anchor.detach()

    def step(self, drift: Tensor) -> None:
        """Take an outer step on this drift, from where the last one ended."""
        self._anchor.grad = -drift
        self._optimizer.step()
        # Copied: the network's parameters become views of what they are read from.
        after = self._anchor.detach().clone()
        nn.utils.vector_to_parameters(after, trained(self._net))

    def state(self) -> dict[str, Any]:
        return {"anchor": self._anchor.detach(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._anchor.data.copy_(state["anchor"])
        self._optimizer.load_state_dict(state["optimizer"])


class LocalSgd(OneOptimizer):
    """Parameters are averaged every ``period`` steps, from the first step on, over gloo.

    They weigh by the samples since the last time: equally, but where slow workers take fewer steps.
    """

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        dist.init_process_group("gloo")

    def step(self, loss: Tensor) -> None:
        super().step(loss)
        if self.steps % self.plan.period == 0:
            self.average()

    def average(self) -> None:
        average_parameters(self.net, self.plan.share)

    def account(self) -> dict[str, float]:
        return {"exchanges": self.steps // self.plan.period}

    def finish(self) -> None:
        average_parameters(self.net, self.plan.share)


class Bfloat16LocalSgd(LocalSgd):
    """Local SGD that sends in bfloat16 what its workers did since the last average.

    Not parameters themselves, of which rounding would take most of a small step.
    """

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        self._base = _flat(net)

    def average(self) -> None:
        drift = ((_flat(self.net) - self._base) * self.plan.share).bfloat16()
        dist.all_reduce(drift)
        self._base += drift
        # Copied: the network's parameters become views of what they are read from.
        nn.utils.vector_to_parameters(self._base.clone(), trained(self.net))


class DiLoCo(LocalSgd):
    """Douillard et al., 2023 (arXiv 2311.08105): the workers' mean drift, and an outer step on it.

    Each keeps its own inner optimizer, whose state no other worker sees. Drifts weigh as parameters
    do in local SGD.
    """

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        self._outer = OuterNesterov(net, plan.outer or OUTER)

    def average(self) -> None:
        drift = self._outer.drift() * self.plan.share
        dist.all_reduce(drift)
        self._outer.step(drift)

    def state(self) -> dict[str, Any]:
        return super().state() | {"outer": self._outer.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._outer.load(state["outer"])


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

        patience = timedelta(seconds=TORCHFT_PATIENCE_S)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            plan.host, 0, is_master=True, wait_for_workers=False
        )
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

        def hook(manager: Any, bucket: Any) -> torch.futures.Future[Tensor]:
            manager.allreduce(bucket.buffer()).wait()
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        # DDP reads the annotations of a hook.
        hook.__annotations__ |= {
            "bucket": dist.GradBucket,  # type: ignore[attr-defined]
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


class TorchftDiLoCo(TorchftRow):
    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        from torchft.local_sgd import DiLoCo as Torchft

        outer = outer_optimizer(net.parameters(), plan.outer or OUTER)
        # It holds hooks on the optimizer.
        self._diloco = Torchft(self.manager, [net], self.optimizer, outer, sync_every=plan.period)
        self._diloco.__enter__()
        self._outer = outer
        (fragment,) = self._diloco._fragments
        self._anchors: dict[str, Tensor] = fragment.original_parameters

    def state(self) -> dict[str, Any]:
        """Return also the parameters after the last average, and the outer optimizer's state.

        A replica that goes on from a checkpoint at the others' step is not healed by them.
        """
        outer = {"anchors": self._anchors, "outer": self._outer.state_dict()}
        return super().state() | outer

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._outer.load_state_dict(state["outer"])
        for name, anchor in self._anchors.items():
            anchor.copy_(state["anchors"][name])


@dataclass(frozen=True)
class RowKind:
    """One way to train together.

    method and options are GossipDataParallel's.
    period: whether its name has one; it may where that sets how often pairs exchange.
    by_speed: what a slow worker has less of, where workers are not equally fast.
    """

    label: str
    row: type[Row]
    method: str = "a2cid2"
    options: Mapping[str, Any] = field(default_factory=dict)
    period: Literal["none", "may", "must"] = "none"
    by_speed: Literal["nothing", "batch", "steps"] = "nothing"
    needs: Mapping[str, str] = field(default_factory=dict)
    is_default: bool = False
    """True if an option that it does not name has the library's default, not the benchmark's."""
    shared_memory: Literal["auto", "off"] = "off"
    """Of the network; off: workers send what they exchange, as if each had its own host."""
    outer: tuple[float, float] | None = None
    """Of DiLoCo, if its plan has none."""

    @property
    def is_ours(self) -> bool:
        """Return whether it exchanges by gossip."""
        return self.row is Gossip and self.method != "none"


FULL, LATTICE8 = {"wire_format": "full"}, {"wire_format": "lattice8"}
KINDS = {
    "ddp": RowKind("DDP, float32", DistributedDataParallel),
    "ddp_bf16": RowKind("DDP, bf16 hook", Bfloat16DDP),
    "ddp_powersgd": RowKind(f"DDP, PowerSGD hook of rank {POWER_SGD_RANK}", PowerSgdDDP),
    "ddp_bf16_by_speed": RowKind(
        "DDP, bf16 hook, batches by speed", WeightedBfloat16DDP, by_speed="batch"
    ),
    "local_sgd": RowKind("local SGD", LocalSgd, period="must"),
    "local_sgd_bf16": RowKind("local SGD in bfloat16", Bfloat16LocalSgd, period="must"),
    "local_sgd_by_speed": RowKind(
        "local SGD, steps by speed", LocalSgd, period="must", by_speed="steps"
    ),
    "diloco": RowKind("DiLoCo", DiLoCo, period="must"),
    "diloco_gentle": RowKind(
        f"DiLoCo, momentum {GENTLE_MOMENTUM}", DiLoCo, period="must", outer=(1.0, GENTLE_MOMENTUM)
    ),
    "diloco_torchft": RowKind("DiLoCo of torchft", TorchftDiLoCo, period="must", needs=TORCHFT),
    "local_sgd_torchft": RowKind(
        "local SGD of torchft", TorchftLocalSgd, period="must", needs=TORCHFT
    ),
    "ddp_torchft": RowKind("DDP of torchft", TorchftDDP, needs=TORCHFT),
    "decent_dp": RowKind("Decent-DP", DecentDP, needs=DECENT_DP),
    "none": RowKind("no exchange, one average at the end", Gossip, "none"),
    "gossipdp": RowKind("gossipdp, defaults", Gossip, is_default=True),
    "gossipdp_full": RowKind("gossipdp, defaults, float32", Gossip, options=FULL, is_default=True),
    "gossipdp_shared": RowKind(
        "gossipdp, defaults, one host", Gossip, is_default=True, shared_memory="auto"
    ),
    "gossip": RowKind("gossipdp, gossip", Gossip, "gossip", FULL, period="may"),
    "gossip_lattice8": RowKind(
        "gossipdp, gossip, lattice8", Gossip, "gossip", LATTICE8, period="may"
    ),
    "a2cid2": RowKind("gossipdp, a2cid2", Gossip, options=FULL, period="may"),
    "a2cid2_lattice8": RowKind("gossipdp, a2cid2, lattice8", Gossip, "a2cid2", LATTICE8, "may"),
}
"""By the name that the command takes, without its period."""

DEFAULT_ROWS = (
    "ddp,ddp_bf16,ddp_powersgd,local_sgd@4,local_sgd_bf16@8,diloco_gentle@16,"
    "decent_dp,none,gossip,a2cid2,gossip@11,gossip_lattice8@3,gossip_lattice8@1/4"
)


@dataclass(frozen=True)
class RowName:
    """A row as it is chosen: ``diloco@16`` is the kind ``diloco`` with the period 16."""

    text: str
    kind: str
    period: int | None
    per_step: int = 1
    """Exchanges in a step, where there is more than one."""

    @classmethod
    def parse(cls, text: str) -> RowName:
        """Read what a user wrote.

        Raises:
            ValueError: there is no such kind, or its period is missing or cannot be meant.
        """
        kind, at, period = text.partition("@")
        if kind not in KINDS:
            raise ValueError(f"there is no row {kind!r}; choose from {', '.join(KINDS)}")
        wanted = KINDS[kind].period
        if wanted == "must" and not at:
            raise ValueError(f"row {text!r} needs a period, such as {kind}@16")
        if wanted == "none" and at:
            raise ValueError(f"row {text!r} has no period: write {kind}")
        many, _, number = period.rpartition("/")
        if at and not (number.isdecimal() and int(number) >= 1):
            raise ValueError(f"row {text!r}: the period is a number of steps, at least 1")
        if not many:
            return cls(text, kind, int(number) if at else None)
        if many != "1" or not KINDS[kind].is_ours:
            raise ValueError(f"row {text!r}: @1/{number} is for gossip: so many exchanges a step")
        return cls(text, kind, None, int(number))

    @property
    def label(self) -> str:
        every = "" if self.period is None else f", H = {self.period}"
        often = "" if self.per_step == 1 else f", {self.per_step} exchanges a step"
        return KINDS[self.kind].label + every + often

    def missing(self) -> str | None:
        """Say why it cannot run here; None if it can."""
        return missing_package(KINDS[self.kind].needs)

    @classmethod
    def parse_all(cls, text: str) -> list[RowName]:
        """Read rows with commas between them, for runs on equal tokens.

        Raises:
            ValueError: as :meth:`parse`, or for a row of torchft, which only the race has.
        """
        names = [cls.parse(row.strip()) for row in text.split(",")]
        for name in names:
            if KINDS[name.kind].needs is TORCHFT:
                raise ValueError(
                    f"row {name.text!r} needs a lighthouse: benchmarks/race.py has one"
                )
        return names

    def batch_sizes(self, batch_size: int, speeds: Sequence[float]) -> list[int]:
        """Return the samples of a step, by rank: a full batch, or a share by speed."""
        if KINDS[self.kind].by_speed != "batch":
            return [batch_size] * len(speeds)
        total, before = batch_size * len(speeds), [sum(speeds[:n]) for n in range(len(speeds) + 1)]
        ends = [round(total * part / sum(speeds)) for part in before]
        return [max(1, end - start) for start, end in itertools.pairwise(ends)]

    def periods(self, speeds: Sequence[float]) -> list[int]:
        """Return the steps between averages, by rank: fewer for slow workers, or all the same."""
        period = self.period or 1
        if KINDS[self.kind].by_speed != "steps":
            return [period] * len(speeds)
        return [max(1, round(period * speed / max(speeds))) for speed in speeds]

    def gossip_options(self, graph: str, pace: str = "strict") -> dict[str, Any]:
        """Return the arguments of GossipDataParallel, beside the method."""
        kind = KINDS[self.kind]
        if not kind.is_ours:
            return {}
        if kind.is_default:
            return {"pace": "free", **kind.options}
        rate = self.per_step / (self.period or 1)
        return {"graph": graph, "comm_rate": rate, "pace": pace, **kind.options}

    def make(self, net: nn.Module, plan: RowPlan) -> Row:
        kind = KINDS[self.kind]
        return kind.row(net, replace(plan, outer=plan.outer or kind.outer))
