"""``GossipDataParallel``: an ``nn.Module`` that trains together with its other workers."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from gossipdp import logs
from gossipdp.parallel import training_state
from gossipdp.parallel.allreduce_engine import AllReduceEngine
from gossipdp.parallel.checkpoint import find_resumption, layout_of
from gossipdp.parallel.checkpointer import Checkpointer, Stateful
from gossipdp.parallel.data_position import DataPosition
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.export import check_name, copied_state, write_state
from gossipdp.parallel.flat_parameters import named_tensors
from gossipdp.parallel.gossip_engine import GossipEngine
from gossipdp.parallel.options import GossipOptions, whole_number
from gossipdp.parallel.run_configuration import describe
from gossipdp.parallel.run_logging import RunLogging, one_loss, plain_values
from gossipdp.parallel.stats import Consolidated, Stats
from gossipdp.parallel.status_page import StatusPage
from gossipdp.runtime.environment import Environment

Batch = TypeVar("Batch")


class GossipDataParallel(nn.Module):
    r"""Train a module on many workers, each at its own pace.

    Every worker makes its own model and optimizer, wraps them, and runs its own plain loop. In the
    background it exchanges parameters with one neighbour of the graph at a time; what an exchange
    brings is added right after ``optimizer.step()``, so a forward and backward pass never sees
    parameters change under it. With ``method="a2cid2"`` a momentum ``c`` makes a poorly connected
    graph mix nearly as fast as a well connected one:

    .. math::
        dx_i = \eta (\tilde x_i - x_i) dt - \gamma g_i dN_i - \tfrac12 \sum_j (x_i - x_j) dM_{ij},
        \qquad c_i = \tilde x_i - x_i

    All workers start from rank 0's parameters. Ranks come from the environment that
    ``gossipdp run`` or torchrun sets; without one the model trains alone.

    Args:
        module: the model, on its device already.
        optimizer: any torch optimizer over the module's parameters, or several; a gradient step
            is a step of the first.
        graph: a name (``ring``, ``complete``, ``exponential``, ...) or a networkx graph whose
            nodes are the ranks.
        comm_rate: exchanges per worker per gradient step, in expectation.
        method: ``a2cid2``; ``gossip`` (plain pairwise averaging); ``allreduce`` (the synchronous
            baseline, through DistributedDataParallel); ``none`` (workers train apart: the control).
        budget_samples: how many samples all workers together train on; ends :meth:`batches` and
            scales :meth:`progress`. None: no budget.
        neighbour_policy: ``fresh`` (the default), ``poisson``, ``available`` or ``scheduled``.
        pace: ``free`` (training never waits) or ``strict`` (it waits rather than fall more than
            ``max_lag`` exchanges behind the comm rate; never for the dead or silent).
        max_lag: for ``strict``: own demands for an exchange that may be unserved, 1 to 3.
        timeout_s: silence after which a neighbour is suspect.
        start_timeout_s: how long to wait for the other workers at the start.
        seed: of the exchanges' timing and of :attr:`worker_seed`; the same on all workers.
        samples_per_step: samples of one gradient step; None counts the first dimension of the
            first tensor given to ``forward`` in training mode.
        exchange_frozen: exchange frozen parameters too, so that they may be unfrozen later.
        host, port: where this worker listens; by default chosen, and told to the others.
        secret: shared by all workers of the run; by default the launcher's.
        max_bytes_per_s: what each link of this worker sends at most, to leave a shared network
            room for others; None: no cap. Linux only.
        tls_cert, tls_key, tls_ca: PEM files for mutual TLS on every link: this worker's
            certificate and key, and the authority that signed all workers' certificates. All
            three or none; by default those of ``gossipdp run``.
        checkpoint_dir: where checkpoints go, each worker's to a directory of its own in it.
        checkpoint_every: gradient steps of this worker from one checkpoint to the next; None:
            only :meth:`save_checkpoint`.
        keep_checkpoints: how many of each worker's checkpoints stay.
        resume: ``"auto"`` goes on from the newest checkpoints in ``checkpoint_dir``, and starts
            afresh where there are none; a path goes on from those in that directory; None starts
            afresh. The same on all workers.
        on_poison: what to do when this worker's parameters hold NaN or infinity, which it never
            sends: ``stop`` exchanges no more and makes each ``optimizer.step()`` raise
            PoisonedError; ``refresh`` takes parameters and optimizer state of a live worker and
            goes on; ``exit`` leaves the run and raises PoisonedError.
        wire_format: how parameters travel in exchanges: ``parameters`` (as they are), ``bfloat16``
            (half the bytes) or ``lattice8`` (a quarter; a code of the difference to the peer).
            The same on all workers; what is held and averaged at the end stays exact.
        shared_memory: ``auto``: neighbours on one host read each other's parameters in place
            where the system allows it; ``off``: all goes through sockets.
        status_port: worker r shows its status for ``gossipdp top`` and Prometheus on this port
            + r, without a password; 0: on any free one; None: GOSSIPDP_STATUS_PORT, and no status
            without it.
        status_host: the address on which it does; by default GOSSIPDP_STATUS_HOST, else loopback.
        log_dir: where this worker writes its log, ``worker-RANK.jsonl``, from which
            ``gossipdp report`` makes a page; None: GOSSIPDP_LOG_DIR, and no log without it.

    Raises:
        ValueError: an argument is wrong.
        RendezvousError: a worker did not arrive, or a port is in use.
        RefusedError: model, method, graph, rate, wire format or secret differ from the others'.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> model = GossipDataParallel(net, optimizer, budget_samples=64)
        >>> for batch in model.batches([torch.zeros(16, 4)]):
        ...     optimizer.zero_grad()
        ...     model(batch).sum().backward()
        ...     optimizer.step()
        >>> model.consolidate().samples
        64

    Departures from the paper (arXiv 2306.08289): the pair (x, c) is held in place of (x, x_tilde),
    which makes any optimizer work unchanged; both ends of an exchange apply the same delta, so the
    mean of x + c/2 is conserved; time is measured in the worker's own communication periods.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        graph: Any = "ring",
        comm_rate: float = 1.0,
        method: Literal["a2cid2", "gossip", "allreduce", "none"] = "a2cid2",
        budget_samples: int | None = None,
        neighbour_policy: str = "fresh",
        pace: Literal["free", "strict"] = "free",
        max_lag: int = 2,
        timeout_s: float = 5.0,
        start_timeout_s: float = 120.0,
        seed: int = 0,
        samples_per_step: int | None = None,
        exchange_frozen: bool = False,
        host: str | None = None,
        port: int | None = None,
        secret: str | None = None,
        max_bytes_per_s: float | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 3,
        resume: str | os.PathLike[str] | None = None,
        on_poison: Literal["stop", "refresh", "exit"] = "stop",
        wire_format: Literal["parameters", "bfloat16", "lattice8"] = "parameters",
        shared_memory: Literal["auto", "off"] = "auto",
        status_port: int | None = None,
        status_host: str | None = None,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        logs.configure()  # GOSSIPDP_LOG, under whichever launcher
        budget_samples = whole_number("budget_samples", budget_samples)
        samples_per_step = whole_number("samples_per_step", samples_per_step)
        if budget_samples is not None and budget_samples < 1:
            raise ValueError(f"budget_samples is at least 1, or None, not {budget_samples}")
        if samples_per_step is not None and samples_per_step < 1:
            raise ValueError(f"samples_per_step is at least 1, or None, not {samples_per_step}")
        options = GossipOptions(
            graph=graph,
            comm_rate=comm_rate,
            method=method,
            neighbour_policy=neighbour_policy,
            pace=pace,
            max_lag=max_lag,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            seed=seed,
            exchange_frozen=exchange_frozen,
            host=host,
            port=port,
            secret=secret,
            max_bytes_per_s=max_bytes_per_s,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            resume=resume,
            on_poison=on_poison,
            wire_format=wire_format,
            shared_memory=shared_memory,
            status_port=status_port,
            status_host=status_host,
        )
        optimizers = _optimizers(optimizer)
        environment = Environment.read()
        directory = None if checkpoint_dir is None else Path(checkpoint_dir)
        resumption = None
        # One that comes into a run that goes on takes a live worker's state, and writes beside it.
        if not environment.is_joining:
            resumption = find_resumption(
                resume,
                directory,
                rank=environment.rank,
                num_workers=environment.num_workers,
                method=method,
                layout=layout_of(named_tensors(module)),
            )
        if resumption is not None:
            training_state.restore(resumption.training, optimizers)
        self.module = module
        self._budget_samples = budget_samples
        self._samples_per_step = samples_per_step
        self._forwarded_samples = 0
        self._seed = options.seed
        self._status = StatusPage.wanted(options, environment)
        make_engine = AllReduceEngine if method == "allreduce" else GossipEngine
        try:
            self._engine: Engine = make_engine(
                module, optimizers, options, resumption, self._status
            )
        except BaseException:
            if self._status is not None:
                self._status.close()
            raise
        self._position = DataPosition()
        self._is_consolidated = False
        try:
            self._checkpointer = Checkpointer(
                self._engine,
                optimizers,
                self._position,
                method=method,
                directory=directory,
                every=options.checkpoint_every,
                keep=options.keep_checkpoints,
                resumption=resumption,
                is_joining=environment.is_joining,
                resume=resume,
            )
            if self._status is not None:
                self._status.show(self._engine, self._checkpointer, options, budget_samples)
            self._logging: RunLogging | None = None
            log_dir = log_dir or os.environ.get("GOSSIPDP_LOG_DIR") or None
            if log_dir is not None:
                self._logging = RunLogging(
                    Path(log_dir),
                    self._engine,
                    describe(module, optimizers, options, self._engine, budget_samples),
                    joins=environment.is_joining,
                    resumes=resumption is not None,
                )
            self._handles = [
                each.register_step_post_hook(_boundary_hook(weakref.ref(self), index))
                for index, each in enumerate(optimizers)
            ]
            self._handles.append(
                module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                    _loaded_hook(weakref.ref(self))
                )
            )
        except BaseException:
            self._engine.close()
            if self._status is not None:
                self._status.close()
            raise

    # Who and how far.

    @property
    def rank(self) -> int:
        """The rank of this worker, 0 to ``num_workers`` - 1."""
        return self._engine.rank

    @property
    def num_workers(self) -> int:
        """Workers in the run."""
        return self._engine.num_workers

    @property
    def worker_seed(self) -> int:
        """A seed for this worker's data order, distinct for each worker and each of its lives."""
        return (self._seed * 1_000_003 + self.rank) * 1_009 + self._engine.incarnation

    @property
    def finished(self) -> bool:
        """Whether the workers together have used up the budget; False without one."""
        return self._is_budget_used()

    def _is_budget_used(self) -> bool:
        budget = self._budget_samples
        return budget is not None and self._engine.total_samples() >= budget

    def progress(self) -> float:
        """Progress of the whole run: 0 to 1 of the budget, or own gradient steps without one."""
        if self._budget_samples is None:
            return float(self._engine.step_number)
        return min(1.0, self._engine.total_samples() / self._budget_samples)

    def stats(self) -> Stats:
        """What this worker did so far."""
        checkpointer = self._checkpointer
        return replace(
            self._engine.stats(),
            checkpoints=checkpointer.num_saved,
            checkpoints_failed=checkpointer.num_failed,
            checkpoint_pause_seconds=checkpointer.pause_s,
        )

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward pass; in training mode it counts the samples."""
        if self.training and torch.is_grad_enabled():
            self._checkpointer.take_due(in_loop=True)
            self.count_batch((args, kwargs))
        return self._engine.forward_module(*args, **kwargs)

    def count_batch(self, batch: Any) -> None:
        """Count the samples of ``batch`` as those of the step under way.

        For loops that call the wrapped module itself and not the wrapper, as frameworks do: else
        calling the wrapper in training mode does this. With ``samples_per_step`` it does nothing.
        """
        if self._samples_per_step is None:
            self._forwarded_samples += _batch_size(batch)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, epoch after epoch, until the budget is used up.

        Loader and samplers, also one within a batch sampler, get ``set_epoch`` at the start of each
        epoch where they have it, as a ``DistributedSampler`` does. In a resumed run the first call
        goes on in the middle of the epoch where the checkpoint was taken: the batches before it are
        loaded and dropped.

        Raises:
            ValueError: there is no budget, or the loader yields nothing.
        """
        if self._budget_samples is None:
            raise ValueError("batches() needs to know when to end: wrap with budget_samples=")
        self._position.begin()
        with self._checkpointer.of_batches():
            while not self._is_budget_used():
                for batch in self._position.epoch(loader):
                    yield batch
                    self._checkpointer.take_due()
                    if self._is_budget_used():
                        return
                if self._position.batch == 0:
                    raise ValueError(
                        "the loader yielded no batch: it is empty, or it is an iterator that can "
                        "be gone through only once (pass the loader itself)"
                    )

    def log(self, *, loss: Tensor | float | None = None, **values: bool | float | str) -> None:
        """Put the loss of a step, and numbers or text by name, into the run's log and its status.

        Cheap, and nothing at all without ``log_dir`` and ``status_port``: a loss on a device is not
        waited for. The log holds the mean loss of every fifth of a second, and the latest of each
        value; a value may also be logged after :meth:`consolidate`.

        Raises:
            ValueError: the loss is not one number, or a value is neither number nor text.

        Example:
            >>> net = nn.Linear(4, 2)
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            >>> model = GossipDataParallel(net, optimizer)
            >>> model.log(loss=0.7, learning_rate=0.1)
            >>> model.close()
        """
        if self._logging is None and self._status is None:
            return
        kept = None if loss is None else one_loss(loss)
        plain = plain_values(values)
        if self._logging is not None:
            self._logging.log(kept, plain)
        if self._status is not None:
            self._status.log(kept, plain)

    def averaged(self) -> AbstractContextManager[None]:
        """Within ``with model.averaged():`` the module holds the average of all live workers.

        The other workers go on training: each sends its parameters as they are at that moment
        (x + c/2, and float buffers). This worker's own parameters are untouched, go on serving
        exchanges, and are back at the end. Costs one more copy of the model and its transfer from
        every worker; do not step the optimizer within. A worker without a state to give (it takes
        another's, or is poisoned) is asked for ``timeout_s``, then left out with a warning.

        Raises:
            PeerLostError: a live worker did not answer.
            PoisonedError: this worker's parameters hold NaN or infinity, and ``on_poison`` did not
                cure that.
            RuntimeError: within it, on a step, a checkpoint or the loading of a state.
        """
        return self._engine.averaged()

    def consolidate(self) -> Consolidated:
        """End the run: wait for all live workers, then give all of them the exact average.

        Serves exchanges until every live worker has called it, waiting as long as they show life.
        Afterwards parameters and float buffers are equal on all workers bit for bit, integer
        buffers are those of the lowest rank, and the wrapper is closed: the module trains on
        alone, if at all.
        """
        self._checkpointer.take_due(finally_=True)
        if self._logging is not None:
            self._logging.consolidating()
        result = self._engine.consolidate()
        self._is_consolidated = True
        if self._logging is not None:
            self._logging.ended(result)
        self.close()
        return result

    def close(self) -> None:
        """Stop taking part: end the background thread and all links. Happens by itself at exit."""
        for handle in self._handles:
            handle.remove()
        if self._logging is not None:
            self._logging.close()
        self._engine.close()
        self._checkpointer.close()
        if self._status is not None:
            self._status.close()

    def _boundary(self, optimizer_index: int) -> None:
        samples = 0
        if optimizer_index == 0:
            samples = self._samples_per_step or self._forwarded_samples
            self._forwarded_samples = 0
        self._engine.boundary(optimizer_index, samples)
        if optimizer_index == 0:
            self._checkpointer.stepped()
            if self._status is not None:
                self._status.stepped()
            if self._logging is not None:
                self._logging.stepped(samples)

    # State.

    def save_checkpoint(self, directory: str | os.PathLike[str] | None = None) -> Path:
        """Save all that this worker needs to go on, between two steps; return the file's path.

        By default into ``checkpoint_dir``. It returns when the file is on the disk. Those beyond
        the newest ``keep_checkpoints`` of this worker in that directory are removed then.

        Raises:
            ValueError: no directory, one that holds another run's checkpoints, or a value in an
                optimizer's state that is neither tensor, number, text, list, tuple nor dict.
            OSError: it could not be written; the checkpoints before it are there still.
            PoisonedError: parameters hold NaN or infinity.
        """
        return self._checkpointer.save(None if directory is None else Path(directory))

    def also_checkpoint(self, **others: Stateful) -> None:
        """Save these objects' states with the checkpoints: schedulers, a GradScaler.

        Where the run resumed, each gets its saved state at once, by ``load_state_dict``.

        Raises:
            ValueError: a name is taken, or the run resumed and has made a step since.

        Example:
            >>> net = nn.Linear(4, 2)
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            >>> model = GossipDataParallel(net, optimizer)
            >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            >>> model.also_checkpoint(schedule=schedule)
            >>> model.close()
        """
        self._checkpointer.register(others)

    def save_averaged(self, path: str | os.PathLike[str]) -> None:
        """Save the average of all live workers as the module's plain ``state_dict``.

        A name that ends in ``.pt`` or ``.pth`` gives what ``torch.load(path, weights_only=True)``
        loads; one in ``.safetensors`` what ``safetensors.torch.load_file`` does, with a tied
        parameter under each of its names. The file appears whole or not at all. Before
        :meth:`consolidate` the other workers go on training, as in :meth:`averaged`; after it the
        module holds the average and is saved as it is.

        Raises:
            ValueError: another name, or a state that the format cannot hold.
            PeerLostError: a live worker did not answer.
            PoisonedError: as from :meth:`averaged`.
            OSError: it could not be written.
        """
        check_name(path)
        with contextlib.nullcontext() if self._is_consolidated else self.averaged():
            state = copied_state(self.module)
        write_state(path, state)

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """The wrapped module's own ``state_dict``, under its own names, as of now."""
        values: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        self._engine.export(values)
        return values

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the wrapped module; what exchanges had brought and the momentum are dropped."""
        if assign:
            raise ValueError(
                "assign=True would replace the parameters that the optimizer and the exchanges "
                "hold; load without it"
            )
        return self.module.load_state_dict(state_dict, strict=strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GossipDataParallel":
        """Let ``.to()`` and its like pass where they change nothing; else say so at once."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._engine.check()
        return self


def _optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise ValueError(f"{each!r} is no torch.optim.Optimizer")
        try:
            each.register_step_post_hook(lambda *_: None).remove()
        except AttributeError as error:
            raise ValueError(
                f"this {type(each).__name__} calls no hooks after a step, so it is a shell around "
                "the optimizer that does: give that one, or for Accelerate's wrap with "
                "gossipdp.integrations.accelerate.gossip_data_parallel"
            ) from error
    if not optimizers:
        raise ValueError("give at least one optimizer")
    return optimizers


def _boundary_hook(
    model: "weakref.ref[GossipDataParallel]", index: int
) -> Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]:
    """The step post-hook; weak, so that an optimizer does not keep a dropped model's threads."""

    def hook(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        alive = model()
        if alive is not None and not _has_skipped(optimizer):
            alive._boundary(index)

    return hook


def _has_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step moved nothing: GradScaler calls a fused optimizer's all the same.

    On a device this waits for the step, as the boundary does anyway.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _loaded_hook(
    model: "weakref.ref[GossipDataParallel]",
) -> Callable[[nn.Module, object], None]:
    """The hook after loading; a copy of the module brings it along, but is not what trains."""

    def hook(module: nn.Module, incompatible_keys: object) -> None:
        alive = model()
        if alive is not None and module is alive.module:
            alive._engine.loaded()

    return hook


def _batch_size(value: Any) -> int:
    """The first dimension of the first tensor in nested arguments; 1 where there is none."""
    found = _first_tensor(value)
    return found.shape[0] if found is not None and found.dim() > 0 else 1


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    return next((t for t in map(_first_tensor, value) if t is not None), None)
