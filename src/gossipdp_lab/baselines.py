"""The synchronous baseline of demo and train: torch's own DistributedDataParallel."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from gossipdp.launcher.environment import Environment
from gossipdp.launcher.reports import Report, send_report
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.log import RunLogWriter, worker_file
from gossipdp.parallel.module import seed_of
from gossipdp.parallel.stats import Consolidated, Stats

Batch = TypeVar("Batch")

_groups: list[dist.ProcessGroup] = []
"""Groups that live as long as their process: see :func:`leave`."""


def leave() -> None:
    """Leave the process group of what trains no more, and keep it.

    Torch would free it with the model, in a deadlock now and then (2.13: within some hundred models
    of two workers each). It holds the interpreter's lock while it waits for gloo's threads to end,
    and one of them may wait for that lock to let go of a tensor of the last all-reduce. A group in
    a cycle, as FSDP's modules hold it, could also be freed by the garbage collection of a forked
    child, which would join threads that it does not have, and crash or wait for ever.
    """
    group = dist.group.WORLD
    assert group is not None
    _groups.append(group)
    dist.destroy_process_group()


@final
class SynchronousDataParallel(DistributedDataParallel):
    """DistributedDataParallel under those names of ``GossipDataParallel`` that the lab's loops use.

    All workers make the same steps on ``batch_size`` samples each. So each of them knows how many
    samples the run has seen without asking, and all end with the same step. If the run lasts for
    some seconds, rank 0's clock counts for all: it is broadcast after each step. Torch alone
    averages the gradients, without a hook of ours.

    Args:
        module: the model, on its device already; all workers start from rank 0's parameters.
        batch_size: samples of one step of one worker.
        budget_samples: samples of the run, all workers together; None: as many as its time allows.
        least_s: seconds that the run trains at least; 0: no time is looked at.
        seed: of :attr:`worker_seed`.
        log_dir: directory of this worker's log.

    Raises:
        ValueError: the launcher was given TLS files: torch.distributed sends in the clear.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_size: int,
        budget_samples: int | None,
        least_s: float = 0.0,
        seed: int,
        log_dir: Path,
    ) -> None:
        environment = Environment.read()
        if environment.tls is not None:
            raise ValueError(
                "TLS protects the links of gossip, and --method allreduce has none: "
                "torch.distributed would send everything in the clear. Start it without --tls"
            )
        self.rank, self.world_size = rank, num_workers = environment.rank, environment.world_size
        parameters = list(module.parameters())
        if parameters[0].is_cuda:
            torch.cuda.set_device(parameters[0].device)
        dist.init_process_group(
            "nccl" if parameters[0].is_cuda else "gloo",
            rank=rank,
            world_size=num_workers,
            store=HashStore() if num_workers == 1 else None,
        )
        super().__init__(module)
        self._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
        self.worker_seed = seed_of(seed, rank)
        self._batch_size, self._budget_samples = batch_size, budget_samples
        self._least_s, self._began_s = least_s, time.monotonic()
        self._elapsed_s = torch.zeros((), dtype=torch.float64)
        self._num_steps = self._num_recorded = 0
        self._waited_s = self._buffers_s = 0.0
        self._losses: list[Tensor] = []
        self._gradient_bytes = sum(each.numel() * each.element_size() for each in parameters)
        self._log = RunLogWriter(worker_file(log_dir, rank), run_id=environment.run_id)
        configuration = {
            "method": "allreduce",
            "workers": num_workers,
            "budget_samples": budget_samples,
            "seed": seed,
            "parameters": sum(each.numel() for each in parameters),
            "device": parameters[0].device.type,
            "host": platform.node(),
        }
        self._log.start(rank=rank, num_workers=num_workers, configuration=configuration)

    @property
    def is_lead(self) -> bool:
        """True on worker 0. Any worker's death ends the run, so no other ever takes its place."""
        return self.rank == 0

    def progress(self) -> float:
        """Return the progress of the whole run, 0 to 1."""
        shares = [1.0]
        if self._budget_samples is not None:
            samples = self._num_steps * self._batch_size * self.world_size
            shares.append(samples / self._budget_samples)
        if self._least_s:
            shares.append(float(self._elapsed_s) / self._least_s)
        return min(shares)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, pass after pass, until the run is over for all workers."""
        while True:
            for batch in loader:
                if self.progress() >= 1:
                    return
                yield batch
                self._stepped()

    def _stepped(self) -> None:
        self._num_steps += 1
        self._waited_s += self.waited_in_step_s()
        if self._least_s:
            self._elapsed_s.fill_(time.monotonic() - self._began_s)
            dist.broadcast(self._elapsed_s, src=0)
        if self._num_steps == 1:
            send_report(Report(trains=True))
        if self._log.wait_s() <= 0:
            self._write_record()

    def waited_in_step_s(self) -> float:
        """Return the seconds of the step under way in which this worker did nothing but wait.

        It waits while rank 0 gives its buffers to all, before the forward pass, and for the part of
        the all-reduce that the backward pass does not hide, as torch measures it for its log.
        """
        assert self.logger is not None
        self.logger.set_runtime_stats_and_log()
        times = self._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        all_ns, hidden_ns = times["backward_comm_time"], times["backward_compute_comm_overlap_time"]
        return self._buffers_s + float(all_ns - hidden_ns) / 1e9

    def _sync_buffers(self) -> None:
        started_s = time.perf_counter()
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        self._buffers_s = time.perf_counter() - started_s

    def log(self, *, loss: Tensor | None = None, **values: bool | float | str) -> None:
        """Put the loss of a step, or values by name, into this worker's log."""
        if loss is not None:
            self._losses.append(loss.detach())
        if values:
            self._log.counts(self.stats(), logged=values)

    def _write_record(self) -> None:
        losses = [float(each) for each in self._losses]
        self._losses.clear()
        self._num_recorded = self._num_steps
        loss = sum(losses) / len(losses) if losses else math.nan
        self._log.counts(self.stats(), loss=loss)

    def stats(self) -> Stats:
        """Return this worker's counts; the bytes are those of the gradients."""
        return Stats(
            rank=self.rank,
            world_size=self.world_size,
            at_s=since_boot_s(),
            gradient_steps=self._num_steps,
            samples=self._num_steps * self._batch_size,
            bytes_sent=self._num_steps * self._gradient_bytes,
            bytes_received=self._num_steps * self._gradient_bytes,
            waited_seconds=self._waited_s,
        )

    def consolidate(self) -> Consolidated:
        """End the run: parameters are equal already; all take rank 0's buffers."""
        if self._num_recorded < self._num_steps:
            self._write_record()
        self._log.counts(self.stats(), state="averaging")
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)
        leave()
        self._log.counts(
            self.stats(), state="left", consensus_distance=0.0, num_averaged=self.world_size
        )
        self._log.close()
        steps = self._num_steps
        return Consolidated(
            consensus_distance=0.0,
            world_size=self.world_size,
            samples=steps * self._batch_size * self.world_size,
            gradient_steps=steps * self.world_size,
            gradient_steps_by_rank=dict.fromkeys(range(self.world_size), steps),
        )

    def save_averaged(self, path: Path) -> None:
        """Save the module's plain ``state_dict``."""
        torch.save(self.module.state_dict(), path)
