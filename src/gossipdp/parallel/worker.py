"""One worker's part in the run, as the main thread of its process drives it."""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from gossipdp.dynamics.chunks import Chunk, Role
from gossipdp.dynamics.update import is_finite
from gossipdp.errors import PoisonedError, SupersededError
from gossipdp.gossip.sums import Average, Outcome
from gossipdp.launcher.environment import Environment, check_platform
from gossipdp.launcher.reports import REPORT_VARIABLE, Report, send_report
from gossipdp.links.clock import since_boot_s
from gossipdp.logs import OF_RUN, speak_for_run
from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint import find_resumption, layout_of
from gossipdp.parallel.checkpointer import Checkpointer
from gossipdp.parallel.counted_batches import CountedBatches
from gossipdp.parallel.data_position import DataPosition
from gossipdp.parallel.entry import Entry
from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.parallel.hooks import Hooks, warn_of_step_counters, warn_of_steps_alone
from gossipdp.parallel.moments import chosen_moments, kept_moments
from gossipdp.parallel.monitoring import Monitoring
from gossipdp.parallel.optimizer_watch import OptimizerWatch
from gossipdp.parallel.options import Options
from gossipdp.parallel.pace import Pace
from gossipdp.parallel.packing import check_savable
from gossipdp.parallel.shards import Replica
from gossipdp.parallel.stats import (
    Consolidated,
    Stats,
    missing_workers,
    warn_of_absence,
    warn_of_no_average,
)
from gossipdp.parallel.termination import TERMINATION
from gossipdp.parallel.views import View, views_of
from gossipdp.protocol.members import Status

logger = logging.getLogger("gossipdp")

WAIT_LINE_EVERY_S = 10.0
LOOK_AT_THREAD_EVERY_S = 0.05


class Worker(Entry):
    """One worker's part in the run: its steps, copies of its state, and its end.

    It owns the flat parameters, the state shared with the gossip thread, that thread, and all that
    belongs to one wrapper: checkpoints, data, log and hooks. The main thread's part of an exchange
    is in :meth:`stepped`; while it waits for a state at the start, the gossip thread writes x.
    Main thread only; :meth:`stats` and :meth:`view` any thread may call.

    Neither it nor its parts refer to the wrapper: so a wrapper that is dropped is collected, which
    closes the worker.

    Attributes:
        frozen_names: returns the names of what is left alone.
        average_saved_at_step: the step at which the script last saved an average; -1: it has not.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: Options
    ) -> None:
        check_platform()
        self.average_saved_at_step = -1
        self._is_averaged = self.is_closed = False
        self._is_reported = REPORT_VARIABLE not in os.environ  # to a launcher: that it trains
        self._unchecked = set(range(len(optimizers)))
        self._process_id = os.getpid()
        replica = Replica.of(module, options.mesh, Environment.read())
        saving = options.checkpoints
        if saving.directory is not None:
            place = str(Path(saving.directory).absolute())
            send_report(Report(checkpoints=(place, saving.resume == "auto")))
        options = dataclasses.replace(options, checkpoints=replica.own_files(saving))
        views = views_of(module, optimizers, options.exchange)
        held = {view.name: view.tensor for view in views if view.role is not Role.FROZEN}
        self._saves = saving.directory is not None
        if self._saves:
            check_savable(  # a parameter of a class of its own is saved as its plain values
                {name: torch.empty(0, dtype=x.dtype, device="cpu") for name, x in held.items()},
                "the module",
                "change its type, or register it as a buffer with persistent=False, or wrap "
                "without a directory for checkpoints",
            )
            for optimizer in optimizers:
                training_state.check_state(optimizer, is_saved=True)
        # A worker that joins a running job takes a live worker's state, and adds its own files.
        is_joining = replica.environment.is_joining
        layout = layout_of(held)
        averaged = {view.name for view in views if view.role.is_averaged}
        resumption = None
        if not is_joining:
            resumption = find_resumption(options.checkpoints, layout, averaged, replica)
        if resumption is not None:
            training_state.restore(resumption.training, optimizers)
        self.monitoring = Monitoring(options, replica.environment)
        # If any of this fails, the parts opened so far are closed in reverse order.
        with contextlib.ExitStack() as opened:
            opened.callback(self.monitoring.close)
            choice = options.exchange.moments if options.method != "none" else False
            flat = FlatParameters(
                module,
                optimizers,
                views,
                momentum=options.method == "a2cid2",
                moments=chosen_moments(choice, optimizers),
            )
            self._moments = kept_moments(flat.moment_places, optimizers, is_default=choice is True)
            self.frozen_names = flat.frozen_names
            page = self.monitoring.page
            super().__init__(
                module, flat, optimizers, options, replica, resumption=resumption, page=page
            )
            opened.callback(self.leave)
            self._pace = Pace(options)
            self._state.compile()
            self.start()
            self._agreed = replica.agree(self._own_view())
            own = weakref.ref(self)
            speak_for_run(lambda: (worker := own()) is None or worker.is_lead)
            position = DataPosition()
            self.checkpointer = Checkpointer(self, position, self.capture)
            opened.callback(self.checkpointer.close)
            self.batches = CountedBatches(self, position, self.checkpointer)
            self.monitoring.begin(self, self.stats, lambda: self.batches.budget_samples)
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            exchanged = choice if isinstance(choice, Mapping) else ()
            is_moved = options.method != "none" and self.world_size > 1
            self._watches = [
                OptimizerWatch(each, names, exchanged, is_moved=is_moved) for each in optimizers
            ]
            if resumption is not None:
                logger.warning(
                    "the run goes on from step %d of worker %d in %s, %s, with world_size %d",
                    resumption.counts.step,
                    self.rank,
                    saving.directory if saving.resume == "auto" else saving.resume,
                    resumption.start,
                    self.world_size,
                    extra=OF_RUN,
                )
            # A compiled wrapper breaks its graph here, and so compiles the module's graphs alone.
            disable: Callable[[Any], Any] = torch.compiler.disable
            self.begin_forward = disable(self._begin_forward)
            self._hooks = Hooks(
                self,
                begins=self.begins,
                stepped=self.stepped,
                loaded=self.loaded,
                counting_once=self.batches.counting_once,
            )
            # From here on its failure ends no other, once all have begun.
            self._rendezvous.mark_ready(self.rank)
            opened.pop_all()

    # A gradient step.

    def _begin_forward(self, batch: Any) -> None:
        if self._is_averaged:  # an evaluation: no step follows within
            return
        self.checkpointer.at_forward()
        self.batches.count_forward(batch)

    def begins(self, optimizer_index: int) -> None:
        """Add to an optimizer's moments what exchanges have brought; its step is next."""
        if self._state.device.is_capturing():
            raise RuntimeError(
                "optimizer.step() is being captured in a CUDA graph, whose replays would step "
                "without exchanging: capture the forward and backward pass alone, and call "
                "optimizer.step() after each replay"
            )
        for moment in self._moments[optimizer_index]:
            moment.begins()

    def stepped(self, optimizer_index: int) -> None:
        """Add to x what exchanges have brought; a step of the first optimizer is a gradient step.

        Its own work, and the state that it made in its first step, are looked at before.
        """
        self._watches[optimizer_index].stepped()
        if optimizer_index in self._unchecked:  # it has made its state in this step
            self._unchecked.discard(optimizer_index)
            if self._saves or self.world_size > 1:
                training_state.check_state(self.optimizers[optimizer_index], is_saved=self._saves)
        self.in_run(lambda: self._thread.check())  # noqa: PLW0108 (a new thread the second time)
        # With shards all processes raise once all know it: none waits for one in a collective.
        self._raise_poison(self.known().is_poisoned, self._loop.poisoned)
        if self._is_averaged:
            raise RuntimeError(
                "optimizer.step() within model.averaged(): the module holds the average there, "
                "and a step on it would be lost"
            )
        self._flat.check(optimizer_index)
        for moment in self._moments[optimizer_index]:
            moment.stepped()
        self._state.boundary(self._theta(), optimizer_index)
        if optimizer_index != 0:
            return
        # In this sum all processes of a replica learn at the same step whether to go on.
        self._agreed = self.replica.agree(self._own_view(self.batches.take_counted()))
        samples = self._agreed.samples
        self._gradient_steps += 1
        self._samples += samples
        if not self._is_reported:
            self._is_reported = send_report(Report(trains=True))
        self._thread.step(samples)
        if self.options.exchange.pace == "strict":
            self._keep_pace()
        else:
            self._pace.warn_if_low(self._loop.snapshot, self.rank, self._gradient_steps)
        self.checkpointer.stepped()
        self.monitoring.stepped(samples)
        if self.world_size > 1 and self._gradient_steps == 2:
            warn_of_step_counters(self.optimizers)
        self.batches.check_counted(self._gradient_steps)

    def come_again(self, superseded: SupersededError) -> None:
        """Take another rank, and write the log of that one."""
        super().come_again(superseded)
        self.monitoring.come_again()

    def _keep_pace(self) -> None:
        self._pace.wait(
            self._protocol,
            self._thread,
            take=lambda: self._state.boundary(self._theta(), 0, wait=True),
        )

    def _theta(self) -> float:
        return self.phase.at(since_boot_s())

    def check(self) -> None:
        """Raise ModelChangedError if parameters were moved or replaced since wrapping.

        Do nothing within ``averaged()``: the module holds other storage then, which would be taken
        for a load of the average. At its end the module holds this worker's own again. Nor after
        the end of the run.
        """
        if not (self._is_averaged or self.is_closed):
            self._flat.check()

    def loaded(self, tensors: Iterable[Tensor]) -> None:
        """Drop pending and momentum of the tensors that were loaded, and abort the exchange.

        If none of them is exchanged, as in a target network, the exchange goes on.
        """
        if self._is_averaged:
            raise RuntimeError(
                "load_state_dict() within model.averaged(): the module's own parameters come back "
                "at its end, and what was loaded would be lost. Load before it, or after it"
            )
        held = list(tensors)
        exchanged = self._flat.exchanged(held)
        if not exchanged:
            return
        if self._rendezvous.joins and not self.has_stepped:
            logger.warning(
                "worker %d has joined a run that goes on, and load_state_dict() puts others in "
                "place of the parameters that it took from a live worker: exchanges mix them into "
                "all. To begin from saved weights, load them into the module before you wrap it",
                self.rank,
            )
        try:
            self._forget(exchanged)
        except SupersededError as error:
            loaded = [each.detach().clone() for each in held]
            training = deepcopy(training_state.capture(self.optimizers))
            self.come_again(error)  # it takes a live worker's values, and its optimizers' state
            training_state.restore(training, self.optimizers)
            with torch.no_grad():
                for each, values in zip(held, loaded, strict=True):
                    each.copy_(values)
            self._forget(exchanged)

    def _forget(self, exchanged: Sequence[View]) -> None:
        try:
            self._call(self._loop.hold)
            self._state.device.finish()
            self._flat.forget(exchanged)
        finally:
            self._call(self._loop.release)

    # Poison.

    def _raise_poison(self, is_any: bool, poison: PoisonedError | None) -> None:
        """If there ``is_any``, raise this process's, or say that another of the replica has it."""
        if is_any:
            raise poison or PoisonedError(
                f"the parameters of another shard of replica {self.rank} hold NaN or infinity: "
                "look at the output of its other processes"
            )

    def _found_poison(self, outcome: str) -> PoisonedError | None:
        """Return an error with this ``outcome`` if NaN or infinity is in what is averaged."""
        self.check()  # what was put in their place since the last step is averaged, too
        segments = self._state.segments
        if all(is_finite(segment.x) for segment in segments if segment.role.is_averaged):
            return None
        return PoisonedError(
            f"the parameters or buffers of worker {self.rank} hold NaN or infinity: {outcome}"
        )

    def _refuse_poison(self, outcome: str, *, is_end: bool = False) -> None:
        """Raise rather than let NaN into an average.

        At the end the others wait for this worker, so it leaves the run.
        """
        poison = self._loop.poisoned or self._found_poison(outcome)
        is_any = any(next(self.replica.gather(poison is not None)))
        if is_any and is_end:
            self.leave()
        self._raise_poison(is_any, poison)

    # Copies of the state.

    def capture(self) -> dict[str, Tensor]:
        """Copy this worker's state, for a checkpoint; return its tensors by name.

        x stays: to add pending here could change parameters between a forward and a backward pass
        of the user's. An exchange may run meanwhile: every chunk is copied before it was exchanged
        or after, and the files of two workers are of different moments in any case.
        """
        if self._is_averaged:
            raise RuntimeError("save no checkpoint within model.averaged(): step out of it first")
        self._thread.check()
        poison = self._found_poison(
            "they are not saved, and the checkpoints written before are kept"
        )
        if poison is not None:
            raise poison
        for moment in itertools.chain(*self._moments):  # into the state that is saved next
            moment.begins(wait=True)
        # Every chunk at one phase, which is therefore 0 after a resume.
        return self._flat.tensors(self._theta())

    def export(self, values: dict[str, Any]) -> None:
        """Put x + pending, or within ``averaged()`` the average, into a state_dict: new tensors."""
        is_averaged = self._is_averaged
        self._flat.export(values, self._flat.held() if is_averaged else self._copies(Chunk.read))

    def _copies(self, read: Callable[[Chunk, Tensor], object]) -> list[Tensor]:
        """Copy every segment: averaged chunks by ``read``, the others as they are."""
        self._state.device.finish()
        copies = []
        with torch.inference_mode(False):  # what is made in that mode may not be written later
            for segment in self._state.segments:
                copy = segment.x.clone()
                if segment.role.is_averaged:
                    for chunk, room in segment.split(copy):
                        read(chunk, room)
                copies.append(copy)
        return copies

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """See ``GossipDataParallel.averaged``: z of all live workers, in pending's precision."""
        if self._is_averaged:
            yield
            return
        self._refuse_poison("they are not averaged with the others'")
        found = self.in_run(self._ask_for_average)
        if found.without:
            reasons = "; ".join(f"worker {rank} ({why})" for rank, why in found.without.items())
            logger.warning("worker %d averages without %s", self.rank, reasons)
        average = self._copies(lambda chunk, room: room.copy_(found.values[chunk.index]))
        self._is_averaged = True
        try:
            self._flat.swap(average)
            yield
        finally:
            self.end_averaged()

    def _ask_for_average(self) -> Average:
        asked = self._call(self._loop.sums.ask)
        while not wait([asked], LOOK_AT_THREAD_EVERY_S).done:
            self._thread.check()
        self._thread.check()  # an end of the thread ends the request too
        return asked.result()

    def end_averaged(self) -> None:
        """Let the module hold this worker's own values again; if it does, do nothing."""
        self._flat.swap_back()
        self._is_averaged = False

    # The end.

    def consolidate(self, timeout_s: float = math.inf) -> Consolidated:
        """See ``GossipDataParallel.consolidate``."""
        self.is_consolidating = True
        self._refuse_poison(
            "they are not averaged with the others'. Lower the learning rate or clip gradients",
            is_end=True,
        )
        outcome = self.in_run(lambda: self._wait_for_average(timeout_s))
        self.lead = self.replica.first_says(outcome.lead)
        self._rendezvous.report(Report(consolidated=True))  # the run needs no other worker now
        averaged = self._state.all_chunks
        for chunk, values in zip(averaged, outcome.values, strict=True):
            chunk.replace(values)
        # Each shard was averaged over the replicas in its own network; after a death in the middle
        # of it the networks may differ.
        distances, counts = self.replica.gather(outcome.consensus_distance, outcome.num_workers)
        progress, membership = self._protocol.progress, self._protocol.membership
        by_rank, members = self._call(lambda: (progress.by_rank(), membership.members()))
        # The workers that the run began with, and those that have joined since.
        joined = {member.rank for member in members if member.status is not Status.JOINING}
        warn_of_absence(self.rank, outcome, len(joined.union(range(self.world_size))))
        return Consolidated(
            consensus_distance=math.fsum(distances),
            world_size=int(min(counts)),
            samples=sum(samples for samples, _ in by_rank.values()),
            gradient_steps=sum(steps for _, steps in by_rank.values()),
            gradient_steps_by_rank={rank: by_rank[rank][1] for rank in sorted(by_rank)},
        )

    def _wait_for_average(self, timeout_s: float) -> Outcome:
        ended: Future[Outcome] = Future()
        self._state.device.finish()
        self._call(lambda: self._loop.consolidate(ended.set_result, timeout_s))
        line_due_s = time.monotonic() + WAIT_LINE_EVERY_S
        while True:
            wait([ended], LOOK_AT_THREAD_EVERY_S)
            if ended.done():
                return ended.result()
            self._thread.check()
            if (poison := self._loop.poisoned) is not None:  # found where a sum was made
                self.leave()
                raise poison
            if time.monotonic() >= line_due_s:
                line_due_s += WAIT_LINE_EVERY_S
                waits_for = missing_workers(self._loop.snapshot, since_boot_s())
                logger.warning(
                    "worker %d waits in consolidate(): %s", self.rank, waits_for, extra=OF_RUN
                )

    # The way out.

    def leave(self) -> None:
        """End threads and links. A second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            super().leave()
            if self._has_thread:
                # What the last exchange brought belongs to the parameters.
                self._state.boundary(self._theta(), wait=True)
        finally:
            self._state.end_helpers()

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
            has_average = self.average_saved_at_step == self.step_number
            failed = getattr(sys, "last_value", None) is not None  # its traceback was printed
            if self.has_stepped and not (has_average or failed or TERMINATION.was_asked):
                timeout_s, newest = self.options.network.timeout_s, self.checkpointer.newest
                warn_of_no_average(self.rank, self._loop.snapshot, is_early, timeout_s, newest)
            warn_of_steps_alone(self.optimizers)

        def close() -> None:
            with contextlib.ExitStack() as parts:  # the last one first
                parts.callback(self.checkpointer.close)
                parts.callback(self.leave)
                parts.callback(self.monitoring.close)
                parts.callback(self._hooks.remove)

        if threading.current_thread().name.startswith("gossipdp"):
            # No daemon: Python ends those at exit, and one that is within torch would then take the
            # process with it (std::terminate). No part of close waits for what stands still.
            threading.Thread(target=close, name="closing a dropped model", daemon=False).start()
        else:
            close()

    # Answers to other threads, each from one snapshot.

    def stats(self) -> Stats:
        """See ``GossipDataParallel.stats``."""
        snapshot, steps, counts = self._loop.snapshot, self._gradient_steps, self.counts()
        asked = snapshot.counters.exchanges_initiated
        own: dict[str, Any] = {
            "rank": self.rank,
            "world_size": self.world_size,
            "at_s": since_boot_s(),
            "gradient_steps": counts.steps,
            "samples": counts.samples,
            "waited_seconds": self._pace.waited_s,
            "achieved_comm_rate": 2 * asked / steps if steps else math.nan,
            "states_donated": self._loop.transfers.num_given,
            "kernels": self._state.kernels,
            "recent_exchanges": snapshot.recent_exchanges,
            **self.checkpointer.counts(),
        }
        return Stats(**msgspec.structs.asdict(snapshot.counters) | own)
