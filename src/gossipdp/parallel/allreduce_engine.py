"""The synchronous baseline: gradients averaged at each step, by DistributedDataParallel."""

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from statistics import median
from typing import Any, final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from gossipdp.dynamics.update import is_finite
from gossipdp.errors import PoisonedError, RefusedError
from gossipdp.graph.topology import build_graph
from gossipdp.launcher.environment import Environment, check_platform, show_address
from gossipdp.observe.status import MemberStatus
from gossipdp.parallel.checkpoint import Captured, Counts, Resumption
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.flat_parameters import named_tensors
from gossipdp.parallel.monitoring import StatusPage
from gossipdp.parallel.options import NO_TLS, Options
from gossipdp.parallel.shards import Replica
from gossipdp.parallel.stats import Consolidated, Stats
from gossipdp.protocol.clock import MEDIAN_WINDOW, SKIPPED_STEPS
from gossipdp.protocol.members import Progress

logger = logging.getLogger("gossipdp")

MAX_ADDRESS_BYTES = 64


class AllReduceEngine(Engine):
    """One worker of method ``allreduce``: the loop, budget, statistics and logs of the others.

    Gradients are averaged by torch's own DistributedDataParallel during the backward pass, so the
    parameters are equal on all workers, bit for bit, and nobody is ahead. The process group is
    the user's where there is one; else gloo (NCCL for CUDA parameters), made here and ended here.
    Once all have met, its time-out is torch's own: 30 minutes, of NCCL 10.

    The sample count travels beside the gradients, in an all-reduce of its own that is collected
    one step later, and with it whether a worker has called ``stop()``: all see the same at the same
    step, and so end together.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Options,
        replica: Replica,
        *,
        resumption: Resumption | None = None,
        page: StatusPage | None = None,
    ) -> None:
        super().__init__(module, Counts() if resumption is None else resumption.counts)
        check_platform()
        environment = replica.environment
        if replica.is_sharded:
            raise ValueError(
                "method='allreduce' is DistributedDataParallel, and this model is sharded: to "
                "compare with HSDP, call fully_shard(module, mesh=mesh) with both dimensions of "
                "the mesh, and leave the wrapper out"
            )
        if environment.tls is not None:
            raise ValueError(NO_TLS)
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.run_id = environment.run_id
        self._status_addresses = [""] * self.world_size
        if page is not None:
            page.bind(self.rank)
            host = page.address[0] if self.world_size == 1 else environment.choose_host()
            self._status_addresses[self.rank] = show_address(*page.announced(host))
        # The graph is not used; a mistake in it is one under any method.
        build_graph(options.graph, self.world_size, seed=options.seed)
        self._module = module
        self._lives = Progress(self.rank, secrets.randbits(62))
        self._has_stopped = False
        if resumption is not None:
            self._restore(resumption)
        self._total = self._counts()
        self._in_flight: tuple[dist.Work, Tensor] | None = None
        self._ended_s: float | None = None
        self._durations: deque[float] = deque(maxlen=MEDIAN_WINDOW)
        self._bytes = 0
        self._owns_group = False
        if self.world_size > 1:
            self._join(environment, options)

    def _join(self, environment: Environment, options: Options) -> None:
        on_cuda = any(parameter.is_cuda for parameter in self._module.parameters())
        self._device = next(self._module.parameters()).device if on_cuda else torch.device("cpu")
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if on_cuda else "gloo",
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timedelta(seconds=options.network.start_timeout_s),
            )
            self._owns_group = True
        self._check_start()
        self._gather_status_addresses()
        self.forward_module = _Synchronous(self._module)
        self.forward_module.register_comm_hook(None, self._average_bucket)
        if self._owns_group:
            # start_timeout_s was for the meeting; between steps a worker may evaluate, or save.
            assert dist.group.WORLD is not None
            usual = default_pg_nccl_timeout if on_cuda else default_pg_timeout
            dist.group.WORLD.set_timeout(usual or default_pg_timeout)

    def _check_start(self) -> None:
        """Raise RefusedError unless all start from one step; add up what they carry over.

        Else their optimizers' states would differ, and nobody would see it.
        """
        own = torch.tensor([self._before.step, *self._counts()], device=self._device)
        starts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(starts, own)
        steps = [int(start[0]) for start in starts]
        if len(set(steps)) > 1:
            raise RefusedError(
                f"the workers would start from different steps, {steps} by rank; give all of them "
                "the same resume= and the same checkpoints"
            )
        self._total = torch.stack(starts).sum(dim=0)[1:].cpu()

    def _gather_status_addresses(self) -> None:
        """Tell one another, as text in a row of bytes, where each shows its status."""
        own = self._status_addresses[self.rank].encode()[:MAX_ADDRESS_BYTES]
        row = torch.zeros(MAX_ADDRESS_BYTES, dtype=torch.uint8)
        row[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
        rows = [torch.empty_like(row, device=self._device) for _ in range(self.world_size)]
        dist.all_gather(rows, row.to(self._device))
        self._status_addresses = [
            bytes(gathered.tolist()).rstrip(b"\0").decode("latin-1") for gathered in rows
        ]

    @torch.no_grad()
    def _restore(self, resumption: Resumption) -> None:
        for name, tensor in named_tensors(self._module).items():
            tensor.copy_(resumption.tensors[f"model/{name}"])
        resumption.tensors = {}
        self._lives.merge_all(resumption.progress)

    def _average_bucket(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket of gradients; the last one's duration is what training waits for.

        By then the backward pass has nothing else to do, and it ends when this bucket arrives.
        """
        gradients = bucket.buffer()
        gradients.div_(self.world_size)
        self._bytes += gradients.numel() * gradients.element_size()
        work = dist.all_reduce(gradients, async_op=True)
        assert work is not None
        started_s = time.perf_counter()
        is_last = bucket.is_last()

        def arrived(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
            if is_last:
                self._waited_s += time.perf_counter() - started_s
            return future.value()[0]

        averaged: torch.futures.Future[Tensor] = work.get_future().then(arrived)
        return averaged

    def boundary(self, optimizer_index: int, samples: int) -> int:
        """See :class:`Engine`."""
        if optimizer_index != 0:
            return samples
        self._gradient_steps += 1
        self._samples += samples
        self._lives.add(samples)
        now_s = time.perf_counter()
        if self._ended_s is not None and self._gradient_steps > SKIPPED_STEPS:
            self._durations.append(now_s - self._ended_s)
        self._ended_s = now_s
        self._collect_total()
        if self.world_size == 1:
            self._total = self._counts()
            return samples
        counts = self._counts().to(self._device)
        work = dist.all_reduce(counts, async_op=True)
        assert work is not None
        self._in_flight = (work, counts)
        return samples

    def _counts(self) -> Tensor:
        """Samples and steps: this worker's, and those that it carries over from a checkpoint.

        And whether it has stopped the run.
        """
        lives = self._lives
        return torch.tensor([lives.total_samples, lives.total_steps, self._has_stopped])

    def _collect_total(self) -> None:
        if self._in_flight is not None:
            work, counts = self._in_flight
            work.wait()
            self._total = counts.cpu()
            self._in_flight = None

    def total_samples(self) -> int:
        """See :class:`Engine`: as of the step before the last, the same on all workers."""
        return int(self._total[0])

    def stop(self) -> None:
        """See :class:`Engine`: all end after the step after the next."""
        self._has_stopped = True
        if self.world_size == 1:
            self._total = self._counts()

    @property
    def is_stopped(self) -> bool:
        """See :class:`Engine`: as :meth:`total_samples`, the same on all workers."""
        return bool(self._total[2])

    def check(self) -> None:
        """See :class:`Engine`: DistributedDataParallel checks its parameters itself."""

    def loaded(self, tensors: Iterable[Tensor]) -> None:
        """See :class:`Engine`: nothing is under way between steps."""

    def export(self, values: dict[str, Any]) -> None:
        """See :class:`Engine`: everything is in the module's own storage."""

    def capture(self) -> Captured:
        """See :class:`Engine`: nothing is under way between steps."""
        tensors = named_tensors(self._module)
        for name, tensor in tensors.items():
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            if trained and tensor.is_floating_point() and not is_finite(tensor):
                raise PoisonedError(
                    f"parameter {name!r} of worker {self.rank} holds NaN or infinity: it is not "
                    "saved, and the checkpoints written before are kept"
                )
        return Captured(
            tensors={
                f"model/{name}": tensor.detach().to(
                    "cpu", copy=True, memory_format=torch.contiguous_format
                )
                for name, tensor in tensors.items()
            },
            progress=self._lives.news()[0],
        )

    @torch.no_grad()
    def _consolidate(self, timeout_s: float) -> Consolidated:
        """The parameters are equal already, which is measured; float buffers are averaged.

        ``timeout_s`` is of no use: all end together.
        """
        self._collect_total()
        distance = torch.zeros(1, dtype=torch.float64)
        if self.world_size > 1:
            counts = self._counts().to(self._device)
            dist.all_reduce(counts)
            self._total = counts.cpu()
            distance = distance.to(self._device)
            for parameter in self._module.parameters():
                distance += (parameter - self._average(parameter)).double().square().sum()
            for buffer in self._module.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(self._average(buffer))
            dist.all_reduce(distance)
            for buffer in self._module.buffers():
                if not buffer.is_floating_point():
                    dist.broadcast(buffer, src=0)
        else:
            self._total = self._counts()
        return Consolidated(
            consensus_distance=float(distance) / self.world_size,
            world_size=self.world_size,
            samples=int(self._total[0]),
            gradient_steps=int(self._total[1]),
            gradient_steps_by_rank=dict.fromkeys(
                range(self.world_size), int(self._total[1]) // self.world_size
            ),
        )

    def _average(self, tensor: Tensor) -> Tensor:
        mean = tensor.detach().clone()
        dist.all_reduce(mean)
        return mean.div_(self.world_size)

    def stats(self) -> Stats:
        """See :class:`Engine`. There are no exchanges; bytes are those of the gradients."""
        return msgspec.structs.replace(
            super().stats(),
            bytes_sent=self._bytes,
            bytes_received=self._bytes,
            step_seconds=median(self._durations) if self._durations else math.nan,
        )

    def view(self) -> tuple[tuple[MemberStatus, ...], tuple[()]]:
        """See :class:`Engine`: all take the same steps; who dies ends the run."""
        steps = self.counts().steps
        members = (
            MemberStatus(rank, 0, "training", gradient_steps=steps, status_address=address)
            for rank, address in enumerate(self._status_addresses)
        )
        return tuple(members), ()

    def _close(self) -> None:
        self.forward_module = self._module
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


@final
class _Synchronous(DistributedDataParallel):
    """A forward pass without gradients is one worker's own affair, as under the other methods.

    DistributedDataParallel gives all workers rank 0's buffers at the first such pass after a
    training step, so one that evaluated alone would wait for the others. It does so at the next
    training step in any case. In eval mode with gradients all workers take part: they may train.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
