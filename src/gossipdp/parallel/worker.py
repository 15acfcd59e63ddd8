"""What takes part in the run for one wrapper, and how it is put together and taken apart."""

import contextlib
import dataclasses
import logging
import math
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossipdp.launcher.environment import Environment
from gossipdp.parallel import training_state
from gossipdp.parallel.allreduce_engine import AllReduceEngine
from gossipdp.parallel.checkpoint import Resumption, find_resumption, layout_of
from gossipdp.parallel.checkpointer import CLOSE_TIMEOUT_S, EXIT_TIMEOUT_S, Checkpointer
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.feed import DataPosition, Feed
from gossipdp.parallel.flat_parameters import named_tensors
from gossipdp.parallel.gossip_engine import GossipEngine
from gossipdp.parallel.hooks import Hooks, warn_of_step_counters, warn_of_steps_alone
from gossipdp.parallel.monitoring import Monitoring, describe
from gossipdp.parallel.optimizer_watch import OptimizerWatch
from gossipdp.parallel.options import Options
from gossipdp.parallel.shards import Replica

logger = logging.getLogger("gossipdp")


class Worker:
    """Engine, checkpoints, log, data and hooks of one wrapper.

    It does not know the wrapper, and neither does anything below: one that is dropped is closed.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Options
    ) -> None:
        self.replica = replica = Replica.of(module, options.mesh, Environment.read())
        environment = replica.environment
        options = dataclasses.replace(options, checkpoints=replica.own_files(options.checkpoints))
        self._is_saving = options.checkpoints.directory is not None
        if self._is_saving:
            training_state.check_tensors(named_tensors(module))
        joins = environment.is_joining
        # One that comes into a run that goes on takes a live worker's state, and writes beside it.
        resumption = None if joins else _resumption(module, options, replica)
        if resumption is not None:
            training_state.restore(resumption.training, optimizers)
        # What is shown of a replica is what its first process sees.
        self.monitoring = Monitoring(options, environment, is_shown=environment.shard == 0)
        self._optimizers = optimizers
        self._process_id = os.getpid()
        self.num_steps = 0
        position = DataPosition()
        # What was opened is closed in the reverse order, wherever this fails.
        with contextlib.ExitStack() as opened:
            opened.callback(self.monitoring.close)
            make_engine = AllReduceEngine if options.method == "allreduce" else GossipEngine
            self.engine: Engine = make_engine(
                module,
                optimizers,
                options,
                replica,
                resumption=resumption,
                page=self.monitoring.page,
            )
            opened.callback(self.engine.close)
            self.checkpointer = Checkpointer(
                self.engine,
                optimizers,
                position,
                options,
                resumption,
                is_joining=joins,
                is_sharded=replica.is_sharded,
            )
            opened.callback(self.checkpointer.close)
            self.monitoring.begin(
                self.engine,
                self.checkpointer.stats,
                partial(describe, module, optimizers, options, self.engine.world_size),
                joins=joins,
                resumes=resumption is not None,
            )
            opened.pop_all()
        self.feed = Feed(
            position,
            self.engine.total_samples,
            lambda: self.engine.is_stopped,
            options,
            between=self.checkpointer.take_due,
            within=self.checkpointer.of_batches,
        )
        self._watches: list[OptimizerWatch] = []
        if options.method != "allreduce":
            choice, names = (
                options.exchange_moments,
                {id(p): n for n, p in module.named_parameters()},
            )
            exchanged = choice if isinstance(choice, Mapping) else ()
            self._watches = [OptimizerWatch(each, names, exchanged) for each in optimizers]
        self._not_stepped = set(range(len(optimizers)))
        self._hooks = Hooks(
            module,
            optimizers,
            stepped=self.stepped,
            loaded=self.engine.loaded,
            watches_others=options.method != "allreduce",
        )

    def stepped(self, optimizer_index: int) -> None:
        """An optimizer's step has ended; that of the first is a gradient step."""
        if self._watches:
            self._watches[optimizer_index].stepped()
        if optimizer_index in self._not_stepped:
            self._not_stepped.remove(optimizer_index)
            self._check_state(self._optimizers[optimizer_index])
        if optimizer_index != 0:
            self.engine.boundary(optimizer_index, 0)
            return
        samples = self.engine.boundary(0, self.feed.take_counted())
        self.checkpointer.stepped()
        self.monitoring.stepped(samples)
        self.num_steps += 1
        if self.num_steps == 2 and self.engine.world_size > 1:
            warn_of_step_counters(self._optimizers)
        self.feed.check_counted(self.num_steps)

    def _check_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Say now what checkpoints and joiners would meet later."""
        try:
            training_state.check_optimizers([optimizer])
        except ValueError as error:
            name = type(optimizer).__name__
            if self._is_saving:
                raise ValueError(
                    f"checkpoints cannot hold what the {name} keeps: {error}. Use another "
                    "optimizer, or wrap without checkpoints"
                ) from None
            if self._watches and self.engine.world_size > 1:
                logger.warning(
                    "no worker can join this run, or come back after a death, since what the %s "
                    "keeps cannot be given to it: %s",
                    name,
                    error,
                )

    def close(
        self, checkpoint_timeout_s: float = CLOSE_TIMEOUT_S, *, is_dropped: bool = False
    ) -> None:
        """Close all parts, each of them whatever another raises.

        Garbage is collected in any thread, one of those that are ended here among them: what would
        wait for itself is left to a thread of its own. A forked child leaves its parent's run
        alone. If the wrapper ``is_dropped``, a step that follows gets a warning.
        """
        if os.getpid() != self._process_id:
            return
        if is_dropped:
            warn_of_steps_alone(self._optimizers)

        def close() -> None:
            with contextlib.ExitStack() as parts:  # the last one first
                parts.callback(self.checkpointer.close, checkpoint_timeout_s)
                parts.callback(self.engine.close)
                parts.callback(self.monitoring.close)
                parts.callback(self._hooks.remove)

        if threading.current_thread().name.startswith("gossipdp"):
            # No daemon: Python ends those at exit, and one that is within torch would then take the
            # process with it (std::terminate). Each part of close has a deadline.
            threading.Thread(target=close, name="closing a dropped model", daemon=False).start()
        else:
            close()


def _resumption(module: nn.Module, options: Options, replica: Replica) -> Resumption | None:
    """What the run goes on from; all processes of a replica from the same step.

    One that was killed may have written one checkpoint more, or less, than the others.
    """
    saving, environment = options.checkpoints, replica.environment
    newest_step = math.inf
    while True:
        resumption = find_resumption(
            saving.resume,
            None if saving.directory is None else Path(saving.directory),
            rank=environment.rank,
            world_size=environment.world_size,
            method=options.method,
            outer=str(options.outer or ""),
            layout=layout_of(named_tensors(module)),
            newest_step=newest_step,
        )
        (steps,) = replica.gather(-1 if resumption is None else resumption.counts.step)
        if len(set(steps)) == 1:
            return resumption
        newest_step = min(steps)


def close_at_exit(finalizer: "weakref.finalize[Any, Any]") -> None:
    """Close the worker that nobody has closed, in the short time that there is at exit."""
    detached = finalizer.detach()
    if detached is not None:
        detached[1](EXIT_TIMEOUT_S)
