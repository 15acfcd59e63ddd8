"""The entry of a worker into a run, at its start or while it goes on, and its place there."""

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import nn

import gossipdp
from gossipdp.dynamics.phase import Phase
from gossipdp.errors import SupersededError
from gossipdp.gossip.joining import RunEndingError, ask_members, has_ended
from gossipdp.gossip.loop import GossipLoop
from gossipdp.gossip.thread import Background, GossipThread, one_blas_thread
from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.launcher.cores import num_threads
from gossipdp.launcher.environment import is_loopback
from gossipdp.launcher.rendezvous import Rendezvous, Settings
from gossipdp.links.clock import since_boot_s
from gossipdp.links.handshake import UNLIKE_BASES, Identity
from gossipdp.links.sockets import Listener, listen
from gossipdp.links.tcp import TcpTransport
from gossipdp.links.tls import Tls
from gossipdp.observe.status import MemberStatus
from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint import (
    Counts,
    Facts,
    Resumption,
    ended_lives,
    saved_steps,
    warn_of_older,
)
from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.parallel.moments import moments_due
from gossipdp.parallel.options import Options
from gossipdp.parallel.shards import Agreed, Replica
from gossipdp.parallel.stats import view_of
from gossipdp.parallel.termination import TERMINATION
from gossipdp.parallel.training_state import BetweenSteps, take_state
from gossipdp.protocol.exchange_rate import (
    TAKEN_SHARE_BELOW_ONE,
    TAKEN_SHARE_ON_CARD,
    ExchangeRate,
)
from gossipdp.protocol.members import Member, ProgressEntry, Status, first_incarnation
from gossipdp.protocol.neighbours import Place
from gossipdp.protocol.worker import WorkerProtocol
from gossipdp.rules import shown_rate

if TYPE_CHECKING:
    from gossipdp.observe.server import StatusPort

logger = logging.getLogger("gossipdp")

Result = TypeVar("Result")

LOOK_AT_RANK_EVERY_S = 0.05


class Entry:
    """One worker's way into the run, its place there, and how far it and the others are.

    Only the main thread uses it, but for :meth:`total_samples`, :meth:`known` and :meth:`view`.

    Attributes:
        rank, incarnation: of this worker; the number of its lives before this one.
        world_size: workers that the run began with.
        run_id, graph: of the run; the graph's name.
        before: the worker's counts from before.
        phase: of its momentum.
        between_steps: gives joiners the optimizers' state; it must know of each step.
        settings: those that all workers must share.
        lead: the lowest rank of the average, after it.
    """

    rank: int
    world_size: int
    run_id: str
    incarnation = 0
    graph = ""
    phase: Phase
    _common_random_state = ""  # torch's, if all workers began with the same
    _restarts = 0
    _protocol: WorkerProtocol
    _loop: GossipLoop
    _thread: GossipThread
    is_consolidating = False
    lead: int | None = None
    _has_thread = _has_stopped = False
    _gradient_steps = _samples = 0  # of this life
    _agreed = Agreed()

    def __init__(
        self,
        module: nn.Module,
        flat: FlatParameters,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Options,
        replica: Replica,
        *,
        resumption: Resumption | None,
        page: "StatusPort | None",
    ) -> None:
        network, environment = options.network, replica.environment
        directory = environment.tls if network.tls is None else Path(network.tls)
        self._tls = Tls(directory) if directory is not None else None
        self._environment = replace(environment, tls=directory)
        self._flat, self._state = flat, flat.state
        self.module, self.optimizers, self.options = module, optimizers, options
        self._network, self._page = network, page
        self.replica, self.resumption = replica, resumption
        self.between_steps = BetweenSteps(optimizers)
        if resumption is not None and resumption.base != flat.base_digest:
            raise ValueError(f"the checkpoints are of another frozen base: {UNLIKE_BASES}")
        self._secret = network.secret.encode() if network.secret else None
        self.before = Counts() if resumption is None else resumption.counts
        self.settings = Settings(
            tensors=(*flat.description(), *flat.state.description()),
            base=flat.base_digest,
            method=options.method,
            graph="",
            comm_rate=shown_rate(options.asked_comm_rate),
            wire_format=options.wire_format,
            start="afresh" if resumption is None else resumption.start,
            budget_samples=options.budget_samples,
            timeout_s=network.timeout_s,
        )
        self._rendezvous = Rendezvous.open(self._environment, network.start_timeout_s)

    def start(self) -> None:
        """Come into the run: with all others at its start, or into one that goes on."""
        environment = self._environment
        if self._rendezvous.joins:
            if environment.needs_rank and self.replica.is_sharded:
                self._join_with_one_rank()
            else:
                self._join()
            # Each shard's network may or may not have heard of the replica's last steps. All its
            # processes count on from one number, so they save at the same steps.
            self.before = Counts(*(int(max(each)) for each in self.replica.gather(*self.before)))
            self._share_cores()
        else:
            self._take_place(environment.rank, environment.world_size, incarnation=0)
            if self.resumption is not None:
                self._flat.restore(self.resumption.tensors)
                self.resumption.tensors = {}
            self._meet()
            if self.resumption is None and self.rank > 0:
                take_state(self._thread, self._loop, self._state, self._network, is_start=True)
            self._call(self._loop.release)

    def _share_cores(self) -> None:
        """Compute with a share of the cores: workers of the run on this host have theirs."""
        membership = self._protocol.membership
        hosts = [each.host for each in self._call(membership.members) if not each.is_over]
        num_here = hosts.count(membership.own.host) * self.replica.environment.num_shards
        torch.set_num_threads(min(torch.get_num_threads(), num_threads(num_here)))

    def _give_up_rank(self, superseded: SupersededError) -> None:
        if not (self._rendezvous.joins and self._environment.needs_rank):
            raise superseded
        logger.warning(
            "worker %d takes another rank: one that joined at the same time has this one",
            self.rank,
        )
        self._end_thread()

    def _end_thread(self) -> None:
        if self._has_thread:
            self._thread.close()
            self._work_out.close()

    def _take_place(self, rank: int, num_workers: int, incarnation: int) -> None:
        options = self.options
        self.rank, self.world_size, self.incarnation = rank, num_workers, incarnation
        if self._page is not None:
            self._page.bind(rank)
        graph = build_graph(options.graph, num_workers)
        self.graph = graph.name
        # The phase is measured in communication periods, so eta is that of comm rate 1.
        unit = Constants.of(graph)
        fixed = options.fixed_comm_rate
        self._constants = unit if fixed is None else Constants.of(graph, fixed)
        is_original, self._method = rank < num_workers, options.method
        has_eta = self._method == "a2cid2" and is_original
        self.phase = Phase(
            unit.eta if has_eta else 0.0, unit.worker_rate(rank) if is_original else 0.0
        )
        if self._method == "a2cid2" and unit.alpha_tilde < 0.5 + 1e-9:
            # On a complete graph exchanges leave c at zero: plain averaging needs no memory for it.
            self._method = "gossip"
            self._state.drop_momentum()
        # Random graphs of one name may differ between versions.
        digest = hashlib.sha256(repr(self._constants.edges).encode()).hexdigest()[:8]
        self.settings = msgspec.structs.replace(self.settings, graph=f"{graph.name} {digest}")

    @contextmanager
    def _listening(self) -> Iterator[tuple[Listener, str]]:
        """Give the listener, and the host to announce; an error within closes it."""
        environment, network = self._environment, self._network
        port = environment.port if network.port is None else network.port
        listener = listen(network.host or environment.choose_host(), port)
        try:
            yield listener, environment.announced_host(listener.getsockname()[0])
        except BaseException:
            listener.close()
            raise

    def _meet(self) -> None:
        """Listen, meet the others at the start of the run, and start the gossip thread."""
        with self._listening() as (listener, host):
            address = host, listener.getsockname()[1]
            state = random_state() if self.resumption is None else ""
            progress = () if self.resumption is None else self.resumption.progress
            known_samples = sum(entry.samples for entry in progress)
            meeting = self._rendezvous.meet(
                address, self.settings, self._secret, state, known_samples
            )
            warn_of_older(meeting.known_samples)
            if self._environment.shard == 0 and self.options.method != "none":
                self._common_random_state = meeting.common_random_state
            # Process id 0 stands for "not heard of yet": the worker's own word supersedes it.
            others = (
                Member(rank, 0, 0, Status.ALIVE, *address)
                for rank, address in meeting.addresses.items()
                if rank != self.rank
            )
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
        options, network, (run_id, secret) = self.options, self._network, run
        self.run_id = run_id
        # Of two processes of a rank the later life has the higher id: that one stays.
        process_id = self.incarnation << 32 | secrets.randbits(32)
        self._work_out = Background[Place](one_blas_thread)
        status = Status.JOINING if is_joining else Status.ALIVE
        status_place = ("", 0) if self._page is None else self._page.announced(host)
        places = host, listener.getsockname()[1], *status_place
        share = TAKEN_SHARE_ON_CARD if self._state.device.is_queued else TAKEN_SHARE_BELOW_ONE
        self._protocol = protocol = WorkerProtocol(
            own=Member(
                self.rank, self.incarnation, process_id, status, *places, restarts=self._restarts
            ),
            graph=LiveGraph(self._constants),
            method=self._method,  # type: ignore[arg-type]
            timeout_s=network.timeout_s,
            random=Random(f"{options.seed} {self.rank} {self.incarnation}"),
            num_chunks=len(self._state.averaged_chunks),
            num_copied_chunks=len(self._state.all_chunks) - len(self._state.averaged_chunks),
            work_out=self._work_out,
            exchange_rate=ExchangeRate(share) if options.fixed_comm_rate is None else None,
            moments_due=moments_due(
                [each.moment for each in self._state.moments if each.moment is not None],
                is_default=options.exchange.moments is True,
            ),
        )
        protocol.membership.merge_all(others)
        protocol.progress.merge_all(progress, since_boot_s())
        identity = self._identity(host, run_id, self.rank, process_id)
        limit = network.max_bytes_per_s(self.replica.environment.num_shards)
        self._loop = GossipLoop(
            protocol,
            self._state,
            self.phase,
            lambda handler: TcpTransport(
                handler,
                identity,
                secret,
                listener,
                tls=self._tls,
                max_bytes_per_s=limit,
                clock=since_boot_s,
                shared_memory=network.shared_memory,
            ),
            since_boot_s,
            wire_format=options.wire_format,
        )
        if not is_loopback(host) or network.shared_memory == "off" or limit is not None:
            self._loop.codec.load()  # now, since compiling takes seconds
        self._thread, self._has_thread = GossipThread(self._loop), True
        self.between_steps.attach(self._state.device.mark(), self._loop.transport.wake)
        self._loop.transfers.offer = self.between_steps.offer
        self._loop.report = self._rendezvous.report
        self._state.device.finish()
        self._thread.start()

    def _identity(self, host: str, run_id: str, rank: int, process_id: int) -> Identity:
        settings = self.settings
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
            timeout=f"{self._network.timeout_s:g} s",
            host=host,
        )

    def _join_with_one_rank(self) -> None:
        """Join with all processes of a replica, under the rank that the first of them is given.

        Two replicas that join at the same time may take part under one rank before they hear of
        each other, as two workers may. So the first process passes its rank on only after it was
        undisputed for a time-out. The others then find it free in their own networks, or held by a
        replica that has ended. They wait for it in a collective, at most for gloo's 30 minutes.

        A replica that hears only now of another one of its rank ends: its processes could not take
        another rank at the same step.
        """
        environment = self._environment
        is_first = environment.shard == 0
        if is_first:
            self._join()
            since_s = time.monotonic()
            while time.monotonic() < since_s + self._network.timeout_s:
                try:
                    self._thread.check()
                except SupersededError as error:
                    self._give_up_rank(error)
                    self._join()
                    since_s = time.monotonic()
                time.sleep(LOOK_AT_RANK_EVERY_S)
        rank = self.replica.first_says(self.rank if is_first else 0)
        self._environment = replace(environment, rank=rank)
        if not is_first:
            self._join()

    def _join(self) -> None:
        """Join; whenever the rank turns out to be another worker's, join with another rank.

        If the run ends before this worker has joined, and it was started again, its process ends
        well.
        """
        while True:
            try:
                self._join_once()
                return
            except SupersededError as error:
                self._give_up_rank(error)
            except RunEndingError as error:
                if not self._environment.num_restarts:
                    raise
                logger.warning("this worker is not needed any more: %s", error)
                raise SystemExit(0) from None

    def _join_once(self) -> None:
        """Ask who is there, take a place, take the state of a live worker, and take part.

        At most ``start_timeout_s`` pass without progress before this fails.
        """
        environment = self._environment
        secret = self._secret or environment.secret or b""
        if not secret and self._tls is None:
            raise ValueError(
                "a worker joins a run only with the secret or the TLS files with which that was "
                "started: give `gossipdp run --join HOST:PORT` its --secret-file or --tls"
            )
        with self._listening() as (listener, host):
            answer = ask_members(
                environment.addresses_to_join,
                self._identity(host, environment.run_id, 0, 0),
                secret,
                tls=self._tls,
                timeout_s=self._network.start_timeout_s,
            )
            wanted = None if environment.needs_rank else environment.rank
            rank, incarnation = first_incarnation(answer.members, wanted, answer.progress)
            before = (each.restarts + 1 for each in answer.members if each.rank == rank)
            self._restarts = next(before, 0)
            self._take_place(rank, answer.num_workers, incarnation)
            run, others = (environment.run_id, secret), answer.members
            self._start_thread(listener, host, run, others, answer.progress, is_joining=True)
        training = take_state(self._thread, self._loop, self._state, self._network, is_start=False)
        if has_ended(self._call(self._protocol.membership.members), rank):
            raise RunEndingError("the run has ended while this worker took its state")
        training_state.restore(training, self.optimizers)
        known = self._call(self._protocol.progress.by_rank)
        samples, steps = known.get(rank, (0, 0))
        # In a resumed run an earlier life may have saved files at steps beyond those counted here:
        # the files of this life must be newer.
        directory = self.options.checkpoints.directory
        saved = [] if directory is None else saved_steps(Path(directory), rank)
        self.before = Counts(max([steps, *saved]), steps, samples)
        self._call(self._loop.release)
        logger.info("worker %d joined the run, in its life %d", rank, 1 + self._restarts)

    def in_run(self, function: Callable[[], Result]) -> Result:
        """Call ``function``, again whenever this joiner had to take another rank meanwhile."""
        while True:
            try:
                return function()
            except SupersededError as error:
                self.come_again(error)

    def come_again(self, superseded: SupersededError) -> None:
        """Take another rank: two workers that joined at the same time had been given the same one.

        If this worker came with a rank of its own, raise ``superseded``: the run has its worker.
        """
        self._give_up_rank(superseded)
        self._join()
        self._rendezvous.mark_ready(self.rank)
        self._gradient_steps = self._samples = 0  # its work so far counts under its former rank

    def leave(self) -> None:
        """End the thread, if there is one, and then the threads that work for it."""
        self._end_thread()
        self.between_steps.close()

    def _call(self, function: Callable[[], Result]) -> Result:
        return self._thread.call(function).result()

    # How far it and the others are.

    @property
    def draws_alike(self) -> bool:
        """Return whether torch still has the random state here with which all workers began."""
        return self.world_size > 1 and self._common_random_state == random_state()

    @property
    def has_stepped(self) -> bool:
        return self._gradient_steps > 0

    @property
    def step_number(self) -> int:
        """Return the number of this worker's last gradient step; goes on where a run resumed."""
        return self.before.step + self._gradient_steps

    def counts(self) -> Counts:
        return Counts(
            self.step_number,
            self.before.steps + self._gradient_steps,
            self.before.samples + self._samples,
        )

    def facts(self) -> Facts:
        protocol, resumed = self._protocol, self.resumption
        # Notices as new as the members: of a death without one nobody knows when it was.
        (progress, _), now = self._call(lambda: (protocol.progress.news(), self._loop.publish()))
        # If all are asked to end, one may have saved and ended while another was still in its step.
        # After the average, whoever died is not in it, however late that was.
        now_s = min(self._loop.clock(), TERMINATION.asked_s) if self.lead is None else math.inf
        ended = ended_lives(now.members, now.counters.noticed, now_s)
        return Facts(
            rank=self.rank,
            world_size=self.world_size,
            **self.counts()._asdict(),
            progress=tuple(msgspec.structs.replace(entry, is_stopped=False) for entry in progress),
            gossipdp=gossipdp.__version__,
            run_id=self.run_id,
            incarnation=protocol.incarnation,
            ended=(*(resumed.ended if resumed else ()), *ended),
            num_means=resumed.num_means if resumed else 0,
            base=self._flat.base_digest,
        )

    def total_samples(self) -> int:
        """Return the samples of all workers: own ones as of now, the others' as last heard."""
        return self._samples + self.known().others_samples

    def stop(self) -> None:
        """End the run for all workers, before its budget is used up; the next messages say so."""

        def add() -> None:
            self._protocol.progress.add(0, 0, since_boot_s(), is_stopped=True)

        self.in_run(lambda: self._call(add))
        self._has_stopped = True

    def view(self) -> tuple[MemberStatus, ...]:
        return view_of(self._loop.snapshot, self._loop.clock())

    @property
    def is_lead(self) -> bool:
        """Return whether this worker's rank is the lowest of those that train, or were averaged."""
        return self.known().is_lead if self.lead is None else self.rank == self.lead

    def known(self) -> Agreed:
        """Return what this process knows now; with shards, what all agreed on after a step."""
        return self._agreed if self.replica.is_sharded else self._own_view()

    def forget_ending(self) -> None:
        """Forget that the replica is to end: a script that catches Ctrl+C may go on."""
        self._agreed = self._agreed._replace(is_ending=False)

    def _own_view(self, samples: int = 0) -> Agreed:
        """Return what this process alone knows; ``samples``: of the step that has ended."""
        snapshot = self._loop.snapshot
        members = snapshot.members  # by rank
        live = (each.rank for each in members if each.status in (Status.ALIVE, Status.DONE))
        return Agreed(
            samples=samples,
            others_samples=snapshot.others_samples,
            is_stopped=self._has_stopped or snapshot.is_stopped,
            is_poisoned=self._loop.poisoned is not None,
            is_ending=TERMINATION.asked_s < math.inf,
            is_lead=self.rank <= next(live, self.rank),
        )


def random_state() -> str:
    """Return a digest of torch's random state, from which a loader draws its order by default."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
