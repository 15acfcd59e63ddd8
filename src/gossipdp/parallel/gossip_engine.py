"""Asynchronous training: the main thread's end of the gossip."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from gossipdp.dynamics.chunks import Chunk
from gossipdp.dynamics.update import is_finite
from gossipdp.errors import PoisonedError, SupersededError
from gossipdp.gossip.averaging import Outcome
from gossipdp.gossip.published import Published
from gossipdp.launcher.environment import check_platform
from gossipdp.links.clock import since_boot_s
from gossipdp.parallel.arrival import Arrival
from gossipdp.parallel.checkpoint import Captured, Resumption
from gossipdp.parallel.checkpoint_facts import ended_lives
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.parallel.master_weights import MasterWeights
from gossipdp.parallel.options import Options
from gossipdp.parallel.stats import Consolidated, RunView, Stats, show_members, show_neighbours
from gossipdp.parallel.status_page import StatusPage
from gossipdp.protocol.members import Status

logger = logging.getLogger("gossipdp")

WAIT_LINE_EVERY_S = 10.0
TURN_WHILE_WAITING_S = 0.002
LOOK_AT_PROGRESS_EVERY_S = 1.0
# Ticks of a worker's clock before the share that was served is worth a warning.
MIN_TICKS_FOR_RATE_WARNING = 100
RATE_WARNING_BELOW = 0.8
LOOK_AT_THREAD_EVERY_S = 0.05
# Under pace="strict": own demands for an exchange that may be unserved.
MAX_LAG = 2


class GossipEngine(Engine):
    """One worker of methods ``a2cid2``, ``gossip`` and ``none``.

    Owns the flat parameters, the state shared with the gossip thread, and that thread. The main
    thread's part is :meth:`boundary`; while it waits, at the start and at the end, the gossip
    thread writes x.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Options,
        resumption: Resumption | None = None,
        status: StatusPage | None = None,
    ) -> None:
        check_platform()
        self.forward_module = module
        self._options = options
        self._flat = FlatParameters(
            module,
            optimizers,
            momentum=options.method == "a2cid2",
            exchange_frozen=options.exchange_frozen,
        )
        self._state = self._flat.state
        self._state.compile()
        self._master_weights = MasterWeights(self._state)
        self._gradient_steps = 0
        self._samples = 0
        self._waited_s = 0.0
        self._first_link_due_s: float | None = None
        self._rate_warning_due = True
        self._is_averaged = False
        self._is_consolidating = False
        self._is_closed = False
        self._arrival = Arrival(self._flat, optimizers, options, resumption, status)
        try:
            self._arrival.start()
        except BaseException:
            self.close()
            raise
        self._has_arrived()

    def _has_arrived(self) -> None:
        """Take over what this worker is in the run, and drives from now on."""
        arrival = self._arrival
        assert arrival.thread is not None
        self.rank, self.world_size = arrival.rank, arrival.world_size
        self.incarnation = arrival.incarnation
        self._before = arrival.before
        self._protocol = arrival.protocol
        self._loop, self._thread, self._states = arrival.loop, arrival.thread, arrival.states

    def _come_anew(self, superseded: SupersededError) -> None:
        """Take another rank, or raise ``superseded``; see :meth:`Arrival.come_anew`."""
        self._arrival.come_anew(superseded)
        # What it had done is counted under its former rank.
        self._gradient_steps = self._samples = 0
        self._has_arrived()

    # Training.

    def boundary(self, optimizer_index: int, samples: int) -> None:
        """See :class:`Engine`: x += pending, and the step is counted."""
        try:
            self._thread.check()
        except SupersededError as error:
            self._come_anew(error)
        if self._loop.poisoned is not None:
            self._deal_with_poison(self._loop.poisoned)
        if self._is_averaged:
            raise RuntimeError(
                "optimizer.step() within model.averaged(): the module holds the average there, "
                "and a step on it would be lost"
            )
        self._flat.check()
        self._master_weights.stepped(optimizer_index)
        self._state.boundary(self._theta(), optimizer_index)
        self._master_weights.bounded(optimizer_index)
        if optimizer_index == 0:
            self._gradient_steps += 1
            self._samples += samples
            self._thread.step(samples)
            if self._options.pace == "strict":
                self._keep_pace()
            elif self._rate_warning_due:
                self._warn_of_low_rate()

    def _theta(self) -> float:
        return self._arrival.phase.at(since_boot_s())

    def _keep_pace(self) -> None:
        """Wait while more than ``MAX_LAG`` own demands are unserved and someone could serve them.

        Demands that the gossip thread has not seen, for want of a core, count as one a step: it
        would come to more of them than a backlog holds. At the start every neighbour is expected
        to be linked within ``timeout_s``. The protocol's values are read without a lock: each is
        one object, replaced whole by the gossip thread, and a stale one costs a turn.

        While this worker may exchange with nobody nothing is waited for: what ends that may be up
        to this very thread, as where the parameters are poisoned.
        """
        protocol, thread = self._protocol, self._thread
        pairing = protocol.pairing
        started_s = time.monotonic()
        if self._first_link_due_s is None:
            self._first_link_due_s = started_s + self._options.network.timeout_s
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
        due = self._loop.published.num_ticks
        if due < MIN_TICKS_FOR_RATE_WARNING:
            return
        achieved = self._loop.published.exchanges_initiated / due
        if achieved < RATE_WARNING_BELOW:
            self._rate_warning_due = False
            logger.warning(
                "worker %d exchanges at %.0f%% of the comm rate %g: links or neighbours are too "
                "slow for it. Training does not wait; lower comm_rate, or use pace='strict' to "
                "wait for the exchanges",
                self.rank,
                100 * achieved,
                self._options.comm_rate,
            )

    def _deal_with_poison(self, poison: PoisonedError) -> None:
        """Raise; with ``exit`` leave the run before."""
        if self._options.on_nonfinite == "exit":
            self.close()
        raise poison

    def total_samples(self) -> int:
        """See :class:`Engine`: own samples as of now, the others' as last heard."""
        return self._samples + self._loop.published.others_samples

    def check(self) -> None:
        """See :class:`Engine`.

        Not within ``averaged()``, where the module holds other storage: that would be taken for a
        load of the average. This worker's own is there again at the end.
        """
        if not self._is_averaged:
            self._flat.check()

    def loaded(self) -> None:
        """See :class:`Engine`: no pending, no momentum, no half exchange is left."""
        if self._is_averaged:
            raise RuntimeError(
                "load_state_dict() within model.averaged(): the module's own parameters come back "
                "at its end, and what was loaded would be lost. Load before it, or after it"
            )
        self._thread.call(self._loop.hold).result()
        self._state.reset()
        self._thread.call(self._loop.release).result()

    # Checkpoints.

    @property
    def step_number(self) -> int:
        """See :class:`Engine`."""
        return self._before.step + self._gradient_steps

    def capture(self) -> Captured:
        """See :class:`Engine`.

        x and pending are copied as they are: adding one to the other here could change parameters
        between a forward and a backward pass of the user's. An exchange may run meanwhile: every
        chunk is copied before it was exchanged or after, and the files of two workers are of
        different moments in any case.
        """
        if self._is_averaged:
            raise RuntimeError("save no checkpoint within model.averaged(): step out of it first")
        self.check()
        self._thread.check()
        segments = self._flat.state.segments
        for segment in segments:
            if segment.role.is_averaged and not is_finite(segment.x):
                raise PoisonedError(
                    f"the parameters or buffers of worker {self.rank} hold NaN or infinity: they "
                    "are not saved, and the checkpoints written before are kept"
                )
        # Every chunk at one phase, which is therefore 0 for whoever resumes.
        self._state.flow(self._theta())
        self._state.device.finish()
        flats: dict[str, list[Tensor | None]] = {"model": [], "c": [], "pending": []}
        for segment in segments:
            pending = torch.empty_like(segment.pending, device="cpu")
            c = None if segment.c is None else torch.empty_like(segment.c, device="cpu")
            for chunk, room in segment.split(pending) if segment.role.is_exchanged else ():
                start = room.storage_offset()
                chunk.copy_momentum(room, None if c is None else c[start : start + room.numel()])
            flats["model"].append(segment.x.to("cpu", copy=True))
            flats["c"].append(c)
            flats["pending"].append(pending if pending.any() else None)
        protocol = self._protocol
        (progress, _), members = self._thread.call(
            lambda: (protocol.progress.news(), protocol.membership.members())
        ).result()
        return Captured(
            tensors={
                f"{kind}/{name}": values.contiguous()
                for kind, copies in flats.items()
                for name, values in self._flat.named(copies).items()
            },
            step=self.step_number,
            steps=self._before.steps + self._gradient_steps,
            samples=self._before.samples + self._samples,
            progress=progress,
            run_id=self._arrival.run_id,
            incarnation=protocol.incarnation,
            ended=ended_lives(members, self._loop.published.noticed, self._loop.clock()),
        )

    # The state of others and of oneself.

    def export(self, values: dict[str, Any]) -> None:
        """See :class:`Engine`: x + pending, in new tensors."""
        self._flat.export(values, self._copies(Chunk.read))

    def _copies(self, read: Callable[[Chunk, Tensor], object]) -> list[Tensor]:
        """Copy every segment: averaged chunks by ``read``, the others as they are."""
        self._state.device.finish()
        copies = []
        for segment in self._flat.state.segments:
            copy = segment.x.clone()
            if segment.role.is_averaged:
                for chunk, room in segment.split(copy):
                    read(chunk, room)
            copies.append(copy)
        return copies

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """See ``GossipDataParallel.averaged``."""
        average = self._average()
        self._is_averaged = True
        self._flat.bind_to(average)
        try:
            yield
        finally:
            self._flat.bind_back()
            self._is_averaged = False

    def _average(self) -> list[Tensor]:
        """Average z of all live workers, in the precision of pending; see ``LiveAverages``."""
        self._refuse_poison()
        sums = [
            torch.empty(chunk.num_elements, dtype=chunk.pending.dtype)
            for chunk in self._state.averaged_chunks
        ]
        count = self._states.sum_over_live(sums)
        for total in sums:
            total.div_(count)
        return self._copies(lambda chunk, room: room.copy_(sums[chunk.index]))

    # The end.

    def consolidate(self, timeout_s: float = math.inf) -> Consolidated:
        """See ``GossipDataParallel.consolidate``."""
        if self._is_closed:
            raise RuntimeError("consolidate() was called before, or the model is closed")
        self._refuse_poison(is_end=True)
        # From here to the end the gossip thread alone writes x: this one only waits.
        self._is_consolidating = True
        try:
            outcome = self._wait_for_average(timeout_s)
        except SupersededError as error:
            self._come_anew(error)
            outcome = self._wait_for_average(timeout_s)
        if outcome.num_workers < self.world_size:
            logger.warning(
                "worker %d: the average is over %d of %d workers; the others died, or still train",
                self.rank,
                outcome.num_workers,
                self.world_size,
            )
        progress = self._protocol.progress
        return Consolidated(
            consensus_distance=outcome.consensus_distance,
            world_size=outcome.num_workers,
            samples=progress.total_samples,
            gradient_steps=progress.total_steps,
            gradient_steps_by_rank={
                rank: steps for rank, (_, steps) in sorted(progress.by_rank().items())
            },
        )

    def _wait_for_average(self, timeout_s: float) -> Outcome:
        ended: Future[Outcome] = Future()
        self._state.device.finish()
        self._thread.call(lambda: self._loop.consolidate(ended.set_result, timeout_s)).result()
        line_due_s = time.monotonic() + WAIT_LINE_EVERY_S
        while True:
            try:
                return ended.result(LOOK_AT_THREAD_EVERY_S)
            except TimeoutError:
                self._thread.check()
            if time.monotonic() >= line_due_s:
                line_due_s += WAIT_LINE_EVERY_S
                waits_for = _missing(self._loop.published, since_boot_s())
                logger.warning("worker %d waits in consolidate(): %s", self.rank, waits_for)

    def _refuse_poison(self, *, is_end: bool = False) -> None:
        """Raise rather than let NaN into an average.

        Args:
            is_end: the others wait for this worker, so with ``stop`` it leaves the run too.
        """
        if self._loop.poisoned is None and all(
            is_finite(segment.x)
            for segment in self._flat.state.segments
            if segment.role.is_averaged
        ):
            return
        poison = self._loop.poisoned or PoisonedError(
            f"the parameters or buffers of worker {self.rank} hold NaN or infinity: they are not "
            "averaged with the others'. Lower the learning rate or clip gradients"
        )
        if self._options.on_nonfinite == "exit":
            self._thread.call(lambda: self._loop.poison(poison)).result()
        elif is_end:
            self.close()
        self._deal_with_poison(poison)

    def stats(self) -> Stats:
        """See :class:`Engine`."""
        published = self._loop.published
        recent, steps = published.recent_exchanges, self._gradient_steps
        initiated, step_seconds = published.exchanges_initiated, published.step_seconds
        distances = [exchange.half_squared_distance for exchange in recent]
        return Stats(
            rank=self.rank,
            world_size=self.world_size,
            gradient_steps=self._before.steps + steps,
            samples=self._before.samples + self._samples,
            exchanges_initiated=initiated,
            exchanges_answered=published.exchanges_answered,
            exchanges_failed=published.exchanges_failed,
            achieved_comm_rate=2 * initiated / steps if steps else math.nan,
            bytes_sent=published.bytes_sent,
            bytes_received=published.bytes_received,
            shared_bytes_sent=published.shared_bytes_sent,
            shared_bytes_received=published.shared_bytes_received,
            kernels=self._state.kernels,
            exchange_seconds=published.exchange_seconds,
            waited_seconds=self._waited_s,
            exchanges_by_neighbour=dict(published.exchanges_by_neighbour),
            edge_distance=fmean(distances) if distances else math.nan,
            step_seconds=math.nan if step_seconds is None else step_seconds,
            recent_exchanges=recent,
            chunks_exchanged=published.chunks_exchanged,
            chunks_repeated=published.chunks_repeated,
            noticed=published.noticed,
            states_donated=self._loop.transfers.num_given,
        )

    def view(self) -> RunView:
        """See :class:`Engine`; like :meth:`stats`, of one published value."""
        published, now_s = self._loop.published, self._loop.clock()
        ages = {rank: max(0.0, now_s - at_s) for rank, at_s in published.stepped_s.items()}
        return RunView(
            run_id=self._arrival.run_id,
            graph=self._arrival.settings.graph.rpartition(" ")[0],
            incarnation=self._protocol.incarnation,
            is_averaging=self._is_consolidating,
            members=show_members(published.members, published.silent, published.progress, ages),
            neighbours=show_neighbours(
                published.neighbours,
                published.links,
                published.exchanges_by_neighbour,
                published.recent_exchanges,
                now_s,
            ),
        )

    def close(self) -> None:
        """See :class:`Engine`."""
        if not self._is_closed:
            self._is_closed = True
            self._arrival.close()
            if self._arrival.thread is not None:
                # What the last exchange brought belongs to the parameters.
                self._state.boundary(self._theta(), wait=True)
            self._state.end_helpers()


def _missing(published: Published, now_s: float) -> str:
    """Who still trains, and when each was last seen to make a step."""
    missing = [
        f"worker {member.rank} (its last step came "
        f"{now_s - published.stepped_s.get(member.rank, now_s):.0f} s ago)"
        for member in published.members
        if member.status is Status.ALIVE
    ]
    if not missing:
        return "all live workers are done and average their parameters"
    return f"{', '.join(missing)} still train{'s' if len(missing) == 1 else ''}"
