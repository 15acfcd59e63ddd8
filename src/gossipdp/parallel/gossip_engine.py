"""Asynchronous training: the main thread's end of the gossip."""

import atexit
import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from gossipdp.dynamics.kernels import is_finite
from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Chunk, Role
from gossipdp.errors import PoisonedError, RendezvousError
from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph, graph_name
from gossipdp.parallel.checkpoint import Captured, Counts, Resumption
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.parallel.options import GossipOptions
from gossipdp.parallel.stats import Consolidated, Stats
from gossipdp.protocol.membership import Member, Status
from gossipdp.protocol.worker import WorkerProtocol
from gossipdp.runtime.averaging import Outcome
from gossipdp.runtime.environment import Environment, check_platform
from gossipdp.runtime.gossip_loop import GossipLoop
from gossipdp.runtime.gossip_thread import GossipThread
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.rendezvous import Rendezvous
from gossipdp.runtime.settings import Settings
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.tcp import TcpTransport
from gossipdp.runtime.tcp_sockets import listen
from gossipdp.runtime.tls import Tls, tls_files
from gossipdp.runtime.transfer import adopt

logger = logging.getLogger("gossipdp")

WAIT_LINE_EVERY_S = 10.0
TURN_WHILE_WAITING_S = 0.002
LOOK_AT_PROGRESS_EVERY_S = 1.0
# Ticks of a worker's clock before the share that was served is worth a warning.
MIN_TICKS_FOR_RATE_WARNING = 100
RATE_WARNING_BELOW = 0.8


class GossipEngine(Engine):
    """One worker of methods ``a2cid2``, ``gossip`` and ``none``.

    Owns the flat parameters, the state shared with the gossip thread, and that thread. The main
    thread's parts are :meth:`boundary` and, while it waits at the start and at the end, the writes
    to x that only it may do.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: GossipOptions,
        resumption: Resumption | None = None,
    ) -> None:
        check_platform()
        environment = Environment.read()
        files = tls_files(options.tls_cert, options.tls_key, options.tls_ca) or environment.tls
        self._tls = Tls(files) if files is not None else None
        self.forward_module = module
        self.rank = environment.rank
        self.num_workers = environment.num_workers
        self.incarnation = 0
        self._options = options
        graph = build_graph(options.graph, self.num_workers, seed=options.seed)
        constants = Constants.of(graph, options.comm_rate)
        self._flat = FlatParameters(
            module,
            optimizers,
            momentum=options.method == "a2cid2",
            exchange_frozen=options.exchange_frozen,
        )
        # The phase is measured in communication periods, so eta is that of comm rate 1.
        unit = Constants.of(graph)
        self._shared = SharedState(
            self._flat.state,
            Phase(unit.eta if options.method == "a2cid2" else 0.0, unit.worker_rate(self.rank)),
        )
        self._resumption = resumption
        self._gradient_steps = 0
        self._samples = 0
        self._before = Counts.of(resumption)
        if resumption is not None:
            self._restore(resumption.tensors)
            resumption.tensors = {}
        self._waited_s = 0.0
        self._is_averaged = False
        self._is_consolidating = False
        self._is_closed = False
        self._rate_warning_due = True
        rendezvous = Rendezvous.open(environment, options.start_timeout_s)
        settings = Settings(
            tensors=tuple(self._flat.description()),
            method=options.method,
            graph=f"{graph_name(graph)} {_digest(constants)}",
            comm_rate=f"{options.comm_rate:g}",
            wire_format="as the parameters",
            start="afresh" if resumption is None else resumption.start,
        )
        self._protocol, self._loop = self._meet(environment, rendezvous, settings, constants)
        if resumption is not None:
            self._protocol.progress.merge_all(resumption.progress)
            # Until the loop's first turn.
            self._loop.others_samples = self._protocol.progress.others_samples
        self._thread = GossipThread(self._loop)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        rendezvous.mark_ready()
        self._rendezvous = rendezvous

    def _meet(
        self,
        environment: Environment,
        rendezvous: Rendezvous,
        settings: Settings,
        constants: Constants,
    ) -> tuple[WorkerProtocol, GossipLoop]:
        """Listen, meet the others, and build this worker's protocol and loop."""
        options = self._options
        host = options.host or environment.choose_host()
        listener = listen(host, environment.port if options.port is None else options.port)
        bound, port = listener.getsockname()[:2]
        try:
            host = environment.announced_host(bound)
            meeting = rendezvous.meet(
                (host, port), settings, options.secret.encode() if options.secret else None
            )
        except BaseException:
            listener.close()
            raise
        process_id = secrets.randbits(62)
        protocol = WorkerProtocol(
            rank=self.rank,
            incarnation=self.incarnation,
            process_id=process_id,
            host=host,
            port=port,
            constants=constants,
            method=options.method,  # type: ignore[arg-type]
            policy_name=options.neighbour_policy,
            timeout_s=options.timeout_s,
            random=Random(f"{options.seed} {self.rank} {self.incarnation}"),
            num_chunks=len(self._flat.state.chunks),
            num_copied_chunks=len(self._flat.state.copied_chunks),
        )
        # Process id 0 stands for "not heard of yet": the worker's own word supersedes it.
        protocol.membership.merge_all(
            Member(rank, 0, 0, Status.ALIVE, *address)
            for rank, address in meeting.addresses.items()
            if rank != self.rank
        )
        identity = Identity(
            rank=self.rank,
            incarnation=self.incarnation,
            process_id=process_id,
            run_id=meeting.run_id,
            model=settings.model,
            method=settings.method,
            graph=settings.graph,
            comm_rate=settings.comm_rate,
            wire_format=settings.wire_format,
            host=host,
        )
        loop = GossipLoop(
            protocol,
            self._shared,
            lambda handler: TcpTransport(
                handler,
                identity,
                meeting.secret,
                listener,
                tls=self._tls,
                max_bytes_per_s=options.max_bytes_per_s,
            ),
            time.monotonic,
        )
        return protocol, loop

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
            self._fetch(parent, adopt, self._options.start_timeout_s)
        served: Future[None] = Future()
        children = {2 * self.rank + 1, 2 * self.rank + 2} & set(range(self.num_workers))
        self._thread.call(
            lambda: self._loop.serve_state(children, lambda: served.set_result(None))
        ).result()
        try:
            # Not a limit on the whole: a large model on a slow link takes its time.
            wait_while_it_advances(
                served, lambda: self._loop.num_state_chunks_sent, self._options.start_timeout_s
            )
        except TimeoutError:
            raise RendezvousError(
                f"worker {self.rank} waited {self._options.start_timeout_s:g} s for workers "
                f"{sorted(children)} to take the start parameters; look at their output"
            ) from None
        self._thread.call(self._loop.start_exchanging).result()

    def _fetch(self, peer: int, sink: Callable[[Chunk, Tensor], None], timeout_s: float) -> None:
        """Run one state transfer from ``peer`` to its end; raises what ended it."""
        arrived: Future[None] = Future()

        def on_end(error: Exception | None) -> None:
            if error is None:
                arrived.set_result(None)
            else:
                arrived.set_exception(error)

        self._thread.call(lambda: self._loop.fetch_state(peer, sink, on_end, timeout_s)).result()
        arrived.result()

    # Training.

    def boundary(self, optimizer_index: int, samples: int) -> None:
        """See :class:`Engine`: x += pending, and the step is counted."""
        self._thread.check()
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

    def _keep_pace(self) -> None:
        """Wait while more than ``max_lag`` own demands are unserved and someone could serve them.

        The protocol's two values are read without a lock: each is one object, replaced whole by
        the gossip thread, and a stale one costs a turn.
        """
        pairing = self._protocol.pairing
        started_s = time.monotonic()
        while pairing.backlog > self._options.max_lag and pairing.available:
            self._thread.check()
            time.sleep(TURN_WHILE_WAITING_S)
            self._shared.boundary(wait=True)
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

    def total_samples(self) -> int:
        """See :class:`Engine`: own samples as of now, the others' as last heard."""
        return self._samples + self._loop.others_samples

    def check(self) -> None:
        """See :class:`Engine`."""
        if self._flat.check():
            self.loaded()

    def loaded(self) -> None:
        """See :class:`Engine`: no pending, no momentum, no half exchange is left."""
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
        self.check()
        if self._is_averaged:
            raise RuntimeError("save no checkpoint within model.averaged(): step out of it first")
        deadline_s = time.monotonic() + wait_s
        while not self._thread.call(self._loop.pause).result():
            self._thread.check()
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(TURN_WHILE_WAITING_S)
        self._thread.check()
        # Every chunk at one phase, which is therefore 0 for whoever resumes.
        self._shared.flow_to_now()
        progress, _ = self._thread.call(self._protocol.progress.news).result()
        return Captured(
            tensors={
                f"{kind}/{name}": values.clone(memory_format=torch.contiguous_format)
                for kind, flats in self._flats().items()
                for name, values in self._flat.named(flats).items()
            },
            step=self.step_number,
            steps=self._before.steps + self._gradient_steps,
            samples=self._before.samples + self._samples,
            progress=progress,
        )

    def _flats(self) -> dict[str, list[Tensor | None]]:
        """The flat tensors that hold something, by kind."""
        segments = self._flat.state.segments
        for segment in segments:
            if segment.role is Role.TRAINED and not is_finite(segment.x):
                raise PoisonedError(
                    f"the parameters of worker {self.rank} hold NaN or infinity: they are not "
                    "saved, and the checkpoints written before are kept"
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

    def _copies(self, read: Callable[[Chunk, Tensor], None]) -> list[Tensor]:
        """Copy every segment: exchanged chunks by ``read``, the others as they are."""
        copies = []
        for segment in self._flat.state.segments:
            copy = segment.x.clone()
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
        sums = self._copies(self._shared.read_flowed)
        rooms = {
            chunk.index: room
            for segment, total in zip(self._flat.state.segments, sums, strict=True)
            if segment.role.is_exchanged
            for chunk, room in segment.split(total)
        }

        def add(chunk: Chunk, values: Tensor) -> None:
            if chunk.index in rooms:
                rooms[chunk.index].add_(values)

        live = self._thread.call(self._protocol.membership.live).result()
        others = [rank for rank in live if rank != self.rank]
        for peer in others:
            self._fetch(peer, add, self._options.start_timeout_s)
        for room in rooms.values():
            room.div_(1 + len(others))
        return sums

    # The end.

    def consolidate(self) -> Consolidated:
        """See ``GossipDataParallel.consolidate``."""
        if self._is_closed:
            raise RuntimeError("consolidate() was called before, or the model is closed")
        ended: Future[Outcome] = Future()
        # From here to the end the gossip thread alone writes x: this one only waits.
        self._is_consolidating = True
        self._thread.call(lambda: self._loop.consolidate(ended.set_result)).result()
        while True:
            try:
                outcome = ended.result(WAIT_LINE_EVERY_S)
                break
            except TimeoutError:
                self._thread.check()
                missing = self._protocol.consolidation.missing()
                logger.warning("worker %d waits in consolidate(): %s", self.rank, _names(missing))
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
        )

    def stats(self) -> Stats:
        """See :class:`Engine`. Read without a lock: every value is one object, replaced whole."""
        protocol, traffic = self._protocol, self._loop.traffic
        recent = tuple(traffic.recent_exchanges)
        steps = self._gradient_steps
        sent, received = self._loop.bytes_moved()
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
            exchange_seconds=traffic.exchange_seconds,
            waited_seconds=self._waited_s,
            exchanges_by_neighbour=dict(traffic.exchanges_by_neighbour),
            edge_distance=sum(exchange.half_squared_distance for exchange in recent) / len(recent)
            if recent
            else math.nan,
            step_seconds=math.nan if step_seconds is None else step_seconds,
            recent_exchanges=recent,
        )

    def close(self) -> None:
        """See :class:`Engine`."""
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
            self._thread.close()
            if not self._is_consolidating:
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
