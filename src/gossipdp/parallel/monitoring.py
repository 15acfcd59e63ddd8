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
from gossipdp.gossip.counters import Counters
from gossipdp.launcher.environment import Environment
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.log import FILE_PATTERN, RunLogWriter, Value, is_of_run, worker_file
from gossipdp.observe.status import WorkerStatus
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


_open_logs: set[Path] = set()
"""Those that models of this process write. The main thread's."""
os.register_at_fork(after_in_child=_open_logs.clear)


class Monitoring:
    """One worker's log and status port, if the options or else the environment ask for them.

    The log is ``worker-RANK.jsonl`` in its directory, and a thread writes it. The lock is held
    while something is written, by that thread or, at the end of the run, by another one; the
    training loop never takes it.
    """

    def __init__(self, options: Options, environment: Environment) -> None:
        wanted = options.monitor
        self._is_shown = environment.shard == 0  # a replica's are those of its first process
        self._options = options
        self._gradient_steps = self._samples = 0  # of this process
        self._stepped_s = math.nan
        self._unread: deque[Tensor] = deque(maxlen=MAX_LOSSES)
        self._losses: deque[float] = deque(maxlen=MEAN_OF_LOSSES)
        self._values: dict[str, float] = {}
        self._new_losses: deque[float] = deque(maxlen=MAX_LOSSES)
        # Replaced, never changed: the log's thread reads it.
        self._new_values: dict[str, Value] = {}
        self._in_use = contextlib.ExitStack()
        self._writer: RunLogWriter | None = None
        self._has_warned = self._is_closed = False
        self._num_logged = 0
        self._ending: dict[str, Any] = {}  # the fields of records from consolidate() on
        self._recorded = 0, 0, 0, 0, 0  # notices, steps, exchanges, calls of log, and the end
        self._recent_s = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self.page: StatusPort | None = None
        port = environment.status_port if wanted.status_port is None else wanted.status_port
        if port is not None and self._is_shown:
            from gossipdp.observe import server  # and http.server, for few runs

            host = wanted.status_host or environment.status_host or "127.0.0.1"
            self.page = server.StatusPort(host, port)

    def begin(
        self, worker: Entry, stats: Callable[[], Stats], budget: Callable[[], int | None]
    ) -> None:
        """Show and write from now on. Other threads call ``stats`` and ``budget``.

        ``budget`` returns the samples that all workers are to train on, as far as is known.
        """
        self._worker, self._stats, self._rank = worker, stats, worker.rank
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
        path = worker_file(Path(directory), worker.rank).absolute()
        if path in _open_logs:
            logger.warning(
                "another model of this process writes the log %s: this one has none. Give each "
                "model a directory of its own, Monitor(log_dir=...)",
                path,
            )
            return
        self._in_use.enter_context(in_use(Path(directory), worker.run_id))
        self._writer = _begun_log(path, worker)
        _open_logs.add(path)
        self._in_use.callback(_open_logs.discard, path)
        name = f"gossipdp-log-{worker.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # By the training loop.

    def stepped(self, samples: int) -> None:
        """Count a gradient step that has ended, with its boundary."""
        self._read_losses()
        self._stepped_s = since_boot_s()
        self._samples += samples
        self._gradient_steps += 1
        if self._gradient_steps == 1:
            self._wake.set()

    def come_again(self) -> None:
        """Go on in the log of the worker's new rank; that of its former one has its work so far."""
        self._gradient_steps = self._samples = 0
        self._rank = self._worker.rank

    def log(self, loss: Tensor | float | None, values: Mapping[str, object]) -> None:
        """Log and show a loss and values; see ``GossipDataParallel.log``."""
        if self._writer is None and self.page is None:
            return
        kept = None if loss is None else _one_loss(loss)
        plain = {_text(name): _plain(name, value) for name, value in values.items()}
        if isinstance(kept, Tensor):
            self._unread.append(kept)
        elif kept is not None:
            self._keep_loss(kept)
        for name, value in plain.items():
            is_new = name not in self._values
            if isinstance(value, int | float) and not (is_new and len(self._values) >= MAX_LOGGED):
                self._values[name] = float(value)
        if plain and self._writer is not None:
            self._new_values = {**self._new_values, **plain}
            self._num_logged += 1
            if self._is_closed:
                self._write_last()

    def _keep_loss(self, loss: float) -> None:
        self._losses.append(loss)
        self._new_losses.append(loss)

    def _read_losses(self) -> None:
        while self._unread:
            # Torch refuses the results of a CUDA graph once the graph has run again.
            with contextlib.suppress(RuntimeError):
                self._keep_loss(float(self._unread.popleft()))

    def consolidating(self) -> None:
        """Log that the worker has come to the end and waits for the others."""
        self._ending = {"state": "averaging"}
        self._write_last()

    def ended(self, end: Consolidated) -> None:
        """Log the end: all workers hold the average."""
        distance = {"consensus_distance": end.consensus_distance}
        self._ending = {"state": "left", "num_averaged": end.world_size, **distance}
        self._write_last()

    def close(self) -> None:
        """Write the last records and stop showing. A second call does nothing."""
        if self._writer is not None and not self._is_closed:
            self._is_closed = True
            self._wake.set()
            self._thread.join(JOIN_TIMEOUT_S)
            self._write_last()
        self._in_use.close()
        if self.page is not None:
            self.page.close()

    def _write_last(self) -> None:
        """Have all that is new written, and wait a while: a disk that hangs must hold up nobody."""
        self._read_losses()
        if self._writer is not None:
            last = threading.Thread(target=self._look_last, daemon=True)
            try:
                last.start()
            except RuntimeError:  # at exit, in Python 3.12.0 and 3.12.1; or no thread is left
                self._look_last()
            else:
                last.join(JOIN_TIMEOUT_S)

    def _look_last(self) -> None:
        with self._lock:
            assert self._writer is not None
            self._look(self._writer, finally_=True)
            if self._is_closed:
                self._writer.close()

    # By the log's thread.

    def _run(self) -> None:
        assert self._writer is not None
        while not self._is_closed:
            with self._lock:
                self._look(self._writer)
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()

    def _look(self, writer: RunLogWriter, finally_: bool = False) -> None:
        try:
            self._write_new(writer, finally_)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                text = "the log %s lacks lines that could not be written (%r): training goes on"
                logger.warning(text, writer.path, error)

    def _write_new(self, writer: RunLogWriter, finally_: bool) -> None:
        path = worker_file(writer.path.parent, self._rank)
        if path != writer.path:  # the rank is another now; an error costs lines alone
            self._writer = _begun_log(path, self._worker)
            writer.close()
            writer, self._recorded = self._writer, (0, 0, 0, 0, 0)
        stats = self._stats()
        num_noticed = max((each.number for each in stats.noticed), default=0)
        # Exchanges go on after the last step, in consolidate().
        ours = self._gradient_steps, stats.exchanges, self._num_logged, len(self._ending)
        counted = num_noticed, *ours
        is_due = finally_ and counted != self._recorded
        # What others wait to see is written at the next look, however rare the records are by then.
        is_new = num_noticed > self._recorded[0] or (self._gradient_steps and not self._recorded[1])
        if is_due or is_new or (self._gradient_steps and writer.wait_s() <= 0):
            self._write_counts(writer, stats)
            self._recorded = counted

    def _write_counts(self, writer: RunLogWriter, stats: Stats) -> None:
        recent = [one for one in stats.recent_exchanges if one.ended_s > self._recent_s]
        if recent:
            self._recent_s = recent[-1].ended_s
        losses = [self._new_losses.popleft() for _ in range(len(self._new_losses))]
        logged, self._new_values = self._new_values, {}
        writer.counts(
            msgspec.structs.replace(
                stats,
                # Of this process: those of a checkpoint's past are in the log already.
                gradient_steps=self._gradient_steps,
                samples=self._samples,
                noticed=tuple(each for each in stats.noticed if each.number > self._recorded[0]),
            ),
            loss=_mean_loss(losses),
            **self._ending,
            logged=logged,
            recent=tuple((one.peer, round(one.ended_s - one.started_s, 5)) for one in recent),
        )

    # By the status server's threads.

    def _status(self, worker: Entry, stats: Stats, budget: int | None) -> WorkerStatus:
        members = worker.view()
        # Copied in one step, whatever the training loop does.
        losses, logged = list(self._losses.copy()), self._values.copy()
        own = [each for each in members if each.rank == worker.rank]
        counters = {name: getattr(stats, name) for name in Counters.__struct_fields__}
        return WorkerStatus(
            **counters | {"noticed": stats.noticed[-MAX_NOTICES:]},
            incarnation=max((each.incarnation for each in own), default=worker.incarnation),
            restarts=max((each.restarts for each in own), default=0),
            run_id=worker.run_id,
            method=self._options.method,
            graph=worker.graph,
            comm_rate=self._options.asked_comm_rate,
            host=socket.gethostname(),
            process_id=os.getpid(),
            state="averaging" if worker.is_consolidating else "training",
            run_samples=worker.total_samples(),
            budget_samples=budget,
            since_step_s=since_boot_s() - self._stepped_s,
            logged={**logged, "loss": _mean_loss(losses)} if losses else {**logged},
            members=members,
        )


def _begun_log(path: Path, worker: Entry) -> RunLogWriter:
    """Return the log of this process, with its start record."""
    # A worker that came into a run that goes on, perhaps not for the first time, goes on with the
    # log of its earlier process in the same run; one that resumes, whatever its run.
    joins, resumes = worker.replica.environment.is_joining, worker.resumption is not None
    writer = RunLogWriter(path, run_id=worker.run_id, goes_on=joins, resumes=resumes)
    if not (joins or resumes):  # the logs of an earlier run's workers that this one lacks
        kept = {worker_file(path.parent, each) for each in range(worker.world_size)}
        for other in set(path.parent.glob(FILE_PATTERN)) - kept:
            if not is_of_run(other, worker.run_id):  # a joiner's, which began before this one
                other.unlink(missing_ok=True)
    configuration = describe(worker)
    writer.start(rank=worker.rank, num_workers=worker.world_size, configuration=configuration)
    return writer


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
    parameters = list(worker.module.parameters())
    precisions = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    described: dict[str, Any] = {
        "graph": worker.graph,
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
