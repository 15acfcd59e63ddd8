"""``GossipDataParallel``: an ``nn.Module`` that trains together with its other workers."""

import atexit
import contextlib
import copy
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gossipdp import logs
from gossipdp.parallel.checkpoint_files import Average, check_name, copied_state, write_average
from gossipdp.parallel.checkpointer import Stateful
from gossipdp.parallel.counted_batches import arguments, dataset_size
from gossipdp.parallel.hooks import check_arguments, checked_optimizers
from gossipdp.parallel.options import Checkpoints, Counting, Exchange, Monitor, Network, Options
from gossipdp.parallel.stats import Consolidated, Stats, warn_of_steps_after
from gossipdp.parallel.worker import Worker
from gossipdp.rules import WireFormatName, at_least_1, whole_number

Batch = TypeVar("Batch")


def seed_of(seed: int, process: int, life: int = 0) -> int:
    """Return a seed below 2**32, distinct for each process of a run and its first 4,096 lives."""
    return (seed * 2_654_435_761 + (process << 12) + life % (1 << 12)) % (1 << 32)


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
        optimizer: a torch optimizer over the module's parameters, or several; a gradient step is a
            step of the first. It may keep momenta, and no copy of the weights (float32 masters,
            slow weights, schedule-free): exchanges would not move that.
        graph: a name (``exponential``, the paper's ``ring``, ...) or a networkx graph whose
            nodes are the ranks.
        comm_rate: exchanges per worker per gradient step, in expectation; ``"auto"``: as many as
            this worker's links and processor have room for, 4 at most
            (:mod:`~gossipdp.protocol.exchange_rate`). The same on all workers. None: ``"auto"``,
            but 1 with ``pace="strict"``, which wants a fixed rate.
        method: ``a2cid2``; ``gossip`` (plain pairwise averaging); ``none`` (no exchanges, for
            comparison).
        wire_format: the form of parameters in exchanges: ``full`` (as they are), ``bfloat16``
            (half the bytes) or ``lattice8`` (a quarter; a code of the difference to the peer).
            ``auto``: lattice8 over a network; full over loopback, in memory that both workers share
            and on a GPU. The same on all workers; values held and averaged at the end stay exact.
        budget_samples: samples that all workers together train on; ends :meth:`batches` and
            scales :meth:`progress`. The same on all workers. None: no budget, or that of
            :meth:`epochs`.
        seed: of the exchanges' timing and of :attr:`worker_seed`; the same on all workers.
        mesh: for a model that ``fully_shard`` has sharded over one dimension of a device mesh: the
            other one, along which the replicas lie. Without it, or where it has size 1, all
            processes of ``torch.distributed`` are one replica, as ``gossipdp run
            --nproc-per-replica`` starts them. See docs/shards.md.
        exchange: moments, frozen parameters, buffers, pace: see :class:`~gossipdp.Exchange`.
        counting: the way in which samples are counted: see :class:`~gossipdp.Counting`.
        network: addresses, secret, time-outs, TLS: see :class:`~gossipdp.Network`.
        checkpoints: where and when to save, where to go on from: :class:`~gossipdp.Checkpoints`.
        monitor: log and status port: see :class:`~gossipdp.Monitor`.

    It is a context manager too: the end of ``with`` closes it; call :meth:`consolidate` before.

    Raises:
        ValueError: an argument is wrong, or parameters share memory (tied through ``.data``).
        RendezvousError: a worker did not arrive, or a port is in use.
        RefusedError: model, method, graph, rate, format, budget or secret differ from others', or
            a directory cannot be written to, or another run is alive in it.

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
    so that every optimizer that keeps no copy of x works unchanged; both ends of an exchange apply
    the same delta, so the mean of x + c/2 is conserved; time is measured in the worker's own
    communication periods.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        graph: Any = "exponential",
        comm_rate: float | Literal["auto"] | None = None,
        method: Literal["a2cid2", "gossip", "none"] = "a2cid2",
        wire_format: WireFormatName = "auto",
        budget_samples: int | None = None,
        seed: int = 0,
        mesh: DeviceMesh | None = None,
        exchange: Exchange | None = None,
        counting: Counting | None = None,
        network: Network | None = None,
        checkpoints: Checkpoints | None = None,
        monitor: Monitor | None = None,
        **unknown: NoReturn,  # typed so that type checkers refuse it where it is written
    ) -> None:
        super().__init__()
        check_arguments(module, unknown, GossipDataParallel)
        logs.configure()  # GOSSIPDP_LOG, under whichever launcher
        options = Options(
            graph=graph,
            comm_rate=comm_rate,
            method=method,
            wire_format=wire_format,
            budget_samples=budget_samples,
            seed=seed,
            mesh=mesh,
            exchange=exchange or Exchange(),
            counting=counting or Counting(),
            network=network or Network(),
            checkpoints=checkpoints or Checkpoints(),
            monitor=monitor or Monitor(),
        )
        optimizers = checked_optimizers(optimizer)
        self.module = module
        self._consolidated: Consolidated | None = None
        self._worker = worker = Worker(module, optimizers, options)
        self._dropped = weakref.finalize(self, worker.close, is_dropped=True)
        self._dropped.atexit = False  # a forked worker clears what runs at exit, but not finalizers
        atexit.register(self._dropped)

    # Who and how far.

    @property
    def rank(self) -> int:
        """The rank of this worker, 0 to ``world_size`` - 1; with shards, of its replica."""
        return self._worker.rank

    @property
    def is_lead(self) -> bool:
        """True on one live worker at a time: let that worker evaluate, save and print.

        It is the live worker of the lowest rank, as this worker knows, and when that one dies or
        leaves, the next. Until the news of a death is everywhere, for about ``timeout_s``, there
        may be none; if a worker is taken for dead by mistake, two. After :meth:`consolidate` it is
        the lowest rank of the average. With shards it is true on all processes of that replica, and
        changes at a step.
        """
        return self._worker.is_lead

    @property
    def world_size(self) -> int:
        """Workers in the run; with shards, replicas."""
        return self._worker.world_size

    @property
    def worker_seed(self) -> int:
        """A seed for this worker's data order, below 2**32.

        Distinct for each worker, or process of a replica, and each of its first 4,096 lives.
        """
        environment = self._worker.replica.environment
        process = self.rank * environment.num_shards + environment.shard
        return seed_of(self._worker.options.seed, process, self._worker.incarnation)

    @property
    def finished(self) -> bool:
        """True once the workers have used up the budget together, or one called :meth:`stop`."""
        return self._worker.batches.finished

    def progress(self) -> float:
        """Progress of the whole run, 0 to 1; workers differ by the news still on its way.

        It is the share of ``budget_samples``, or of what :meth:`epochs` goes through, that all
        workers together have trained on. Without either it is 0 until the first step.

        Raises:
            RuntimeError: there is neither, and a step was made.
        """
        if self._worker.batches.budget_samples is not None:
            return min(1.0, self._worker.total_samples() / self._worker.batches.budget_samples)
        if not self._worker.has_stepped:
            return 0.0
        raise RuntimeError(
            "progress() cannot tell how far the run is, since nothing says where it ends: wrap "
            "with budget_samples=, or loop over model.epochs(loader, n)"
        )

    def stats(self) -> Stats:
        """Return the counts of this worker so far."""
        return self._worker.stats()

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module.

        In a loop of your own it counts the samples, in training mode and with gradients enabled. A
        loop over :meth:`batches` or :meth:`epochs` has counted them already, so you may call the
        module itself, or a compiled one, instead.
        """
        if (self.training or self.module.training) and torch.is_grad_enabled():
            self._worker.begin_forward(arguments(args, kwargs))
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, for DDP's scripts: to accumulate, step less often."""
        return contextlib.nullcontext()

    def count_batch(self, batch: Any) -> None:
        """Count the samples of ``batch`` as those of the step under way.

        For loops that call the wrapped module itself and not the wrapper, as frameworks do. It does
        nothing with ``Counting(samples_per_step)``, and within :meth:`batches` and :meth:`epochs`.
        """
        self._worker.batches.count_forward(batch)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, pass after pass, until the budget is used up.

        Each batch that it yields is counted, by the first tensor in it, as trained on by the next
        step of the first optimizer: whether you call the wrapper, the module itself or a compiled
        one, in training mode or not.

        Loader, dataset and samplers, also one within a batch sampler, get ``set_epoch`` at the
        start of each pass where they have it, as a ``DistributedSampler`` does. In a resumed run
        the first call goes on in the middle of the pass where the checkpoint was taken: the batches
        before it are loaded and dropped. A later call goes on with the budget, and with the number
        of the pass; if nothing of the budget is left, a warning says so.

        Raises:
            ValueError: there is no budget, the loader yields nothing, or a batch holds no tensor
                whose samples could be counted.
            RuntimeError: after :meth:`consolidate` or :meth:`close`.
        """
        if self._worker.batches.budget_samples is None:
            raise ValueError(
                "batches() needs to know when to end: wrap with budget_samples=, or loop over "
                "model.epochs(loader, n)"
            )
        return self._worker.batches.until_budget(loader)

    def epochs(
        self, loader: Iterable[Batch], num_epochs: int, *, samples: int | None = None
    ) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield ``num_epochs`` epochs of the whole run, each as its number and its batches.

        An epoch ends when all workers together have trained on as many samples as the dataset
        holds, so each worker yields its share: a fast one more batches than a slow one. It counts
        batches and goes on after a resume as :meth:`batches` does. A worker that was busy for more
        than an epoch, with an evaluation say, goes on with the number that the others are at.

        A second call, as in a notebook, lengthens the run by its epochs, and their numbers go on;
        :meth:`progress` falls accordingly. If the loop over the first call was broken off, the
        second goes on where it stopped, and its number of epochs counts in place of the first's.

        Args:
            loader: of this worker; ``len(loader.dataset)`` samples make an epoch, of whatever part
                this worker's sampler takes from it.
            num_epochs: how many.
            samples: of one epoch of all workers together, where the loader's dataset is not the
                whole, or not as long on all workers, or does not know its length, as with
                ``batch_size=None``.

        Raises:
            ValueError: there is a budget already, or nothing says how long an epoch is.
            RuntimeError: after :meth:`consolidate` or :meth:`close`.
        """
        if self._worker.options.budget_samples is not None:
            raise ValueError(
                "epochs() sets the budget itself, and there is one already: wrap without "
                "budget_samples="
            )
        num_epochs = at_least_1("num_epochs", num_epochs)
        size = dataset_size(loader) if samples is None else whole_number("samples", samples)
        if size < 1:
            raise ValueError(
                f"an epoch of {size} samples never ends, or never begins; give samples="
            )
        return self._worker.batches.epochs(loader, num_epochs, size)

    def stop(self) -> None:
        """End the run early, on all workers.

        :meth:`batches` and :meth:`epochs` yield no more, here at once and elsewhere a fraction of a
        second later, when the news is there; :attr:`finished` is true. Then call
        :meth:`consolidate` as usual. With shards the processes of a replica end together, after one
        more step. A checkpoint does not keep the stop: a run that is resumed trains on.
        """
        self._worker.stop()

    def log(self, *, loss: Tensor | float | None = None, **values: bool | float | str) -> None:
        """Put the loss of a step, and numbers or text by name, into the run's log and its status.

        It is cheap, as it does not wait for a loss on a device, and does nothing without
        ``monitor``. The log holds the mean loss of every fifth of a second (in long runs of 1/2000
        of the time so far, of 256 losses at most), and the latest of each value; a value may also
        be logged after :meth:`consolidate`.

        Raises:
            ValueError: the loss is not one number, or a value is neither number nor text.
        """
        self._worker.monitoring.log(loss, values)

    def averaged(self) -> AbstractContextManager[None]:
        """Within ``with model.averaged():`` the module holds the average of all live workers.

        The other workers go on training: each sends its parameters as they are at that moment
        (x + c/2, and BatchNorm's statistics). This worker's own parameters are untouched, go on
        serving exchanges, and are back at the end. Do not step the optimizer within. Sums go up a
        binary tree over the workers: each worker sends one model at most, and this one holds two
        more copies. They are computed in float32 where parameters have 16 bits. If a worker dies
        meanwhile, this one asks again without it. One that lives and gives no state (it joins, is
        poisoned, or fails twice) is left out with a warning. Within itself, and after
        :meth:`consolidate`, it changes nothing: the module holds the average then.

        Raises:
            PoisonedError: this worker's parameters hold NaN or infinity, and it sends none of them.
            RuntimeError: within it, on a step, a checkpoint or the loading of a state.
        """
        return contextlib.nullcontext() if self._consolidated else self._worker.averaged()

    def consolidate(self, *, timeout_s: float | None = None) -> Consolidated:
        """End the run: wait for all live workers, then give all of them the exact average.

        It serves exchanges until every live worker has called it. It waits as long as they show
        life, or for ``timeout_s`` if that is given: then the average goes on without those that
        still train (a training loop may hang). Give all workers the same; of those that wait, the
        lowest rank's ``timeout_s`` counts, from its own call. While it waits, a line every 10
        seconds names the others, and when each last made a step. If a worker has called it and
        lives, but gives nothing to the average for a few time-outs, the others go on without that
        one too. A worker that is left out ends with an average of its own;
        ``Consolidated.world_size`` is the number of workers in the average.

        Consolidate several models in the same order on all workers: else they wait for each other.

        Afterwards parameters and buffers are equal on all workers that were averaged, bit for bit:
        those that exchanges do not average are the lowest rank's. (One made after wrapping stays as
        it is, with a warning.) The wrapper is closed: further steps train this module alone.

        Raises:
            RuntimeError: it was called before.
        """
        if self._worker.is_closed:
            raise RuntimeError("consolidate() was called before, or the model is closed")
        self._worker.end_averaged()  # it may be called within it, or after Ctrl+C there
        self._worker.checkpointer.take_last()
        self._worker.monitoring.consolidating()
        is_common_end = self._worker.batches.finished
        known = {member.rank: member.gradient_steps for member in self._worker.view()}
        began_s = time.monotonic()
        result = self._worker.consolidate(math.inf if timeout_s is None else timeout_s)
        has_waited = time.monotonic() - began_s > self._worker.options.network.timeout_s
        self._consolidated = result
        self._worker.checkpointer.take_last(is_averaged=True)
        # If it hardly waited, what exceeds its epochs was late news: counts take a while to spread.
        goes_beyond = has_waited and self._worker.batches.exceeds_epochs(result.samples)
        if not is_common_end or goes_beyond:
            warn_of_steps_after(self.rank, known, result)
        self._worker.monitoring.ended(result)
        self.close()
        return result

    def close(self) -> None:
        """Stop taking part: end the background thread and all links.

        It happens by itself at exit, and when nothing refers to the wrapper any more.
        """
        atexit.unregister(self._dropped)
        if self._dropped.detach() is not None:
            self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # State.

    def save_checkpoint(self) -> Path:
        """Save all that this worker needs to go on, between two steps; return the file's path.

        It returns when the file is on the disk. Then it removes this worker's files but the newest
        ``checkpoints.keep``.

        Raises:
            ValueError: ``checkpoints`` names no directory, or a value in an optimizer's state is
                neither tensor, number, text, list, tuple nor dict.
            OSError: it could not be written; earlier checkpoints are still there.
            PoisonedError: parameters hold NaN or infinity.
        """
        checkpointer = self._worker.checkpointer
        return checkpointer.finish_save(self._worker.in_run(checkpointer.begin_save))

    def also_checkpoint(self, **others: Stateful) -> None:
        """Save these objects' states with the checkpoints: schedulers, a GradScaler.

        If the run resumed, each gets its saved state at once, by ``load_state_dict``. Each is asked
        for its state now, to see whether it can be saved.

        Raises:
            ValueError: a name is taken, a state cannot be saved, or the run resumed and has made a
                step since.
        """
        self._worker.checkpointer.register(others)

    def save_averaged(self, path: str | os.PathLike[str], *, base: bool = True) -> None:
        """Save the average of all live workers as the module's plain ``state_dict``.

        A name that ends in ``.pt`` or ``.pth`` gives what ``torch.load(path, weights_only=True)``
        loads; one in ``.safetensors`` what ``safetensors.torch.load_file`` does, with a tied
        parameter under each of its names. With ``base=False`` a large frozen base is left out, and
        the file holds its adapters alone. The file appears whole or not at all, and its folder is
        made. Before :meth:`consolidate` the other workers go on training, as in :meth:`averaged`;
        after it, and within :meth:`averaged`, the module holds the average and is saved as it is.
        With shards all processes of the replica call it, and the first gathers the whole model and
        writes it.

        The file says of which run it is, of how many workers, and how many samples the run had
        trained on. If others of the run have ended apart and saved there, an average of more
        workers, or of as many and more samples, their model stays: this one goes beside it, into
        ``NAME-of-worker-RANK``, with a warning.

        Raises:
            ValueError: another name, or a state that the format cannot hold.
            PoisonedError: as from :meth:`averaged`.
            OSError: it could not be written.
        """
        check_name(path)
        is_writer = self._worker.replica.environment.shard == 0
        with self.averaged():
            without = () if base else self._worker.frozen_names()
            state = copied_state(self.module, is_kept=is_writer, without=without)
        if is_writer:
            worker, end = self._worker, self._consolidated
            samples = worker.total_samples() if end is None else end.samples
            rank = self.rank if worker.lead is None else worker.lead
            num_workers = 0 if end is None else end.world_size
            average = Average(worker.run_id, samples, rank, end is not None, num_workers)
            write_average(path, state, average)
        self._worker.average_saved_at_step = self._worker.step_number

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the wrapped module's own ``state_dict``, under its own names, as of now."""
        values: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        self._worker.export(values)
        return values

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the wrapped module; drop what exchanges had brought, and the momentum."""
        if assign:
            raise ValueError(
                "assign=True would replace the parameters that the optimizer and the exchanges "
                "hold; load without it"
            )
        return self.module.load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, as a part of another module, the names of :meth:`state_dict`, or those of DDP."""
        inner = f"{prefix}module."
        if not any(inner + name in state_dict for name in self.module.state_dict()):
            for name in [each for each in state_dict if each.startswith(prefix)]:
                state_dict[inner + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GossipDataParallel":
        """Let ``.to()`` and its like pass if they change nothing; else raise at once."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._worker.check()
        return self

    def __getattr__(self, name: str) -> Any:
        """Raise for an unknown name; if the wrapped module has it, say so."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name != "module" and hasattr(self.module, name):
                raise AttributeError(
                    f"the wrapper has no {name!r}, and the module has: use model.module.{name}"
                ) from None
            raise error

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the module, as for an EMA of it. It takes no part in the run."""
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "the wrapper holds threads and links and cannot be pickled: save model.module, "
            "model.state_dict(), or by model.save_averaged(path) the average of all workers"
        )
