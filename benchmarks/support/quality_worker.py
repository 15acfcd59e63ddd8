"""One run of quality or time_to_loss: worker processes that train a transformer on real text.

The workers average their parameters at the end, and the parent scores the average: no row's clock
contains an evaluation.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import torch
from support.conditions import Condition
from support.hosts import Hosts, bytes_by_connection, bytes_sent, enter
from support.meeting import Meeting
from support.quality_rows import KINDS, WEIGHT_DECAY, RowName, make_optimizer
from support.rows import Row, RowPlan
from support.timed_compute import TimedCompute
from torch import Tensor, nn

import gossipdp
from gossipdp import WorkerFailedError
from gossipdp_lab.tasks import BytesGptOptions
from gossipdp_lab.tasks.text import Gpt
from gossipdp_lab.tasks.workload import learning_rate_factor

TIMEOUT_S = 7_200.0
MEETING, AVERAGE = "meeting", "average.pt"

DataName = Literal["disjoint", "common"]


@dataclass(frozen=True)
class Size:
    """A model and how long it is trained; steps: gradient steps of each worker."""

    width: int
    depth: int
    context: int
    batch_size: int
    steps: int


@dataclass(frozen=True)
class Processor:
    """The processor of each worker: a device (all share what there is of cuda), torch's threads."""

    device: str = "cpu"
    threads: int = 1


ONE_THREAD = Processor()


@dataclass(frozen=True)
class RunSettings:
    """All that a run's result follows from; runs are found again by it."""

    row: str
    data: DataName
    learning_rate: float
    seed: int
    size: Size
    workers: int = 4
    graph: str = "ring"
    condition: Condition | None = None
    """Under which the run is timed. None: steps take what they take on this machine."""
    processor: Processor = ONE_THREAD
    weight_decay: float = WEIGHT_DECAY

    @property
    def has_own_pace(self) -> bool:
        """Say if workers may take their steps at their own pace: in a run that is timed.

        Else four share two cores, and wait, so that a busy machine does not change the comm rate.
        """
        return self.condition is not None or self.processor != ONE_THREAD

    @property
    def gossip_options(self) -> dict[str, Any]:
        pace = "free" if self.has_own_pace else "strict"
        return RowName.parse(self.row).gossip_options(self.graph, pace)

    @property
    def key(self) -> str:
        """The same for equal settings, and for no others: how the library is called is in it."""
        settings = asdict(self) | {"gossip": self.gossip_options}
        if self.condition is None:
            del settings["condition"]
        if self.processor == ONE_THREAD:
            del settings["processor"]
        if self.weight_decay == WEIGHT_DECAY:
            del settings["weight_decay"]
        return msgspec.json.encode(settings, order="sorted").decode()


class RunResult(msgspec.Struct, frozen=True):
    """The result of a run.

    loss: validation loss of the average at the end, bits a byte; None where it diverged.
    ended_s: seconds of training, until the average was there.
    bytes_per_parameter_step: that a worker sent, over parameters and its steps: by its sockets, or,
        with headers, by its interface where it has one of its own.
    samples_per_s: the sum of the workers' own speeds.
    comm_rate: exchanges, all-reduces or averages per worker and gradient step.
    """

    loss: float | None
    ended_s: float
    bytes_per_parameter_step: float
    samples_per_s: float
    samples: int
    comm_rate: float
    seconds: float

    @property
    def loss_or_inf(self) -> float:
        return math.inf if self.loss is None else self.loss


class Text(Gpt):
    """The recipe's task, scored on fewer windows."""

    num_validation_windows: ClassVar[int] = 1024


def make_task(settings: RunSettings, batch_size: int | None = None) -> Text:
    """Return data and model; ``batch_size``: of a worker whose own differs from the size's."""
    size = settings.size
    options = BytesGptOptions(
        data=None,
        batch_size=batch_size or size.batch_size,
        context=size.context,
        width=size.width,
        depth=size.depth,
        heads=4,
        learning_rate=settings.learning_rate,
        device=settings.processor.device,
    )
    return Text(options, disjoint=settings.data == "disjoint")


def num_parameters(size: Size) -> int:
    settings = RunSettings("none", "common", 1.0, 0, size)
    return sum(parameter.numel() for parameter in make_task(settings).make_model().parameters())


def run(settings: RunSettings, hosts: Hosts | None = None) -> RunResult:
    """Train once and score it.

    Args:
        settings: what is trained, and how.
        hosts: where the workers run; None for this machine.

    Raises:
        WorkerFailedError: a worker failed, of something else than parameters that diverged.
    """
    started_s = time.monotonic()
    network = None if hosts is None else (hosts.names, hosts.variables())
    with tempfile.TemporaryDirectory() as folder:
        Meeting.create(Path(folder) / MEETING, settings.workers)
        try:
            workers = gossipdp.launch(
                train,
                world_size=settings.workers,
                args=(settings, folder, network),
                environment={
                    "OMP_NUM_THREADS": str(settings.processor.threads),
                    "GOSSIPDP_LOG": os.environ.get("GOSSIPDP_LOG", "error"),
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RUST_LOG": "error",  # of torchft
                },
                timeout_s=TIMEOUT_S,
            )
        except WorkerFailedError as error:
            if "PoisonedError" not in str(error):
                raise
            return RunResult(None, 0.0, 0.0, 0.0, 0, 0.0, time.monotonic() - started_s)
        average = torch.load(Path(folder) / AVERAGE, weights_only=True)
    return score(settings, workers, average, time.monotonic() - started_s)


@dataclass(frozen=True)
class Trained:
    steps: int
    batch_size: int
    trained_s: float
    ended_s: float
    sent_bytes: int
    exchanges: float


def train(
    settings: RunSettings, folder: str, network: tuple[list[str], dict[str, str]] | None
) -> Trained:
    """Train, as one worker; rank 0 writes the average to a file in folder.

    network: the workers' namespaces, and variables of each; None: all are on this machine.
    """
    torch.set_num_threads(settings.processor.threads)
    rank = int(os.environ["RANK"])
    if network is not None:
        namespaces, variables = network
        enter(namespaces[rank])
        os.environ.update(variables)
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # the launcher's cannot be reached

    def count() -> int:
        if network is None:
            return sum(bytes_by_connection().values())
        return bytes_sent(network[1]["GLOO_SOCKET_IFNAME"])

    name = RowName.parse(settings.row)
    size, condition = settings.size, settings.condition
    speeds = [1.0] * settings.workers if condition is None else condition.speeds(settings.workers)
    options, shared_memory = settings.gossip_options, KINDS[name.kind].shared_memory
    if options:  # no time-out of a starved machine is to change a result
        options["network"] = gossipdp.Network(shared_memory=shared_memory, timeout_s=60.0)
    plan = RowPlan(
        rank=rank,
        samples=size.steps * size.batch_size * settings.workers,
        seed=settings.seed,
        batch_sizes=name.batch_sizes(size.batch_size, speeds),
        periods=name.periods(speeds),
        make_optimizer=partial(make_optimizer, weight_decay=settings.weight_decay),
        method=KINDS[name.kind].method,
        options=options,
        own_pace=settings.has_own_pace,
    )
    task = make_task(settings, batch_size=plan.batch_size)
    loader = task.train_loader(rank, settings.workers, settings.seed)
    warm_up = task.train_loader(rank, settings.workers, settings.seed)
    task.loss(task.make_model(), next(iter(warm_up))).backward()  # what torch makes at first
    torch.manual_seed(settings.seed)
    net = task.make_model()
    compute = None
    if condition is not None:
        draw_s, part = condition.compute.begin(settings.seed), plan.batch_size / size.batch_size
        compute = TimedCompute(
            [*net.get_submodule("blocks").children(), net], lambda: part * draw_s(rank)
        )
    row = name.make(net, plan)
    meeting = Meeting(Path(folder) / MEETING, rank)
    try:
        meeting.meet()
        sent_before, started_s = count(), time.monotonic()
        _loop(row, task, loader, settings.learning_rate, compute)
        trained_s = time.monotonic() - started_s
        sent = count() - sent_before
        exchanges = row.account().get("exchanges", 0.0)
        row.finish()
        ended_s = time.monotonic() - started_s
        if rank == 0:
            torch.save(
                nn.utils.parameters_to_vector(net.parameters()).cpu(), Path(folder) / AVERAGE
            )
        meeting.meet()  # all have counted: a connection that its peer closed would count no more
    finally:
        row.close()
    return Trained(
        steps=row.steps,
        batch_size=plan.batch_size,
        trained_s=trained_s,
        ended_s=ended_s,
        sent_bytes=sent,
        exchanges=exchanges,
    )


def _loop(
    row: Row, task: Text, loader: Any, peak_rate: float, compute: TimedCompute | None
) -> None:
    """Train until the run has used up its samples: the loop that every row runs."""
    while True:
        for batch in loader:
            progress = row.progress()
            if progress >= 1:
                return
            row.set_rate(peak_rate * learning_rate_factor(progress))
            if compute is not None:
                compute.begin()
            row.step(task.loss(row.model, batch))


def score(
    settings: RunSettings, workers: list[Trained], average: Tensor, seconds: float
) -> RunResult:
    """Evaluate what the workers of a run gave back."""
    task = make_task(settings)
    model = task.make_model()
    nn.utils.vector_to_parameters(average.detach().to(task.device), model.parameters())
    loss = task.evaluate(model)
    steps = sum(worker.steps for worker in workers)
    samples = sum(worker.steps * worker.batch_size for worker in workers)
    full_steps = samples / settings.size.batch_size
    sent_bytes = sum(worker.sent_bytes for worker in workers)
    return RunResult(
        loss=loss if math.isfinite(loss) else None,
        ended_s=max(worker.ended_s for worker in workers),
        bytes_per_parameter_step=sent_bytes / (full_steps * len(average)),
        samples_per_s=sum(one.steps * one.batch_size / one.trained_s for one in workers),
        samples=samples,
        comm_rate=sum(worker.exchanges for worker in workers) / steps,
        seconds=seconds,
    )
