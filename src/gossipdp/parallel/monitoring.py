"""The log and the status port of a worker.

Training counts a step, and leaves a loss as a number; both are single assignments or appends, and
values that other threads read are replaced whole. A loss on a device is read at the next boundary,
which has waited for it anyway. The log's thread and the status server's threads do the rest: they
write, and build pages. An error there costs lines, never training.
"""

import contextlib
import logging
import math
import os
import platform
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

import gossipdp
from gossipdp.gossip.counters import Counters, metrics_of
from gossipdp.graph.topology import build_graph
from gossipdp.launcher.environment import Environment
from gossipdp.links.clock import boot_id, since_boot_s
from gossipdp.observe.log import FILE_PATTERN, RecentExchange, RunLogWriter, Value, worker_file
from gossipdp.observe.status import NoticeStatus, WorkerStatus
from gossipdp.parallel.checkpoint_files import in_use
from gossipdp.parallel.entry import Entry
from gossipdp.parallel.options import Options
from gossipdp.parallel.stats import Consolidated, Stats

if TYPE_CHECKING:
    from gossipdp.observe.server import StatusPort

logger = logging.getLogger("gossipdp")

LOOK_EVERY_S = 0.2
JOIN_TIMEOUT_S = 5.0
MAX_LOSSES = 256
MEAN_OF_LOSSES = 32
MAX_NOTICES = 20
MAX_LOGGED = 100
OPTIONS = ("method", "seed", "wire_format")
NETWORK_OPTIONS = ("shared_memory", "max_megabits_per_s", "timeout_s")
HYPERPARAMETERS = ("lr", "momentum", "betas", "weight_decay")


class Monitoring:
    """One worker's log and status port, if the options or else the environment ask for them."""

    def __init__(self, options: Options, environment: Environment) -> None:
        wanted = options.monitor
        self._is_shown = environment.shard == 0  # a replica's are those of its first process
        self._options = options
        self._unread: deque[Tensor] = deque(maxlen=MAX_LOSSES)
        self._losses: deque[float] = deque(maxlen=MEAN_OF_LOSSES)
        self._values: dict[str, float] = {}
        self._stepped_s: float | None = None
        self._log: RunLogging | None = None
        self._in_use = contextlib.ExitStack()
        self.page: StatusPort | None = None
        port = environment.status_port if wanted.status_port is None else wanted.status_port
        if port is not None and self._is_shown:
            from gossipdp.observe import server  # and http.server, for few runs

            host = wanted.status_host or environment.status_host or "127.0.0.1"
            self.page = server.StatusPort(host, port)

    def begin(
        self,
        worker: Entry,
        stats: Callable[[], Stats],
        budget: Callable[[], int | None],
    ) -> None:
        """Show and write from now on. Other threads call ``stats`` and ``budget``.

        ``budget`` returns the samples that all workers are to train on, as far as is known.
        """
        if self.page is not None:
            from gossipdp.observe.server import pages_of

            self.page.show(pages_of(lambda: self._status(worker, stats(), budget())))
        asked = os.environ.get("GOSSIPDP_LOG_DIR") or None
        directory = self._options.monitor.log_dir or asked
        if directory is None or not self._is_shown:
            return
        if asked and Path(directory).absolute() != Path(asked).absolute():
            logger.warning(
                "the log goes to %s, because the script gives Monitor(log_dir=...); --log-dir or "
                "GOSSIPDP_LOG_DIR, here %s, takes effect only if the script gives none",
                directory,
                asked,
            )
        self._in_use.enter_context(in_use(Path(directory), worker.run_id))
        self._log = RunLogging(Path(directory), worker, stats)

    def stepped(self, samples: int) -> None:
        """Count a gradient step that has ended, with its boundary."""
        self._read_losses()
        if self._log is not None:
            self._log.stepped(samples)
        self._stepped_s = since_boot_s()

    def log(self, loss: Tensor | float | None, values: Mapping[str, object]) -> None:
        """Log and show a loss and values; see ``GossipDataParallel.log``."""
        if self._log is None and self.page is None:
            return
        kept = None if loss is None else _one_loss(loss)
        plain = {_text(name): _plain(name, value) for name, value in values.items()}
        if isinstance(kept, Tensor):
            self._unread.append(kept)
            kept = None
        self._keep(kept, plain)

    def _keep(self, loss: float | None, values: Mapping[str, Value]) -> None:
        if self._log is not None:
            self._log.log(loss, values)
        if loss is not None:
            self._losses.append(loss)
        for name, value in values.items():
            is_new = name not in self._values
            if isinstance(value, int | float) and not (is_new and len(self._values) >= MAX_LOGGED):
                self._values[name] = float(value)

    def _read_losses(self) -> None:
        while self._unread:
            # Torch refuses the results of a CUDA graph once the graph has run again.
            with contextlib.suppress(RuntimeError):
                self._keep(float(self._unread.popleft()), {})

    def consolidating(self) -> None:
        """Log that the worker has come to the end and waits for the others."""
        self._read_losses()
        if self._log is not None:
            self._log.write_last(self._log.writer.consolidating)

    def ended(self, end: Consolidated) -> None:
        """Log the end: all workers hold the average."""
        if (log := self._log) is not None:
            log.write_last(
                lambda: log.writer.end(
                    consensus_distance=end.consensus_distance, num_averaged=end.world_size
                )
            )

    def close(self) -> None:
        """Write the last records and stop showing. A second call does nothing."""
        self._read_losses()
        if self._log is not None:
            self._log.close()
        self._in_use.close()
        if self.page is not None:
            self.page.close()

    # By the status server's threads.

    def _status(self, worker: Entry, stats: Stats, budget: int | None) -> WorkerStatus:
        now_s, stepped_s = since_boot_s(), self._stepped_s
        members, neighbours = worker.view()
        # Copied in one step, whatever the training loop does.
        losses, logged = list(self._losses.copy()), self._values.copy()
        own = [each for each in members if each.rank == worker.rank]
        return WorkerStatus(
            rank=stats.rank,
            incarnation=max((each.incarnation for each in own), default=worker.incarnation),
            restarts=max((each.restarts for each in own), default=0),
            num_workers=stats.world_size,
            run_id=worker.run_id,
            method=self._options.method,
            graph=worker.graph,
            comm_rate=self._options.asked_comm_rate,
            host=socket.gethostname(),
            process_id=os.getpid(),
            state="averaging" if worker.is_consolidating else "training",
            run_samples=worker.total_samples(),
            budget_samples=budget,
            since_step_s=math.nan if stepped_s is None else now_s - stepped_s,
            logged={**logged, "loss": _mean_loss(losses)} if losses else {**logged},
            members=members,
            neighbours=neighbours,
            notices=tuple(
                NoticeStatus(each.rank, each.kind, max(0.0, now_s - each.at_s), each.silent_s)
                for each in stats.noticed[-MAX_NOTICES:]
            ),
            **{name: getattr(stats, name) for name in metrics_of(Counters)},
        )


class RunLogging:
    """The log of one worker, ``worker-RANK.jsonl`` in ``directory``, and the thread that writes it.

    The lock is held while something is written, by the thread or, at the end of the run, by the
    caller, and never in a gradient step.
    """

    def __init__(self, directory: Path, worker: Entry, stats: Callable[[], Stats]) -> None:
        rank, num_workers = worker.rank, worker.world_size
        # A worker that came into a run that goes on, perhaps not for the first time, goes on with
        # the log of its earlier process in the same run; one that resumes, whatever its run.
        joins, resumes = worker.replica.environment.is_joining, worker.resumption is not None
        self.writer = RunLogWriter(
            worker_file(directory, rank),
            boot_id=boot_id(),
            run_id=worker.run_id,
            goes_on=joins,
            resumes=resumes,
        )
        if not (joins or resumes):  # the logs of an earlier run's workers that this one lacks
            kept = {worker_file(directory, each) for each in range(num_workers)}
            for path in set(directory.glob(FILE_PATTERN)) - kept:
                path.unlink(missing_ok=True)
        self.writer.start(rank=rank, num_workers=num_workers, configuration=describe(worker))
        self._worker, self._stats = worker, stats
        self._gradient_steps = self._samples = 0
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._values: deque[Mapping[str, Value]] = deque()
        self._began_s: float | None = None
        self._has_written_began = self._has_warned = self._is_closed = False
        self._recorded = 0, 0  # steps and exchanges
        self._num_noticed = 0
        self._recent_s = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"gossipdp-log-{rank}", daemon=True)
        self._thread.start()

    # By the training loop.

    def stepped(self, samples: int) -> None:
        """Count a gradient step."""
        self._samples += samples
        self._gradient_steps += 1
        if self._began_s is None:
            self._began_s = since_boot_s()
            self._wake.set()

    def log(self, loss: float | None, values: Mapping[str, Value]) -> None:
        """Keep a loss and values; after the end write them at once."""
        if loss is not None:
            self._losses.append(loss)
        if values:
            self._values.append(values)
            if self._is_closed:
                self._write_values()

    def write_last(self, write: Callable[[], None]) -> None:
        """Write all that is new, and then one more line."""
        with self._lock:
            self._look(finally_=True)
            write()

    def close(self) -> None:
        """Write the last records and end the thread."""
        if not self._is_closed:
            self._is_closed = True
            self._wake.set()
            self._thread.join(JOIN_TIMEOUT_S)
            self.write_last(self.writer.close)

    # By the thread.

    def _run(self) -> None:
        while not self._is_closed:
            with self._lock:
                self._look()
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()

    def _look(self, finally_: bool = False) -> None:
        try:
            self._write_new(finally_)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the log of worker %d lacks lines that could not be written (%r): training "
                    "goes on",
                    self._worker.rank,
                    error,
                )

    def _write_new(self, finally_: bool) -> None:
        if self._began_s is not None and not self._has_written_began:
            self._has_written_began = True
            self.writer.began(self._began_s)
        stats = self._stats()
        for notice in stats.noticed:
            if notice.number > self._num_noticed:
                self._num_noticed = notice.number
                self.writer.notice(notice.rank, notice.kind, notice.at_s, notice.silent_s)
        # Exchanges go on after the last step, in consolidate().
        counted = self._gradient_steps, stats.exchanges
        is_due = finally_ and counted != self._recorded
        if is_due or (self._gradient_steps and self.writer.wait_s() <= 0):
            is_due, self._recorded = True, counted
            self._write_counts(stats)
        if is_due or finally_:
            self._write_values()

    def _write_counts(self, stats: Stats) -> None:
        recent = [one for one in stats.recent_exchanges if one.ended_s > self._recent_s]
        if recent:
            self._recent_s = recent[-1].ended_s
        # Steps and samples of this process: those of a checkpoint's past are in the log already.
        self.writer.counts(
            msgspec.structs.replace(
                stats, gradient_steps=self._gradient_steps, samples=self._samples
            ),
            loss=_mean_loss([self._losses.popleft() for _ in range(len(self._losses))]),
            recent=tuple(
                RecentExchange(
                    one.peer,
                    one.initiated,
                    round(one.started_s - self.writer.started_s, 4),
                    round(one.ended_s - one.started_s, 5),
                )
                for one in recent
            ),
        )

    def _write_values(self) -> None:
        latest: dict[str, Value] = {}
        while self._values:
            latest |= self._values.popleft()
        if latest:
            self.writer.values(latest)


def _one_loss(loss: Tensor | float) -> Tensor | float:
    if not isinstance(loss, Tensor):
        try:
            return float(loss)
        except (TypeError, ValueError):
            raise ValueError(f"log(loss=...) takes one number, not {loss!r}") from None
    if loss.numel() != 1:
        raise ValueError(f"log(loss=...) takes one number, not {tuple(loss.shape)}")
    loss = loss.detach()
    return float(loss) if loss.device.type == "cpu" else loss


def _mean_loss(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses) if losses else math.nan


def _plain(name: str, value: object) -> Value:
    """Return a logged value as Python's own number or text, which JSON can hold."""
    match value:
        case bool():
            return value
        case int():
            if value.bit_length() >= 64:
                raise ValueError(f"log({name}=...) takes whole numbers of at most 64 bits")
            return int(value)
        case float():  # NumPy's double is one
            return float(value)
        case str():
            return _text(value)
    raise ValueError(
        f"log({name}=...) takes numbers and text, not a {type(value).__name__}; of a tensor with "
        "one element, give .item()"
    )


def _text(text: str) -> str:
    """Escape half a surrogate pair, as names of files may hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def describe(worker: Entry) -> dict[str, Any]:
    """Return the configuration of one worker for its log, in plain values that JSON can hold."""
    options = worker.options
    graph = build_graph(options.graph, worker.world_size)
    parameters = list(worker.module.parameters())
    precisions = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    described: dict[str, Any] = {
        "graph": graph.name,
        "workers": worker.world_size,
        "budget_samples": options.budget_samples,
        "comm_rate": options.asked_comm_rate,
        **{name: getattr(options, name) for name in OPTIONS},
        "pace": options.exchange.pace,
        **{name: getattr(options.network, name) for name in NETWORK_OPTIONS},
        "checkpoint_every": options.checkpoints.every_steps,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "precision": ", ".join(sorted(precisions)),
        "device": ", ".join(sorted({parameter.device.type for parameter in parameters})),
        "optimizer": "; ".join(_optimizer(optimizer) for optimizer in worker.optimizers),
        "script": Path(sys.argv[0]).name,
        "host": platform.node(),
        "versions": (
            f"gossipdp {gossipdp.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}"
        ),
    }
    return {name: value for name, value in described.items() if value not in (None, "")}


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0]
    numbers = [
        f"{name}={value:g}" if isinstance(value, int | float) else f"{name}={value}"
        for name in HYPERPARAMETERS
        if (value := group.get(name))
    ]
    return f"{type(optimizer).__name__}({', '.join(numbers)})"
