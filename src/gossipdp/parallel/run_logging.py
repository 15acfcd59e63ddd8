"""The log of a run, written beside training by a thread that training never waits for."""

import contextlib
import logging
import math
import platform
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

import gossipdp
from gossipdp.graph.topology import build_graph, graph_name
from gossipdp.links.clock import boot_id, since_boot_s
from gossipdp.observe.log import (
    FILE_PATTERN,
    ExchangeRecord,
    RecentExchange,
    Value,
    worker_file,
)
from gossipdp.observe.log_writer import RunLogWriter
from gossipdp.observe.status import idle_seconds
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.options import Options
from gossipdp.parallel.stats import Consolidated, Stats

logger = logging.getLogger("gossipdp")

LOOK_EVERY_S = 0.2
MAX_LOSSES = 256
JOIN_TIMEOUT_S = 5.0
MAX_EDGES = 5000
"""Beyond them the graph is named but not listed."""
OPTIONS = (
    "method",
    "comm_rate",
    "neighbour_policy",
    "pace",
    "seed",
    "wire_format",
    "on_nonfinite",
)
NETWORK_OPTIONS = ("shared_memory", "max_bytes_per_s", "timeout_s")
HYPERPARAMETERS = ("lr", "momentum", "betas", "weight_decay")


class RunLogging:
    """Writes the log of one worker from the wrapper's statistics.

    Training counts its steps here and leaves the loss as it is: converting it (which may wait for
    a device), asking for statistics and writing are the thread's work. The counts are whole
    numbers, replaced whole; the lock is held while something is written, by the thread or, at the
    end of the run, by the caller, and never in a gradient step.

    Args:
        directory: the log becomes ``worker-RANK.jsonl`` in it.
        engine: whose statistics are written.
        configuration: for the start record.
        joins: the worker came into a run that goes on, perhaps not for the first time: add to the
            log of a former process of it in the same run, where there is one.
        resumes: add to it, whatever its run.

    Raises:
        OSError: the file cannot be made.
        ValueError: it may go on, and the file there is no log that this version can read.
    """

    def __init__(
        self,
        directory: Path,
        engine: Engine,
        configuration: Mapping[str, Any],
        *,
        joins: bool,
        resumes: bool,
    ) -> None:
        self._engine = engine
        self._writer = RunLogWriter(
            worker_file(directory, engine.rank),
            boot_id=boot_id(),
            run_id=engine.view().run_id,
            goes_on=joins,
            resumes=resumes,
        )
        if not (joins or resumes):
            _remove_others(directory, engine.world_size)
        self._writer.start(
            rank=engine.rank, num_workers=engine.world_size, configuration=configuration
        )
        self._gradient_steps = self._samples = self._recorded_steps = 0
        self._recorded_exchanges = 0
        self._losses: deque[SupportsFloat] = deque(maxlen=MAX_LOSSES)
        self._values: deque[Mapping[str, Value]] = deque()
        self._began_s: float | None = None
        self._has_told_begin = False
        self._num_noticed = 0
        self._recent_s = 0.0
        self._has_warned = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"gossipdp-log-{engine.rank}", daemon=True
        )
        self._thread.start()

    # By the training loop.

    def stepped(self, samples: int) -> None:
        """Count a gradient step."""
        self._samples += samples
        self._gradient_steps += 1
        if self._began_s is None:
            self._began_s = since_boot_s()
            self._wake.set()

    def log(self, loss: Tensor | float | None, values: Mapping[str, Value]) -> None:
        """Take what :func:`one_loss` and :func:`plain_values` made; after the end write at once."""
        if loss is not None:
            self._losses.append(loss)
        if values:
            self._values.append(values)
            if self._is_closed:
                self._write_values()

    def consolidating(self) -> None:
        """The worker has come to the end and waits for the others."""
        with self._lock:
            self._look(finally_=True)
            self._writer.consolidating()

    def ended(self, consolidated: Consolidated) -> None:
        """All workers hold the average."""
        with self._lock:
            self._look(finally_=True)
            self._writer.end(
                consensus_distance=consolidated.consensus_distance,
                num_averaged=consolidated.world_size,
            )

    def close(self) -> None:
        """Write what is left and end the thread. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._wake.set()
            self._thread.join(JOIN_TIMEOUT_S)
            with self._lock:
                self._look(finally_=True)
                self._writer.close()

    # The thread.

    def _run(self) -> None:
        while not self._is_closed:
            with self._lock:
                self._look()
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()

    def _look(self, finally_: bool = False) -> None:
        """Write what is new and due; whatever goes wrong costs lines, not training."""
        try:
            self._write_new(finally_)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the log of worker %d lacks what could not be written (%r): training goes on",
                    self._engine.rank,
                    error,
                )

    def _write_new(self, finally_: bool) -> None:
        if self._began_s is not None and not self._has_told_begin:
            self._has_told_begin = True
            self._writer.began(self._began_s)
        stats = self._engine.stats()
        for notice in stats.noticed:
            if notice.number > self._num_noticed:
                self._num_noticed = notice.number
                self._writer.notice(notice.rank, notice.kind, notice.at_s)
        has_stepped = self._gradient_steps > self._recorded_steps
        # In consolidate() exchanges go on where no step is made.
        is_behind = has_stepped or stats.exchanges > self._recorded_exchanges
        if (finally_ and is_behind) or (self._gradient_steps and self._writer.wait_s() <= 0):
            self._write_records(stats)
        if finally_:
            self._write_values()

    def _write_records(self, stats: Stats) -> None:
        self._recorded_steps, self._recorded_exchanges = self._gradient_steps, stats.exchanges
        losses = [self._losses.popleft() for _ in range(len(self._losses))]
        recent = [one for one in stats.recent_exchanges if one.ended_s > self._recent_s]
        if recent:
            self._recent_s = recent[-1].ended_s
        origin_s = self._writer.started_s
        self._writer.record(
            gradient_steps=self._gradient_steps,
            samples=self._samples,
            loss=mean_loss(losses),
            exchanges=ExchangeRecord(
                time_s=0.0,
                exchanges_initiated=stats.exchanges_initiated,
                exchanges_answered=stats.exchanges_answered,
                exchanges_failed=stats.exchanges_failed,
                exchanges_by_neighbour=stats.exchanges_by_neighbour,
                edge_distance=None if math.isnan(stats.edge_distance) else stats.edge_distance,
                exchange_seconds=round(stats.exchange_seconds, 4),
                waited_seconds=round(stats.waited_seconds, 4),
                bytes_sent=stats.bytes_sent,
                bytes_received=stats.bytes_received,
                shared_bytes_sent=stats.shared_bytes_sent,
                shared_bytes_received=stats.shared_bytes_received,
                recent=tuple(
                    RecentExchange(
                        one.peer,
                        one.initiated,
                        round(one.started_s - origin_s, 4),
                        round(one.ended_s - one.started_s, 5),
                    )
                    for one in recent
                ),
                idle_s=idle_seconds(self._engine.view().members),
            ),
        )
        self._write_values()

    def _write_values(self) -> None:
        latest: dict[str, Value] = {}
        while self._values:
            latest |= self._values.popleft()
        if latest:
            self._writer.values(latest)


def one_loss(loss: Tensor | float) -> Tensor | float:
    """Return a loss to keep, apart from its graph and not waited for.

    Raises:
        ValueError: it is not one number.
    """
    if not isinstance(loss, Tensor):
        try:
            return float(loss)
        except (TypeError, ValueError):
            raise ValueError(f"log(loss=...) takes one number, not {loss!r}") from None
    if loss.numel() != 1:
        raise ValueError(f"log(loss=...) takes one number, not {tuple(loss.shape)}")
    return loss.detach()


def mean_loss(losses: Iterable[SupportsFloat]) -> float | None:
    """Return the mean of the losses that can be read; None where there is none."""
    numbers = []
    for loss in losses:
        # Torch refuses what a CUDA graph has computed once the graph has run again.
        with contextlib.suppress(RuntimeError):
            numbers.append(float(loss))
    return sum(numbers) / len(numbers) if numbers else None


def plain_values(values: Mapping[str, object]) -> dict[str, Value]:
    """Return what a script logs by name as Python's own numbers and text, which JSON can hold.

    A NumPy number that is a ``float`` becomes one; half a surrogate pair, as names of files may
    hold, becomes its escape sequence.

    Raises:
        ValueError: one is neither number nor text.
    """
    return {_text(name): _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: object) -> Value:
    match value:
        case bool():
            return value
        case int():
            if value.bit_length() >= 64:
                raise ValueError(f"log({name}=...) takes whole numbers of at most 64 bits")
            return int(value)
        case float():
            return float(value)
        case str():
            return _text(value)
    raise ValueError(
        f"log({name}=...) takes numbers and text, not a {type(value).__name__}; of a tensor with "
        "one element, give .item()"
    )


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _remove_others(directory: Path, num_workers: int) -> None:
    """Remove the logs of an earlier run's workers that this one does not have."""
    kept = {worker_file(directory, rank) for rank in range(num_workers)}
    for path in directory.glob(FILE_PATTERN):
        if path not in kept:
            path.unlink(missing_ok=True)


def describe(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    options: Options,
    engine: Engine,
) -> dict[str, Any]:
    """The configuration of one worker, for its log; plain values that JSON can hold.

    ``edges`` holds the graph's pairs of ranks, so that a reader needs no name to know the graph.
    """
    graph = build_graph(options.graph, engine.world_size, seed=options.seed)
    parameters = list(module.parameters())
    described: dict[str, Any] = {
        "graph": graph_name(graph),
        "workers": engine.world_size,
        "budget_samples": options.budget_samples,
        **{name: getattr(options, name) for name in OPTIONS},
        **{name: getattr(options.network, name) for name in NETWORK_OPTIONS},
        "checkpoint_every": options.checkpoints.every_steps,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "precision": ", ".join(sorted({_short(parameter.dtype) for parameter in parameters})),
        "device": ", ".join(sorted({parameter.device.type for parameter in parameters})),
        "optimizer": "; ".join(_optimizer(optimizer) for optimizer in optimizers),
        "script": Path(sys.argv[0]).name,
        "host": platform.node(),
        "versions": (
            f"gossipdp {gossipdp.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}"
        ),
    }
    if graph.number_of_edges() <= MAX_EDGES:
        described["edges"] = sorted(sorted(edge) for edge in graph.edges)
    return {name: value for name, value in described.items() if value not in (None, "")}


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Its kind and the numbers of its first group."""
    group = optimizer.param_groups[0]
    numbers = [f"{name}={_number(group[name])}" for name in HYPERPARAMETERS if group.get(name)]
    return f"{type(optimizer).__name__}({', '.join(numbers)})"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
