"""Asynchronous training: the main thread's end of the gossip."""

import contextlib
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

import gossipdp
from gossipdp.dynamics.chunks import Chunk
from gossipdp.dynamics.update import is_finite
from gossipdp.errors import PoisonedError, SupersededError
from gossipdp.gossip.snapshot import LoopSnapshot
from gossipdp.gossip.sums import Outcome
from gossipdp.launcher.environment import check_platform
from gossipdp.launcher.reports import REPORT_VARIABLE, Report, send_report
from gossipdp.links.clock import since_boot_s
from gossipdp.logs import OF_RUN, speak_for_run
from gossipdp.observe.status import MemberStatus
from gossipdp.parallel.checkpoint import Counts, Facts, Resumption, ended_lives
from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.parallel.moments import Moments, chosen_moments
from gossipdp.parallel.options import Options
from gossipdp.parallel.shards import Agreed, Replica, reshard
from gossipdp.parallel.startup import Startup, random_state
from gossipdp.parallel.state_transfers import average_over_live
from gossipdp.parallel.stats import Consolidated, Stats, view_of
from gossipdp.protocol.members import Status
from gossipdp.protocol.pairing import MAX_BACKLOG
from gossipdp.protocol.participants import Crossing

if TYPE_CHECKING:
    from gossipdp.observe.server import StatusPort

logger = logging.getLogger("gossipdp")

WAIT_LINE_EVERY_S = 10.0
TURN_WHILE_WAITING_S = 0.002
# A low share of served demands gets a warning after this many steps of a worker: links are up then.
# If exchanges are rare, the warning also waits for enough demands, which may take hours.
MIN_STEPS_FOR_RATE_WARNING = 200
# A short run gets no such warning.
MIN_SECONDS_FOR_RATE_WARNING = 60.0
MIN_TICKS_FOR_RATE_WARNING = 20
RATE_WARNING_BELOW = 0.8
LOOK_AT_THREAD_EVERY_S = 0.05
# Two workers that wait for each other at the ends of two models give up after this.
CROSSED_FOR_TIMEOUTS = 3
# The most unserved demands of this worker's own under pace="strict".
MAX_LAG = 2

_engines: "weakref.WeakSet[GossipEngine]" = weakref.WeakSet()
"""The engines of this process that are not closed."""


class GossipEngine(Startup):
    """One worker's exchanges with the others, as the main thread drives them.

    It owns the flat parameters, the state shared with the gossip thread, and that thread. The main
    thread's part is :meth:`boundary`; while it waits, at the start and at the end, the gossip
    thread writes x. Main thread only; :meth:`stats` and :meth:`view` any thread may call.

    Attributes:
        is_consolidating: ``consolidate()`` was called.
        frozen_names: returns the names of what is left alone.
        end_asked_s: says when this process was asked to end (SIGTERM); infinity: not yet.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Options,
        replica: Replica,
        *,
        resumption: Resumption | None = None,
        page: "StatusPort | None" = None,
    ) -> None:
        check_platform()
        choice = options.exchange.moments if options.method != "none" else False
        flat = FlatParameters(
            module,
            optimizers,
            momentum=options.method == "a2cid2",
            exchange=options.exchange,
            moments=chosen_moments(choice, optimizers),
        )
        self._moments = Moments(
            flat.moment_places,
            optimizers,
            is_default=choice is True,
            finish=flat.state.device.finish,
        )
        super().__init__(flat, optimizers, options, replica, resumption=resumption, page=page)
        self.module, self.frozen_names = module, flat.frozen_names
        self.is_consolidating = self._is_closed = False
        self.end_asked_s: Callable[[], float] = lambda: math.inf
        self._num_means = 0 if resumption is None else resumption.num_means
        self._ended_before = () if resumption is None else resumption.ended
        self._gradient_steps = self._samples = 0
        self._waited_s = 0.0
        self._first_link_due_s: float | None = None
        self._is_reported = REPORT_VARIABLE not in os.environ  # to a launcher: that it trains
        self._rate_warning_due = True
        self._began_s = time.monotonic()
        self._is_averaged = self._has_stopped = False
        self.lead: int | None = None  # after consolidate()
        self._agreed = Agreed()
        try:
            self._state.compile()
            self.start()
            if self._rendezvous.joins:
                self._share_cores()
            reshard(module)
            self._agree(0)
        except BaseException:
            self.close()
            raise
        _engines.add(self)
        own = weakref.ref(self)
        speak_for_run(lambda: (engine := own()) is None or engine.is_lead)

    def _share_cores(self) -> None:
        """Compute with a share of the cores: workers of the run on this host have theirs."""
        from gossipdp.launcher.local import num_threads

        membership = self._protocol.membership
        hosts = [each.host for each in self._call(membership.members) if not each.is_over]
        num_here = hosts.count(membership.own.host) * self.replica.environment.num_shards
        torch.set_num_threads(min(torch.get_num_threads(), num_threads(num_here)))

    def come_again(self, superseded: SupersededError) -> None:
        """Take another rank: two workers that joined at the same time had been given the same one.

        If this worker came with a rank of its own, raise ``superseded``: the run has its worker.
        """
        self._give_up_rank(superseded)
        self._join()
        self.report_ready()
        self._gradient_steps = self._samples = 0  # its work so far counts under its former rank

    @property
    def draws_alike(self) -> bool:
        """Return whether torch still has the random state here with which all workers began."""
        return self.world_size > 1 and self.common_random_state == random_state()

    @property
    def step_number(self) -> int:
        """Return the number of this worker's last gradient step; goes on where a run resumed."""
        return self.before.step + self._gradient_steps

    def counts(self) -> Counts:
        """Return the counts of this worker, over all of its lives."""
        return Counts(
            self.step_number,
            self.before.steps + self._gradient_steps,
            self.before.samples + self._samples,
        )

    # Training.

    def begins(self, optimizer_index: int) -> None:
        """Add to an optimizer's moments what exchanges have brought; its step is next.

        Raises:
            RuntimeError: the step is captured in a graph, which would repeat it without its hooks.
        """
        if self._state.device.is_capturing():
            raise RuntimeError(
                "optimizer.step() is being captured in a CUDA graph, whose replays would step "
                "without exchanging: capture the forward and backward pass alone, and call "
                "optimizer.step() after each replay"
            )
        self._moments.begins(optimizer_index)

    def boundary(self, optimizer_index: int, samples: int) -> int:
        """Add to x what exchanges have brought, and count the step of the first optimizer.

        Args:
            optimizer_index: of the optimizer that has just stepped.
            samples: of this process in that step.

        Returns:
            The samples of all processes of this worker in that step.
        """
        try:
            self._thread.check()
        except SupersededError as error:
            self.come_again(error)
        if (poison := self._agreed_poison()) is not None:
            raise poison
        if self._is_averaged:
            raise RuntimeError(
                "optimizer.step() within model.averaged(): the module holds the average there, "
                "and a step on it would be lost"
            )
        self._flat.check(optimizer_index)
        self._moments.stepped(optimizer_index)
        self._state.boundary(self._theta(), optimizer_index)
        if optimizer_index == 0:
            samples = self._agree(samples)
            self._gradient_steps += 1
            self._samples += samples
            if not self._is_reported:
                self._is_reported = send_report(Report(trains=True))
            self._thread.step(samples)
            if self.options.exchange.pace == "strict":
                self._keep_pace()
            elif self._rate_warning_due and self._protocol.exchange_rate is None:
                self._warn_of_low_rate()
        return samples

    def _agree(self, samples: int) -> int:
        """Return the samples of this step of all processes of the replica.

        In this sum all of them learn at the same step whether to go on; see
        :mod:`gossipdp.parallel.shards`.
        """
        snapshot = self._loop.snapshot
        self._agreed = self.replica.agree(
            Agreed(
                samples=samples,
                others_samples=snapshot.others_samples,
                is_stopped=self._has_stopped or snapshot.is_stopped,
                is_poisoned=self._loop.poisoned is not None,
                is_ending=self.end_asked_s() < math.inf,
                is_lead=self.replica.is_sharded and self._leads(),
            )
        )
        return self._agreed.samples

    def _theta(self) -> float:
        return self.phase.at(since_boot_s())

    def _keep_pace(self) -> None:
        """Wait while more than ``MAX_LAG`` own demands are unserved and someone could serve them.

        If the gossip thread lacks a core, it has not seen the latest steps. They count as one
        demand each: it would find more demands than a backlog holds. At the start every neighbour
        is expected to be linked within ``timeout_s``. The protocol's values are read without a
        lock: each is one object, replaced whole by the gossip thread, and a stale one costs a turn.

        It does not wait while this worker may exchange with no other: it may be up to this very
        thread to end that, as when the parameters are poisoned.
        """
        protocol, thread = self._protocol, self._thread
        pairing = protocol.pairing
        started_s = time.monotonic()
        if self._first_link_due_s is None:
            self._first_link_due_s = started_s + self.options.network.timeout_s
        while pairing.answers and pairing.backlog + thread.steps_behind > MAX_LAG:
            if pairing.available:
                self._first_link_due_s = -math.inf
            elif not protocol.neighbours or time.monotonic() >= self._first_link_due_s:
                break
            thread.check()
            time.sleep(TURN_WHILE_WAITING_S)
            self._state.boundary(self._theta(), 0, wait=True)
        self._waited_s += time.monotonic() - started_s

    def _warn_of_low_rate(self) -> None:
        snapshot = self._loop.snapshot
        due, served = snapshot.num_ticks, snapshot.counters.exchanges_initiated
        seconds = time.monotonic() - self._began_s
        if is_rate_low(self._gradient_steps, due, served, seconds):
            self._rate_warning_due = False
            logger.warning(
                "worker %d exchanges at %.0f%% of the comm rate %g: links or neighbours are too "
                "slow for it. Training does not wait; lower comm_rate, or wait for the exchanges "
                "with exchange=Exchange(pace='strict')",
                self.rank,
                100 * served / due,
                self.options.asked_comm_rate,
                extra=OF_RUN,
            )

    @property
    def is_lead(self) -> bool:
        """Return whether this worker's rank is the lowest of those that train, or were averaged."""
        if self.lead is not None:
            return self.rank == self.lead
        return self._agreed.is_lead if self.replica.is_sharded else self._leads()

    def _leads(self) -> bool:
        return all(
            self.rank <= member.rank
            for member in self._loop.snapshot.members
            if member.status in (Status.ALIVE, Status.DONE)
        )

    def speaks_at_exit(self, is_early: bool) -> bool:
        """Return whether this worker has trained with others, and is the first that is not dead.

        Those that have left count too, and those that were found dead within the last time-out: the
        workers of one script end in no order, and one that ends without an average is found dead.
        Each speaks that ends early, or without ``consolidate()`` while another is in it.
        """
        snapshot = self._loop.snapshot
        members = snapshot.members
        ended_s = since_boot_s() - self.options.network.timeout_s
        ending = {notice.rank for notice in snapshot.noticed if notice.at_s > ended_s}
        ranks = {member.rank for member in members if member.status is not Status.DEAD}
        is_first = self.rank == min(ranks | ending)
        is_odd = is_early or any(each.status in (Status.DONE, Status.LEFT) for each in members)
        return self._gradient_steps > 0 and len(members) > 1 and (is_first or is_odd)

    def total_samples(self) -> int:
        """Return the samples of all workers: own ones as of now, the others' as last heard."""
        if self.replica.is_sharded:
            return self._samples + self._agreed.others_samples
        return self._samples + self._loop.snapshot.others_samples

    def stop(self) -> None:
        """End the run for all workers, before its budget is used up; the next messages say so."""
        add = self._protocol.progress.add
        self._call(lambda: add(0, 0, since_boot_s(), is_stopped=True))
        self._has_stopped = True

    @property
    def is_stopped(self) -> bool:
        """Return whether a worker has ended the run early, as far as this one knows."""
        if self.replica.is_sharded:
            return self._agreed.is_stopped
        return self._has_stopped or self._loop.snapshot.is_stopped

    @property
    def is_ending(self) -> bool:
        """Return whether this worker is to save and end, between two steps.

        All processes of a replica do so at the same step.
        """
        return self._agreed.is_ending if self.replica.is_sharded else self.end_asked_s() < math.inf

    def check(self) -> None:
        """Raise ModelChangedError if parameters were moved or replaced since wrapping.

        Do nothing within ``averaged()``: the module holds other storage then, which would be taken
        for a load of the average. At its end the module holds this worker's own again.
        """
        if not self._is_averaged:
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
        exchanged = self._flat.exchanged(tensors)
        if not exchanged:
            return
        try:
            self._call(self._loop.hold)
            self._state.device.finish()
            self._flat.forget(exchanged)
        finally:
            self._call(self._loop.release)

    # Poison.

    def _agreed_poison(self) -> PoisonedError | None:
        """Return this process's poison, or with shards one of the replica's, once all know it.

        So all processes raise at the same step, and none waits for another in a collective.
        """
        own = self._loop.poisoned
        if not self.replica.is_sharded:
            return own
        return (own or self._mates_poison()) if self._agreed.is_poisoned else None

    def _mates_poison(self) -> PoisonedError:
        return PoisonedError(
            f"the parameters of another shard of replica {self.rank} hold NaN or infinity: look at "
            "the output of its other processes"
        )

    def _refuse_poison(self, outcome: str, *, is_end: bool = False) -> None:
        """Raise rather than let NaN into an average.

        At the end the others wait for this worker, so it leaves the run.
        """
        poison = self._loop.poisoned
        if poison is None and not self._is_finite():
            poison = PoisonedError(
                f"the parameters or buffers of worker {self.rank} hold NaN or infinity: {outcome}"
            )
        if not self.replica.is_any(poison is not None):
            return
        if is_end:
            self.close()
        raise poison or self._mates_poison()

    def _is_finite(self) -> bool:
        segments = self._state.segments
        return all(is_finite(segment.x) for segment in segments if segment.role.is_averaged)

    # Copies of the state.

    def capture(self) -> tuple[dict[str, Tensor], Facts]:
        """Copy this worker's state; return its tensors, and the facts of a checkpoint of it.

        x stays: to add pending here could change parameters between a forward and a backward pass
        of the user's. An exchange may run meanwhile: every chunk is copied before it was exchanged
        or after, and the files of two workers are of different moments in any case.

        Raises:
            PoisonedError: the parameters or buffers hold NaN or infinity.
        """
        if self._is_averaged:
            raise RuntimeError("save no checkpoint within model.averaged(): step out of it first")
        self.check()
        self._thread.check()
        if not self._is_finite():
            raise PoisonedError(
                f"the parameters or buffers of worker {self.rank} hold NaN or infinity: they "
                "are not saved, and the checkpoints written before are kept"
            )
        for chunk in self._state.moment_chunks:  # into the optimizers' state, which is saved next
            chunk.boundary(0.0, wait=True)
        # Every chunk at one phase, which is therefore 0 after a resume.
        self._state.flow(self._theta())
        flats = zip(*(segment.copy() for segment in self._state.segments), strict=True)
        protocol = self._protocol
        (progress, _), members = self._call(
            lambda: (protocol.progress.news(), protocol.membership.members())
        )
        # If all are asked to end, one may have saved and ended while another was still in its step.
        # After the average, whoever died is not in it, however late that was.
        now_s = min(self._loop.clock(), self.end_asked_s()) if self.lead is None else math.inf
        ended = ended_lives(members, self._loop.snapshot.noticed, now_s)
        facts = Facts(
            rank=self.rank,
            world_size=self.world_size,
            **self.counts()._asdict(),
            progress=tuple(msgspec.structs.replace(entry, is_stopped=False) for entry in progress),
            gossipdp=gossipdp.__version__,
            run_id=self.run_id,
            incarnation=protocol.incarnation,
            ended=(*self._ended_before, *ended),
            num_means=self._num_means,
            base=self._flat.base_digest,
        )
        return {
            f"{kind}/{name}": values.contiguous()
            for kind, copies in zip(("model", "c"), flats, strict=True)
            for name, values in self._flat.named(copies).items()
        }, facts

    def export(self, values: dict[str, Any]) -> None:
        """Put x + pending, in new tensors, into a state_dict of the module.

        Within ``averaged()`` the average stays there.
        """
        if self._is_averaged:
            return
        self._flat.export(values, self._copies(Chunk.read))

    def _copies(self, read: Callable[[Chunk, Tensor], object]) -> list[Tensor]:
        """Copy every segment: averaged chunks by ``read``, the others as they are."""
        self._state.device.finish()
        copies = []
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
        values = average_over_live(self._thread, self._loop).values
        average = self._copies(lambda chunk, room: room.copy_(values[chunk.index]))
        self._is_averaged = True
        try:
            self._flat.swap(average)
            yield
        finally:
            self._flat.swap_back()
            self._is_averaged = False

    # The end.

    def consolidate(self, timeout_s: float = math.inf) -> Consolidated:
        """See ``GossipDataParallel.consolidate``."""
        if self._is_closed:
            raise RuntimeError("consolidate() was called before, or the model is closed")
        self.is_consolidating = True
        self._refuse_poison(
            "they are not averaged with the others'. Lower the learning rate or clip gradients",
            is_end=True,
        )
        try:
            outcome = self._wait_for_average(timeout_s)
        except SupersededError as error:
            self.come_again(error)
            outcome = self._wait_for_average(timeout_s)
        self.lead = self.replica.first_says(outcome.lead)
        self._rendezvous.mark_consolidated()
        averaged = self._state.averaged_chunks + self._state.copied_chunks
        for chunk, values in zip(averaged, outcome.values, strict=True):
            chunk.replace(values)
        # Each shard was averaged over the replicas in its own network; after a death in the middle
        # of it the networks may differ.
        distances, counts = self.replica.gather(outcome.consensus_distance, outcome.num_workers)
        progress, membership = self._protocol.progress, self._protocol.membership
        samples, steps, by_rank, members = self._call(
            lambda: (
                progress.total_samples,
                progress.total_steps,
                progress.by_rank(),
                membership.members(),
            )
        )
        # The workers that the run began with, and those that have joined since.
        joined = {member.rank for member in members if member.status is not Status.JOINING}
        known = joined.union(range(self.world_size))
        if outcome.num_workers < len(known):
            reasons = [f"; worker {rank}: {why}" for rank, why in outcome.without.items()]
            logger.warning(
                "worker %d: the average is over %d of %d workers; the others are lost, still "
                "train, or ended without consolidate(), which every worker has to call%s",
                self.rank,
                outcome.num_workers,
                len(known),
                "".join(reasons),
                extra=OF_RUN,
            )
        return Consolidated(
            consensus_distance=math.fsum(distances),
            world_size=int(min(counts)),
            samples=samples,
            gradient_steps=steps,
            gradient_steps_by_rank={rank: by_rank[rank][1] for rank in sorted(by_rank)},
        )

    def _wait_for_average(self, timeout_s: float) -> Outcome:
        ended: Future[Outcome] = Future()
        self._state.device.finish()
        self._call(lambda: self._loop.consolidate(ended.set_result, timeout_s))
        line_due_s = time.monotonic() + WAIT_LINE_EVERY_S
        crossing = Crossing(CROSSED_FOR_TIMEOUTS * self.options.network.timeout_s)
        while True:
            wait([ended], LOOK_AT_THREAD_EVERY_S)
            if math.isinf(timeout_s):  # else the end comes anyhow
                self._refuse_crossing(crossing)
            if ended.done():
                return ended.result()
            self._thread.check()
            if (poison := self._loop.poisoned) is not None:  # found where a sum was made
                self.close()
                raise poison
            if time.monotonic() >= line_due_s:
                line_due_s += WAIT_LINE_EVERY_S
                waits_for = _missing(self._loop.snapshot, since_boot_s())
                logger.warning(
                    "worker %d waits in consolidate(): %s", self.rank, waits_for, extra=OF_RUN
                )

    def _refuse_crossing(self, crossing: Crossing) -> None:
        """Raise if peers wait for this worker at the end of another model while it waits here."""
        # Ask the others first: whatever a peer did here before that is known by then.
        elsewhere = [each._peers() for each in list(_engines) if not each.is_consolidating]
        peers = crossing.look(self._peers(), elsewhere, time.monotonic())
        if peers:
            raise RuntimeError(
                f"worker {self.rank} waits in consolidate() of its "
                f"{type(self.module).__name__} for worker {', '.join(map(str, peers))}, "
                "which waits for this one in consolidate() of another model: neither would ever "
                "end. Consolidate the models in the same order on all workers"
            )

    def _peers(self) -> dict[int, Status]:
        members = self._loop.snapshot.members
        return {member.rank: member.status for member in members if member.rank != self.rank}

    def close(self) -> None:
        """End threads and links. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        _engines.discard(self)
        try:
            super().close()
            if self._has_thread:
                # What the last exchange brought belongs to the parameters.
                self._state.boundary(self._theta(), wait=True)
        finally:
            self._state.end_helpers()

    # Answers to other threads, each from one snapshot.

    def stats(self) -> Stats:
        """See ``GossipDataParallel.stats``."""
        snapshot, steps, counts = self._loop.snapshot, self._gradient_steps, self.counts()
        asked = snapshot.counters.exchanges_initiated
        own: dict[str, Any] = {
            "rank": self.rank,
            "world_size": self.world_size,
            "at_s": since_boot_s(),
            "noticed": snapshot.noticed,
            "gradient_steps": counts.steps,
            "samples": counts.samples,
            "waited_seconds": self._waited_s,
            "achieved_comm_rate": 2 * asked / steps if steps else math.nan,
            "states_donated": self._loop.transfers.num_given,
            "kernels": self._state.kernels,
            "recent_exchanges": snapshot.recent_exchanges,
        }
        return Stats(**msgspec.structs.asdict(snapshot.counters) | own)

    def view(self) -> tuple[MemberStatus, ...]:
        """Return all workers that are known, for the status port."""
        return view_of(self._loop.snapshot, self._loop.clock())


def is_rate_low(num_steps: int, num_due: int, num_served: int, seconds: float) -> bool:
    """Return whether a worker is served too few of the exchanges that it has asked for.

    Exchanges that wait in its backlog are not late yet.
    """
    if num_steps < MIN_STEPS_FOR_RATE_WARNING or num_due < MIN_TICKS_FOR_RATE_WARNING:
        return False
    if seconds < MIN_SECONDS_FOR_RATE_WARNING:
        return False
    return num_served + MAX_BACKLOG < RATE_WARNING_BELOW * num_due


def _missing(snapshot: LoopSnapshot, now_s: float) -> str:
    """Name the workers that still train, and when each was last seen to make a step."""
    missing = [
        f"worker {member.rank} (its last step came "
        f"{now_s - snapshot.stepped_s.get(member.rank, now_s):.0f} s ago)"
        for member in snapshot.members
        if member.status is Status.ALIVE
    ]
    if not missing:
        return "all live workers are done and average their parameters"
    return f"{', '.join(missing)} still train{'s' if len(missing) == 1 else ''}"
