"""One run of quality.py: worker processes that train a transformer on real text, and its score.

What the validation needs is out of band: a worker copies its parameters at fixed shares of the run,
the parent averages the copies of one share and scores the average. So a curve says what a row would
have delivered at that share of the tokens, and no row's clock contains an evaluation.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import torch
from quality_rows import RowName, make_optimizer
from support.rows import Row, RowPlan
from support.sockets import tcp_bytes_sent
from torch import Tensor, nn

import gossipdp
from gossipdp import Network, WorkerFailedError
from gossipdp.tasks.options import BytesGptOptions
from gossipdp.tasks.text import Gpt
from gossipdp.tasks.workload import learning_rate_factor

NUM_MARKS = 12
TIMEOUT_S = 7_200.0
# No time-out of a starved machine is to change a result.
NETWORK = Network(shared_memory="off", timeout_s=60.0)

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
class RunSettings:
    """All that a run's result follows from; runs are found again by it."""

    row: str
    data: DataName
    learning_rate: float
    seed: int
    size: Size
    workers: int = 4
    graph: str = "ring"
    beta2: float = 0.999

    @property
    def key(self) -> str:
        """The same for equal settings, and for no others: how the library is called is in it."""
        options = RowName.parse(self.row).gossip_options(self.graph)
        return msgspec.json.encode(asdict(self) | {"gossip": options}, order="sorted").decode()


class Point(msgspec.Struct, frozen=True):
    """Of a curve: share of the run's tokens, seconds of training, loss in bits a byte.

    The loss is None where it is no finite number.
    """

    share: float
    seconds: float
    loss: float | None


class RunResult(msgspec.Struct, frozen=True):
    """What a run came to.

    loss: validation loss of the average at the end, bits a byte; None where it diverged.
    bytes_per_parameter_step: that a worker's sockets sent, over parameters and its steps.
    samples_per_s: the sum of the workers' own speeds.
    comm_rate: exchanges, all-reduces or averages per worker and gradient step.
    """

    loss: float | None
    curve: list[Point]
    bytes_per_parameter_step: float
    samples_per_s: float
    samples: int
    comm_rate: float
    seconds: float


class Text(Gpt):
    """The recipe's task, scored on fewer windows."""

    num_validation_windows: ClassVar[int] = 1024


class CurveText(Text):
    """The same on a few of them, so that a curve costs little."""

    num_validation_windows: ClassVar[int] = 128


def make_task(settings: RunSettings, kind: type[Text] = Text) -> Text:
    """Data and model."""
    size = settings.size
    options = BytesGptOptions(
        data=None,
        batch_size=size.batch_size,
        context=size.context,
        width=size.width,
        depth=size.depth,
        heads=4,
        learning_rate=settings.learning_rate,
    )
    return kind(options, disjoint=settings.data == "disjoint")


def num_parameters(size: Size) -> int:
    """Of the model."""
    settings = RunSettings("none", "common", 1.0, 0, size)
    return sum(parameter.numel() for parameter in make_task(settings).make_model().parameters())


def run(settings: RunSettings, on_poll: Callable[[], None] = lambda: None) -> RunResult:
    """Train once and score it; ``on_poll`` is called now and then.

    Raises:
        WorkerFailedError: a worker failed, of something else than parameters that diverged.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            workers = gossipdp.launch(
                train,
                world_size=settings.workers,
                args=(settings, folder),
                environment={
                    "OMP_NUM_THREADS": "1",
                    "GOSSIPDP_LOG": os.environ.get("GOSSIPDP_LOG", "error"),
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RUST_LOG": "error",  # of torchft
                },
                timeout_s=TIMEOUT_S,
                on_poll=on_poll,
            )
        except WorkerFailedError as error:
            if "PoisonedError" not in str(error):
                raise
            return RunResult(None, [], 0.0, 0.0, 0, 0.0, time.monotonic() - started_s)
        loaded = [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=True)
            for rank in range(settings.workers)
        ]
    return score(settings, workers, loaded, time.monotonic() - started_s)


@dataclass(frozen=True)
class Trained:
    """What a worker did; marks: seconds from its start at each share of the run."""

    steps: int
    trained_s: float
    ended_s: float
    sent_bytes: int
    exchanges: float
    marks_s: tuple[float, ...]


def train(settings: RunSettings, folder: str) -> Trained:
    """Train, as one worker; its copies of the parameters and the average go to a file in folder."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    name = RowName.parse(settings.row)
    size, num_workers = settings.size, settings.workers
    task = make_task(settings)
    torch.manual_seed(settings.seed)
    net = task.make_model()
    options = name.gossip_options(settings.graph)
    plan = RowPlan(
        name=settings.row,
        num_workers=num_workers,
        samples=size.steps * size.batch_size * num_workers,
        seed=settings.seed,
        batch_size=size.batch_size,
        make_optimizer=partial(make_optimizer, beta2=settings.beta2),
        method=name.method,
        options=options | {"network": NETWORK} if options else {},
        period=name.period or 1,
    )
    row = name.make(net, plan)
    try:
        sent_before = tcp_bytes_sent()
        started_s = time.monotonic()
        steps, marks = _loop(
            row, task, task.train_loader(rank, num_workers, settings.seed), settings
        )
        trained_s = time.monotonic() - started_s
        sent_bytes = tcp_bytes_sent() - sent_before
        exchanges = row.account().get("exchanges", 0.0)
        row.finish()
        ended_s = time.monotonic() - started_s
        copies = torch.stack([copy for _, copy in marks])
        torch.save({"copies": copies, "average": _copy(net)}, Path(folder) / f"{rank}.pt")
    finally:
        row.close()
    marks_s = tuple(at_s - started_s for at_s, _ in marks)
    return Trained(steps, trained_s, ended_s, sent_bytes, exchanges, marks_s)


def _loop(
    row: Row, task: Text, loader: Any, settings: RunSettings
) -> tuple[int, list[tuple[float, Tensor]]]:
    """Train until the run has used up its samples: the loop that every row runs."""
    steps = 0
    marks: list[tuple[float, Tensor]] = []
    while True:
        for batch in loader:
            progress = row.progress()
            while len(marks) < NUM_MARKS and progress >= len(marks) / NUM_MARKS:
                marks.append((time.monotonic(), _copy(row.net)))
            if progress >= 1:
                return steps, marks
            row.set_rate(settings.learning_rate * learning_rate_factor(progress))
            row.step(task.loss(row.model, batch))
            steps += 1


@torch.no_grad()
def _copy(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).clone()


def score(
    settings: RunSettings,
    workers: list[Trained],
    loaded: list[dict[str, Tensor]],
    seconds: float,
) -> RunResult:
    """Evaluate what the workers of a run gave back."""
    whole, few = make_task(settings), make_task(settings, CurveText)
    model = whole.make_model()

    def loss(task: Text, parameters: Tensor) -> float | None:
        nn.utils.vector_to_parameters(parameters, model.parameters())
        value = task.evaluate(model)
        return value if math.isfinite(value) else None

    average = loaded[0]["average"]
    means = torch.stack([one["copies"] for one in loaded]).mean(dim=0)
    curve = [
        Point(mark / NUM_MARKS, max(worker.marks_s[mark] for worker in workers), loss(few, mean))
        for mark, mean in enumerate(means)
    ]
    curve.append(Point(1.0, max(worker.ended_s for worker in workers), loss(few, average)))
    size, steps = settings.size, sum(worker.steps for worker in workers)
    sent_bytes = sum(worker.sent_bytes for worker in workers)
    return RunResult(
        loss=loss(whole, average),
        curve=curve,
        bytes_per_parameter_step=sent_bytes / (steps * means.shape[1]),
        samples_per_s=sum(worker.steps * size.batch_size / worker.trained_s for worker in workers),
        samples=steps * size.batch_size,
        comm_rate=sum(worker.exchanges for worker in workers) / steps,
        seconds=seconds,
    )
