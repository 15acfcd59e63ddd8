"""The part of one wrapper in the run: its engine, hooks, log and checkpoints."""

import contextlib
import dataclasses
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossipdp.launcher.environment import Environment
from gossipdp.launcher.reports import Report, send_report
from gossipdp.logs import OF_RUN
from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint import Layout, Resumption, find_resumption, layout_of
from gossipdp.parallel.checkpoint_files import in_use
from gossipdp.parallel.checkpointer import Checkpointer
from gossipdp.parallel.counted_batches import CountedBatches
from gossipdp.parallel.data_position import DataPosition
from gossipdp.parallel.gossip_engine import GossipEngine
from gossipdp.parallel.hooks import Hooks, warn_of_step_counters, warn_of_steps_alone
from gossipdp.parallel.monitoring import Monitoring
from gossipdp.parallel.optimizer_watch import OptimizerWatch
from gossipdp.parallel.options import GOSSIP_METHODS, Options
from gossipdp.parallel.packing import check_savable
from gossipdp.parallel.shards import Replica
from gossipdp.parallel.termination import TERMINATION
from gossipdp.parallel.views import named_tensors

logger = logging.getLogger("gossipdp")


class Session:
    """Engine, checkpoints, log, data and hooks of one wrapper.

    Neither it nor its parts refer to the wrapper: so a wrapper that is dropped is collected, which
    closes the session.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Options
    ) -> None:
        self.replica = replica = Replica.of(module, options.mesh, Environment.read())
        environment = replica.environment
        saving = options.checkpoints
        if saving.directory is not None:
            place = str(Path(saving.directory).absolute())
            send_report(Report(checkpoints=(place, saving.resume == "auto")))
        options = dataclasses.replace(options, checkpoints=replica.own_files(options.checkpoints))
        self._optimizers = optimizers
        self._saves = options.checkpoints.directory is not None
        held = named_tensors(module, optimizers, options.exchange)
        if self._saves:
            check_savable(  # a parameter of a class of its own is saved as its plain values
                {name: torch.empty(0, dtype=x.dtype, device="cpu") for name, x in held.items()},
                "the module",
                "change its type, or register it as a buffer with persistent=False, or wrap "
                "without a directory for checkpoints",
            )
            for optimizer in optimizers:
                self._check_savable(optimizer)
        # A worker that joins a running job takes a live worker's state, and adds its own files.
        is_joining = environment.is_joining
        resumption = None if is_joining else _resumption(layout_of(held), options, replica)
        if resumption is not None:
            training_state.restore(resumption.training, optimizers)
        self.monitoring = Monitoring(options, environment)
        self._unchecked = set(range(len(optimizers)))
        self._process_id = os.getpid()
        self.num_steps = 0
        self.average_saved_at_step = -1
        position = DataPosition()
        # If any of this fails, the parts opened so far are closed in reverse order.
        with contextlib.ExitStack() as opened:
            opened.callback(self.monitoring.close)
            self.engine = GossipEngine(
                module,
                optimizers,
                options,
                replica,
                resumption=resumption,
                page=self.monitoring.page,
            )
            opened.callback(self.engine.close)
            self.checkpointer = Checkpointer(self.engine, position)
            opened.callback(self.checkpointer.close)
            self.batches = CountedBatches(self.engine, position, self.checkpointer)
            self.monitoring.begin(
                self.engine, self.checkpointer.stats, lambda: self.batches.budget_samples
            )
            # A compiled wrapper breaks its graph here, and so compiles the module's graphs alone.
            disable: Callable[[Any], Any] = torch.compiler.disable
            self.begin_forward = disable(self._begin_forward)
            choice = options.exchange.moments
            exchanged = choice if isinstance(choice, Mapping) else ()
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            is_moved = options.method in GOSSIP_METHODS and self.engine.world_size > 1
            self._watches = [
                OptimizerWatch(each, names, exchanged, is_moved=is_moved) for each in optimizers
            ]
            if resumption is not None:
                logger.warning(
                    "the run goes on from step %d of worker %d in %s, %s, with world_size %d",
                    resumption.counts.step,
                    self.engine.rank,
                    saving.directory if saving.resume == "auto" else saving.resume,
                    resumption.start,
                    self.engine.world_size,
                    extra=OF_RUN,
                )
            counting_once = self.batches.counting_once
            self._hooks = Hooks(self.engine, stepped=self.stepped, counting_once=counting_once)
            self.engine.report_ready()
            opened.pop_all()

    def _check_savable(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn at once of values that no checkpoint and no joining worker could take.

        Raises:
            ValueError: there are such values, and checkpoints are to be saved.
        """
        kind = type(optimizer).__name__
        try:
            check_savable(
                training_state.capture([optimizer])["optimizers"][0],
                f"the state of the {kind}",
                "use an optimizer that keeps plain tensors, numbers and text, or wrap without a "
                "directory for checkpoints",
            )
        except ValueError as error:
            if self._saves:
                raise
            if self.engine.world_size > 1:
                logger.warning(
                    "a worker that joins or starts again cannot take over this one's optimizer, "
                    "since %s",
                    error,
                    extra=OF_RUN,
                )

    def _begin_forward(self, batch: Any) -> None:
        self.checkpointer.at_forward()
        self.batches.count_forward(batch)

    def stepped(self, optimizer_index: int) -> None:
        """Count the step of an optimizer that has ended; that of the first is a gradient step."""
        self._watches[optimizer_index].stepped()
        if optimizer_index in self._unchecked:  # it has made its state in this step
            self._unchecked.discard(optimizer_index)
            self._check_savable(self._optimizers[optimizer_index])
        if optimizer_index != 0:
            self.engine.boundary(optimizer_index, 0)
            return
        samples = self.engine.boundary(0, self.batches.take_counted())
        self.checkpointer.stepped()
        self.monitoring.stepped(samples)
        self.num_steps += 1
        if self.engine.world_size > 1 and self.num_steps == 2:
            warn_of_step_counters(self._optimizers)
        self.batches.check_counted(self.num_steps)

    def _warn_of_no_average(self, is_early: bool) -> None:
        """Warn once a run that a script ends by itself and has not saved the average.

        To have evaluated the average, as after each epoch, is not enough: a script that saves its
        module afterwards still saves one worker's. ``is_early``: the budget is not used up.
        """
        engine = self.engine
        failed = getattr(sys, "last_value", None) is not None  # its traceback was printed
        if os.getpid() != self._process_id or failed or TERMINATION.was_asked:
            return
        if self.average_saved_at_step == engine.step_number or not engine.speaks_at_exit(is_early):
            return
        logger.warning(
            "worker %d ends without consolidate(): %s%s",
            engine.rank,
            "the budget is not used up, and the others train on without this worker. To end all, "
            "call model.stop() on one, and model.consolidate() on every worker"
            if is_early
            else "its module holds its own parameters, not the average of the workers. Call "
            "model.consolidate() on every worker, after the loop, before you evaluate or save",
            f"; its newest checkpoint is {newest}" if (newest := self.checkpointer.newest) else "",
        )

    def close(self, *, is_dropped: bool = False) -> None:
        """Close all parts; if one raises, close the others all the same.

        Garbage is collected in any thread, even in one that this call ends. Such a thread would
        wait for itself, so a new thread closes the parts then. A forked child leaves its parent's
        run alone. If the wrapper ``is_dropped``, or the script ends, a warning says so, and another
        one comes at the next step.
        """
        if os.getpid() != self._process_id:
            return
        is_early = self.batches.budget_samples is not None and not self.batches.finished
        self.batches.close()
        if is_dropped:
            self._warn_of_no_average(is_early)
            warn_of_steps_alone(self._optimizers)

        def close() -> None:
            with contextlib.ExitStack() as parts:  # the last one first
                parts.callback(self.checkpointer.close)
                parts.callback(self.engine.close)
                parts.callback(self.monitoring.close)
                parts.callback(self._hooks.remove)

        if threading.current_thread().name.startswith("gossipdp"):
            # No daemon: Python ends those at exit, and one that is within torch would then take the
            # process with it (std::terminate). No part of close waits for what stands still.
            threading.Thread(target=close, name="closing a dropped model", daemon=False).start()
        else:
            close()


def _resumption(layout: Layout, options: Options, replica: Replica) -> Resumption | None:
    """Find the checkpoint that the run goes on from; one step for all processes of a replica.

    A process that was killed may have written one checkpoint more, or less, than the others. A run
    that lives would remove files meanwhile, so it is looked for first; this one has no name yet.
    """
    saving, environment = options.checkpoints, replica.environment
    directory = None if saving.directory is None else Path(saving.directory)
    newest_step = math.inf
    with contextlib.nullcontext() if directory is None else in_use(directory, ""):
        while True:
            resumption = find_resumption(
                saving.resume,
                directory,
                rank=environment.rank,
                world_size=environment.world_size,
                layout=layout,
                newest_step=newest_step,
            )
            (steps,) = replica.gather(-1 if resumption is None else resumption.counts.step)
            if len(set(steps)) == 1:
                return resumption
            newest_step = min(steps)


def close_at_exit(finalizer: "weakref.finalize[Any, Any]") -> None:
    """Close a worker that is still open at exit."""
    detached = finalizer.detach()
    if detached is not None:
        detached[1](is_dropped=True)
