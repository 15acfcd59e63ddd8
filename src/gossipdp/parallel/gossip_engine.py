"""Asynchronous training: the main thread's end of the gossip."""

import atexit
import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from gossipdp.dynamics.kernels import is_finite
from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Chunk
from gossipdp.errors import PeerLostError, PoisonedError, RendezvousError, SupersededError
from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph, graph_name
from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint import Captured, Counts, Resumption
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.parallel.options import GossipOptions
from gossipdp.parallel.outlived import ended_lives
from gossipdp.parallel.run_view import RunView, show_members, show_neighbours
from gossipdp.parallel.state_transfers import StateTransfers
from gossipdp.parallel.stats import Consolidated, Stats
from gossipdp.parallel.status_page import StatusPage
from gossipdp.protocol.join import first_incarnation
from gossipdp.protocol.membership import Member, Status
from gossipdp.protocol.progress import ProgressEntry
from gossipdp.protocol.worker import WorkerProtocol
from gossipdp.runtime.averaging import Outcome
from gossipdp.runtime.clock import since_boot_s
from gossipdp.runtime.environment import Environment, check_platform
from gossipdp.runtime.gossip_loop import GossipLoop
from gossipdp.runtime.gossip_thread import GossipThread
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.joining import ask_members, donors
from gossipdp.runtime.rendezvous import Rendezvous
from gossipdp.runtime.settings import Settings
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.tcp import TcpTransport
from gossipdp.runtime.tcp_sockets import Listener, listen
from gossipdp.runtime.tls import Tls, tls_files

logger = logging.getLogger("gossipdp")

WAIT_LINE_EVERY_S = 10.0
TURN_WHILE_WAITING_S = 0.002
LOOK_AT_PROGRESS_EVERY_S = 1.0
# Ticks of a worker's clock before the share that was served is worth a warning.
MIN_TICKS_FOR_RATE_WARNING = 100
RATE_WARNING_BELOW = 0.8
WAIT_WHILE_DONATING_S = 0.05


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
        options: GossipOptions,
        resumption: Resumption | None = None,
        status: StatusPage | None = None,
    ) -> None:
        check_platform()
        environment = Environment.read()
        self._status = status
        files = tls_files(options.tls_cert, options.tls_key, options.tls_ca) or environment.tls
        self._tls = Tls(files) if files is not None else None
        self.forward_module = module
        self.incarnation = 0
        self._environment = environment
        self._options = options
        self._optimizers = optimizers
        self._flat = FlatParameters(
            module,
            optimizers,
            momentum=options.method == "a2cid2",
            exchange_frozen=options.exchange_frozen,
        )
        self._resumption = resumption
        self._gradient_steps = 0
        self._samples = 0
        self._before = Counts.of(resumption)
        self._waited_s = 0.0
        self._first_link_due_s: float | None = None
        self._is_averaged = False
        self._is_consolidating = False
        self._is_closed = False
        self._thread: GossipThread
        self._secret = options.secret.encode() if options.secret else None
        self._settings = Settings(
            tensors=tuple(self._flat.description()),
            method=options.method,
            graph="",
            comm_rate=f"{options.comm_rate:g}",
            wire_format=options.wire_format,
            start="afresh" if resumption is None else resumption.start,
        )
        self._rate_warning_due = True
        self._rendezvous = Rendezvous.open(environment, options.start_timeout_s)
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self._rendezvous.mark_ready(self.rank)

    def _start(self) -> None:
        """Come into the run: with all others at its start, or into one that goes on."""
        environment = self._environment
        if not self._rendezvous.joins:
            self._take_place(environment.rank, environment.num_workers, incarnation=0)
            if self._resumption is not None:
                self._restore(self._resumption.tensors)
                self._resumption.tensors = {}
            self._meet(environment)
            self._begin()
            return
        try:
            self._join(environment)
        except SupersededError as error:
            self._join_anew(error)

    def _join_anew(self, superseded: SupersededError) -> None:
        """Take another rank: two that joined at the same time had been given the same one.

        Raises ``superseded`` where the rank was given to this worker, for then it is not wanted.
        """
        while self._rendezvous.joins and self._environment.needs_rank:
            logger.warning(
                "worker %d takes another rank: one that joined at the same time has this one",
                self.rank,
            )
            self._thread.close()
            # What it has done is counted under its former rank.
            self._gradient_steps = self._samples = 0
            try:
                self._join(self._environment)
            except SupersededError as error:
                superseded = error
                continue
            self._rendezvous.mark_ready(self.rank)
            return
        raise superseded

    def _take_place(self, rank: int, num_workers: int, incarnation: int) -> None:
        """Take a rank among the workers that the run began with, or beyond them."""
        options = self._options
        self.rank, self.num_workers, self.incarnation = rank, num_workers, incarnation
        if self._status is not None:
            self._status.bind(rank)
        graph = build_graph(options.graph, num_workers, seed=options.seed)
        self._constants = Constants.of(graph, options.comm_rate)
        # The phase is measured in communication periods, so eta is that of comm rate 1.
        unit = Constants.of(graph)
        eta = unit.eta if options.method == "a2cid2" and rank < num_workers else 0.0
        worker_rate = unit.worker_rate(rank) if rank < num_workers else 0.0
        self._shared = SharedState(self._flat.state, Phase(eta, worker_rate), since_boot_s)
        self._settings = msgspec.structs.replace(
            self._settings, graph=f"{graph_name(graph)} {_digest(self._constants)}"
        )

    def _listen(self, environment: Environment) -> Listener:
        options = self._options
        host = options.host or environment.choose_host()
        return listen(host, environment.port if options.port is None else options.port)

    def _meet(self, environment: Environment) -> None:
        """Listen, meet the others at the start of the run, and start the gossip thread."""
        listener = self._listen(environment)
        bound, port = listener.getsockname()[:2]
        try:
            host = environment.announced_host(bound)
            meeting = self._rendezvous.meet((host, port), self._settings, self._secret)
        except BaseException:
            listener.close()
            raise
        # Process id 0 stands for "not heard of yet": the worker's own word supersedes it.
        others = (
            Member(rank, 0, 0, Status.ALIVE, *address)
            for rank, address in meeting.addresses.items()
            if rank != self.rank
        )
        progress = () if self._resumption is None else self._resumption.progress
        self._start_thread(listener, host, (meeting.run_id, meeting.secret), others, progress)

    def _start_thread(
        self,
        listener: Listener,
        host: str,
        run: tuple[str, bytes],
        others: Iterable[Member],
        progress: Iterable[ProgressEntry],
        *,
        is_joining: bool = False,
    ) -> None:
        """Build this worker's protocol and loop, and start its thread; ``run``: id and secret."""
        options, (run_id, secret) = self._options, run
        self._run_id = run_id
        process_id = secrets.randbits(62)
        self._protocol = protocol = WorkerProtocol(
            rank=self.rank,
            incarnation=self.incarnation,
            process_id=process_id,
            host=host,
            port=listener.getsockname()[1],
            constants=self._constants,
            method=options.method,  # type: ignore[arg-type]
            policy_name=options.neighbour_policy,
            timeout_s=options.timeout_s,
            random=Random(f"{options.seed} {self.rank} {self.incarnation}"),
            num_chunks=len(self._flat.state.chunks),
            num_copied_chunks=len(self._flat.state.copied_chunks),
            is_joining=is_joining,
            status_address=("", 0) if self._status is None else self._status.announced(host),
        )
        protocol.membership.merge_all(others)
        protocol.progress.merge_all(progress)
        identity = self._identity(host, run_id, self.rank, process_id)
        self._loop = GossipLoop(
            protocol,
            self._shared,
            lambda handler: TcpTransport(
                handler,
                identity,
                secret,
                listener,
                tls=self._tls,
                max_bytes_per_s=options.max_bytes_per_s,
                clock=since_boot_s,
                shared_memory=options.shared_memory,  # type: ignore[arg-type]
            ),
            since_boot_s,
            options.wire_format,
        )
        # Until the loop's first turn.
        self._loop.others_samples = protocol.progress.others_samples
        self._thread = GossipThread(self._loop)
        self._states = StateTransfers(
            self._thread, self._loop, self._shared, self._optimizers, options
        )
        self._shared.rest()
        self._thread.start()

    def _identity(self, host: str, run_id: str, rank: int, process_id: int) -> Identity:
        settings = self._settings
        return Identity(
            rank=rank,
            incarnation=self.incarnation,
            process_id=process_id,
            run_id=run_id,
            model=settings.model,
            method=settings.method,
            graph=settings.graph,
            comm_rate=settings.comm_rate,
            wire_format=settings.wire_format,
            host=host,
        )

    # Joining a run that goes on.

    def _join(self, environment: Environment) -> None:
        """Ask who is there, take a place, take the state of a live worker, and take part.

        At most ``start_timeout_s`` pass without progress before this fails.
        """
        options = self._options
        secret = self._secret or environment.secret
        assert secret is not None, "a joining worker's environment holds the secret"
        listener = self._listen(environment)
        try:
            host = environment.announced_host(listener.getsockname()[0])
            answer = ask_members(
                environment.join,
                self._identity(host, environment.run_id, 0, 0),
                secret,
                tls=self._tls,
                timeout_s=options.start_timeout_s,
            )
            wanted = None if environment.needs_rank else environment.rank
            rank, incarnation = first_incarnation(answer.members, wanted)
            self._take_place(rank, answer.num_workers, incarnation)
        except BaseException:
            listener.close()
            raise
        self._start_thread(
            listener,
            host,
            (environment.run_id, secret),
            answer.members,
            answer.progress,
            is_joining=True,
        )
        training_state.restore(self._states.take(), self._optimizers)
        progress = self._protocol.progress
        steps, samples = progress.worker_steps(rank), progress.worker_samples(rank)
        directory = None if options.checkpoint_dir is None else Path(options.checkpoint_dir)
        self._before = Counts.of_joiner(steps, samples, directory, rank)
        self._thread.call(lambda: self._loop.serve_state((), lambda: None)).result()
        self._thread.call(self._loop.joined).result()
        logger.info("worker %d joined the run, in its life %d", rank, incarnation)

    def _begin(self) -> None:
        """Take rank 0's parameters, down a binary tree, and give them on; then start to exchange.

        A worker trains only after its children in the tree have what it holds, so that all start
        from the same bits; whoever dies meanwhile is not waited for.
        """
        if self._resumption is not None:
            # Everyone has a state of its own to start from.
            self._thread.call(lambda: self._loop.serve_state((), lambda: None)).result()
            self._thread.call(self._loop.start_exchanging).result()
            return
        if self.rank > 0:
            parent = (self.rank - 1) // 2
            self._states.fetch(parent, self._shared.replace, self._options.start_timeout_s)
        served: Future[None] = Future()
        children = {2 * self.rank + 1, 2 * self.rank + 2} & set(range(self.num_workers))
        self._thread.call(
            lambda: self._loop.serve_state(children, lambda: served.set_result(None))
        ).result()
        try:
            # Not a limit on the whole: a large model on a slow link takes its time.
            wait_while_it_advances(served, self._num_chunks_sent, self._options.start_timeout_s)
        except TimeoutError:
            raise RendezvousError(
                f"worker {self.rank} waited {self._options.start_timeout_s:g} s for workers "
                f"{sorted(children)} to take the start parameters; look at their output"
            ) from None
        self._thread.call(self._loop.start_exchanging).result()

    def _num_chunks_sent(self) -> int:
        self._thread.check()
        return self._loop.transfers.num_chunks_sent

    # Training.

    def boundary(self, optimizer_index: int, samples: int) -> None:
        """See :class:`Engine`: x += pending, and the step is counted."""
        try:
            self._thread.check()
        except SupersededError as error:
            self._join_anew(error)
        if self._loop.poisoned is not None:
            self._deal_with_poison(self._loop.poisoned)
        if self._is_averaged:
            raise RuntimeError(
                "optimizer.step() within model.averaged(): the module holds the average there, "
                "and a step on it would be lost"
            )
        if self._flat.check():
            self.loaded()
        self._shared.boundary(optimizer_index)
        if optimizer_index == 0:
            self._gradient_steps += 1
            self._samples += samples
            self._thread.step(samples)
            if self._options.pace == "strict":
                self._keep_pace()
            elif self._rate_warning_due:
                self._warn_of_low_rate()
            self._states.donate()

    def _keep_pace(self) -> None:
        """Wait while more than ``max_lag`` own demands are unserved and someone could serve them.

        Demands that the gossip thread has not seen, for want of a core, count as one a step: it
        would come to more of them than a backlog holds. At the start every neighbour is expected
        to be linked within ``timeout_s``. The protocol's values are read without a lock: each is
        one object, replaced whole by the gossip thread, and a stale one costs a turn.

        While this worker may exchange with nobody nothing is waited for: what ends that may be up
        to this very thread, as where a due checkpoint waits for the end of a running exchange, or
        where the parameters are poisoned.
        """
        protocol, thread = self._protocol, self._thread
        pairing = protocol.pairing
        started_s = time.monotonic()
        if self._first_link_due_s is None:
            self._first_link_due_s = started_s + self._options.timeout_s
        while pairing.answers and pairing.backlog + thread.steps_behind > self._options.max_lag:
            if pairing.available:
                self._first_link_due_s = -math.inf
            elif not protocol.neighbours or time.monotonic() >= self._first_link_due_s:
                break
            thread.check()
            time.sleep(TURN_WHILE_WAITING_S)
            self._shared.boundary(0, wait=True)
            self._states.donate()
        self._waited_s += time.monotonic() - started_s

    def _warn_of_low_rate(self) -> None:
        due = self._protocol.clock.num_ticks
        if due < MIN_TICKS_FOR_RATE_WARNING:
            return
        achieved = self._protocol.exchanges_initiated / due
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
        """By choice: raise, leave the run and raise, or take another worker's state.

        The optimizers' state is taken too: a NaN gradient has spoiled the momentum as well.
        """
        match self._options.on_poison:
            case "stop":
                raise poison
            case "exit":
                self.close()
                raise poison
        self._shared.rest()
        self._thread.call(self._loop.refresh).result()
        deadline_s = time.monotonic() + self._options.start_timeout_s
        while self._loop.poisoned is not None:
            self._thread.check()
            if not self._protocol.refresher.is_needed or time.monotonic() >= deadline_s:
                raise PoisonedError(f"{poison}; and no other worker gave it its parameters")
            time.sleep(TURN_WHILE_WAITING_S)
        for donor in donors(self._states.live(), self.rank):
            try:
                state = self._states.fetch_training(donor, self._options.timeout_s)
            except PeerLostError as error:
                logger.warning("worker %d asks another: %s", self.rank, error)
                continue
            training_state.restore(state, self._optimizers)
            return
        raise PoisonedError(f"{poison}; and no other worker gave it its optimizers' state")

    def total_samples(self) -> int:
        """See :class:`Engine`: own samples as of now, the others' as last heard."""
        return self._samples + self._loop.others_samples

    def check(self) -> None:
        """See :class:`Engine`.

        Not within ``averaged()``, where the module holds other storage: that would be taken for a
        load of the average. This worker's own is there again at the end.
        """
        if not self._is_averaged and self._flat.check():
            self.loaded()

    def loaded(self) -> None:
        """See :class:`Engine`: no pending, no momentum, no half exchange is left."""
        if self._is_averaged:
            raise RuntimeError(
                "load_state_dict() within model.averaged(): the module's own parameters come back "
                "at its end, and what was loaded would be lost. Load before it, or after it"
            )
        self._thread.call(self._loop.hold).result()
        self._shared.reset()
        self._thread.call(self._loop.release).result()

    # Checkpoints.

    @property
    def step_number(self) -> int:
        """See :class:`Engine`."""
        return self._before.step + self._gradient_steps

    def capture(self, wait_s: float) -> Captured | None:
        """See :class:`Engine`.

        x and pending are copied as they are: adding one to the other here could change parameters
        between a forward and a backward pass of the user's.
        """
        if self._is_averaged:
            raise RuntimeError("save no checkpoint within model.averaged(): step out of it first")
        self.check()
        deadline_s = time.monotonic() + wait_s
        while not self._thread.call(self._loop.pause).result():
            self._thread.check()
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(TURN_WHILE_WAITING_S)
        self._thread.check()
        # Every chunk at one phase, which is therefore 0 for whoever resumes.
        self._shared.flow_to_now()
        protocol = self._protocol
        (progress, _), members = self._thread.call(
            lambda: (protocol.progress.news(), protocol.membership.members())
        ).result()
        return Captured(
            tensors={
                f"{kind}/{name}": values.to("cpu", copy=True, memory_format=torch.contiguous_format)
                for kind, flats in self._flats().items()
                for name, values in self._flat.named(flats).items()
            },
            step=self.step_number,
            steps=self._before.steps + self._gradient_steps,
            samples=self._before.samples + self._samples,
            progress=progress,
            run_id=self._run_id,
            incarnation=protocol.incarnation,
            ended=ended_lives(members, self._loop.noticed.notices, self._loop.clock()),
        )

    def _flats(self) -> dict[str, list[Tensor | None]]:
        """The flat tensors that hold something, by kind."""
        segments = self._flat.state.segments
        for segment in segments:
            if segment.role.is_exchanged and not is_finite(segment.x):
                raise PoisonedError(
                    f"the parameters or buffers of worker {self.rank} hold NaN or infinity: they "
                    "are not saved, and the checkpoints written before are kept"
                )
        return {
            "model": [segment.x for segment in segments],
            "c": [segment.c for segment in segments],
            "pending": [
                segment.pending if segment.role.is_exchanged and segment.pending.any() else None
                for segment in segments
            ],
        }

    def release(self) -> None:
        """See :class:`Engine`."""
        self._thread.call(self._loop.release).result()

    @torch.no_grad()
    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint's tensors to the state, before the gossip thread exists."""
        segments = self._flat.state.segments
        pendings = self._flat.named([s.pending if s.role.is_exchanged else None for s in segments])
        momenta = self._flat.named([s.c for s in segments])
        for name, x in self._flat.named([s.x for s in segments]).items():
            x.copy_(tensors[f"model/{name}"])
            pending, c = tensors.get(f"pending/{name}"), tensors.get(f"c/{name}")
            if pending is not None and name in pendings:
                pendings[name].copy_(pending)
            if c is not None and name in momenta:
                momenta[name].copy_(c)
            elif c is not None and name in pendings:  # saved under another method: z goes on
                pendings[name].add_(c, alpha=0.5)
        for chunk in self._flat.state.chunks:
            chunk.restored()

    # The state of others and of oneself.

    def export(self, values: dict[str, Any]) -> None:
        """See :class:`Engine`: x + pending, in new tensors."""
        if self._is_closed:  # x has it all; pending may hold a copy of the result
            return
        views = self._flat.exported(self._copies(self._shared.read))
        for name, value in values.items():
            if isinstance(value, Tensor) and value.data_ptr() in views:
                values[name] = views[value.data_ptr()]

    def _copies(
        self, read: Callable[[Chunk, Tensor], None], device: str | None = None
    ) -> list[Tensor]:
        """Copy every segment: exchanged chunks by ``read``, the others as they are."""
        self._shared.rest()
        copies = []
        for segment in self._flat.state.segments:
            copy = segment.x.to(device or segment.x.device, copy=True)
            if segment.role.is_exchanged:
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
        self._refuse_poison()
        # The gossip thread adds the others'.
        sums = self._copies(self._shared.read_flowed, "cpu")
        rooms = {
            chunk.index: room
            for segment, total in zip(self._flat.state.segments, sums, strict=True)
            if segment.role.is_exchanged
            for chunk, room in segment.split(total)
        }
        # By chunk, since a worker may die, or refuse, when it has sent some of them.
        counts = dict.fromkeys(rooms, 1)

        def add(chunk: Chunk, values: Tensor) -> None:
            if chunk.index in rooms:
                rooms[chunk.index].add_(values)
                counts[chunk.index] += 1

        self._states.fetch_all(add)
        for index, room in rooms.items():
            room.div_(counts[index])
        segments = self._flat.state.segments
        return [total.to(s.x.device) for s, total in zip(segments, sums, strict=True)]

    # The end.

    def consolidate(self) -> Consolidated:
        """See ``GossipDataParallel.consolidate``."""
        if self._is_closed:
            raise RuntimeError("consolidate() was called before, or the model is closed")
        self._refuse_poison(is_end=True)
        # From here to the end the gossip thread alone writes x: this one only waits.
        self._is_consolidating = True
        try:
            outcome = self._wait_for_average()
        except SupersededError as error:
            self._join_anew(error)
            outcome = self._wait_for_average()
        if outcome.num_workers < self.num_workers:
            logger.warning(
                "worker %d: the average is over %d of %d workers; the others died",
                self.rank,
                outcome.num_workers,
                self.num_workers,
            )
        progress = self._protocol.progress
        return Consolidated(
            consensus_distance=outcome.consensus_distance,
            num_workers=outcome.num_workers,
            samples=progress.total_samples,
            gradient_steps=progress.total_steps,
            gradient_steps_by_rank={
                rank: steps for rank, (_, steps) in sorted(progress.by_rank().items())
            },
        )

    def _wait_for_average(self) -> Outcome:
        ended: Future[Outcome] = Future()
        self._shared.rest()
        self._thread.call(lambda: self._loop.consolidate(ended.set_result)).result()
        line_due_s = time.monotonic() + WAIT_LINE_EVERY_S
        while True:
            try:
                return ended.result(WAIT_WHILE_DONATING_S)
            except TimeoutError:
                self._thread.check()
                self._states.donate()
            if time.monotonic() >= line_due_s:
                line_due_s += WAIT_LINE_EVERY_S
                missing = self._protocol.consolidation.missing()
                logger.warning("worker %d waits in consolidate(): %s", self.rank, _names(missing))

    def _refuse_poison(self, *, is_end: bool = False) -> None:
        """Let no NaN into an average: by ``on_poison`` raise, or take another worker's state.

        Args:
            is_end: the others wait for this worker, so with ``stop`` it leaves the run too.
        """
        if self._loop.poisoned is None and all(
            is_finite(segment.x)
            for segment in self._flat.state.segments
            if segment.role.is_exchanged
        ):
            return
        poison = self._loop.poisoned or PoisonedError(
            f"the parameters or buffers of worker {self.rank} hold NaN or infinity: they are not "
            "averaged with the others'. Lower the learning rate or clip gradients"
        )
        if self._options.on_poison != "stop":
            self._thread.call(lambda: self._loop.poison(poison)).result()
        elif is_end:
            self.close()
        self._deal_with_poison(poison)

    def stats(self) -> Stats:
        """See :class:`Engine`. Read without a lock: every value is one object, replaced whole."""
        protocol, traffic = self._protocol, self._loop.traffic
        recent = tuple(traffic.recent_exchanges)
        steps = self._gradient_steps
        sent, received = self._loop.bytes_moved()
        shared_sent, shared_received = self._loop.bytes_shared()
        step_seconds = protocol.clock.step_seconds
        return Stats(
            rank=self.rank,
            num_workers=self.num_workers,
            gradient_steps=self._before.steps + steps,
            samples=self._before.samples + self._samples,
            exchanges_initiated=protocol.exchanges_initiated,
            exchanges_answered=protocol.exchanges_answered,
            exchanges_failed=protocol.exchanges_failed,
            achieved_comm_rate=2 * protocol.exchanges_initiated / steps if steps else math.nan,
            bytes_sent=sent,
            bytes_received=received,
            shared_bytes_sent=shared_sent,
            shared_bytes_received=shared_received,
            kernels=self._shared.kernels,
            exchange_seconds=traffic.exchange_seconds,
            waited_seconds=self._waited_s,
            exchanges_by_neighbour=dict(traffic.exchanges_by_neighbour),
            edge_distance=sum(exchange.half_squared_distance for exchange in recent) / len(recent)
            if recent
            else math.nan,
            step_seconds=math.nan if step_seconds is None else step_seconds,
            recent_exchanges=recent,
            chunks_exchanged=traffic.chunks_exchanged,
            chunks_repeated=traffic.chunks_repeated,
            noticed=self._loop.noticed.notices,
            states_donated=self._states.num_donated,
            donation_pause_seconds=self._states.donated_s,
        )

    def view(self) -> RunView:
        """See :class:`Engine`. Read without a lock, like :meth:`stats`, or copied in one step."""
        protocol, traffic = self._protocol, self._loop.traffic
        return RunView(
            run_id=self._run_id,
            graph=self._settings.graph.rpartition(" ")[0],
            incarnation=protocol.incarnation,
            is_averaging=self._is_consolidating,
            members=show_members(
                protocol.membership.members(), self._loop.silent, protocol.progress.by_rank()
            ),
            neighbours=show_neighbours(
                protocol.neighbours,
                self._loop.links(),
                dict(traffic.exchanges_by_neighbour),
                tuple(traffic.recent_exchanges),
                self._loop.clock(),
            ),
        )

    def close(self) -> None:
        """See :class:`Engine`."""
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
            if not hasattr(self, "_thread"):  # it came to nothing before there was one
                return
            self._thread.close()
            if not self._loop.averaging.has_begun:
                # What the last exchange brought belongs to the parameters.
                self._shared.boundary(wait=True)


def wait_while_it_advances(
    ended: Future[None], advance: Callable[[], int], timeout_s: float
) -> None:
    """Wait for ``ended``; raises TimeoutError once ``advance()`` has not changed for so long."""
    done, deadline_s = advance(), time.monotonic() + timeout_s
    while True:
        try:
            return ended.result(min(timeout_s, LOOK_AT_PROGRESS_EVERY_S))
        except TimeoutError:
            if advance() != done:
                done, deadline_s = advance(), time.monotonic() + timeout_s
            elif time.monotonic() >= deadline_s:
                raise


def _digest(constants: Constants) -> str:
    """A short digest of the edges: random graphs of one name may differ between versions."""
    return hashlib.sha256(repr(constants.edges).encode()).hexdigest()[:8]


def _names(missing: tuple[int, ...]) -> str:
    if not missing:
        return "all live workers are done and average their parameters"
    if len(missing) == 1:
        return f"worker {missing[0]} still trains"
    return f"workers {', '.join(map(str, missing))} still train"
