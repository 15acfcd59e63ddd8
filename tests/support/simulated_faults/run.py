"""One run under a schedule of faults: the real protocol, small parameters, every invariant."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import final

import torch
from policies import NEIGHBOUR_POLICIES

from gossipdp.dynamics.phase import Phase
from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.actions import Begin, Finished, Send
from gossipdp.protocol.exchange_rate import ExchangeRate
from gossipdp.protocol.members import Member, Status, first_incarnation
from gossipdp.protocol.messages import ConsolidationMessage, ReductionMessage
from gossipdp.protocol.worker import Action, WorkerProtocol
from gossipdp_lab.simulate.network import Conditions, Wire
from gossipdp_lab.simulate.objectives import Quadratic
from gossipdp_lab.simulate.population import Population, Training
from simulated_faults import schedule as faults
from simulated_faults.averaged_rows import AveragedRows, Frame
from simulated_faults.invariants import Invariants
from simulated_faults.ledger import InvariantBroken, Ledger
from simulated_faults.network import FaultyNetwork

DIMENSION = 4
NUM_CHUNKS = 3
WELL_WITHIN_S = 30.0
"""A dial to the dead is repeated every 10 s at the latest; an inquiry every 8 time-outs."""
ENDED_WITHIN_S = 60.0
LOOK_EVERY_S = 0.25
LEAVES_AFTER_S = 0.25
"""A worker that has left ends its process once what it said has arrived."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run under faults.

    Attributes:
        digest: the same for the same schedule and protocol, and for no other.
        broken: which invariant broke first, and how; empty for none.
    """

    broken: str
    details: str
    digest: str
    num_torn: int
    num_taken_over: int
    num_consolidated: int


def run_schedule(
    schedule: faults.FaultSchedule, log: Callable[[str], None] | None = None
) -> Outcome:
    """Run a schedule; an invariant that breaks ends the run, and is in the outcome.

    ``log`` is told of every message, exchange and fault.
    """
    run = _Run(schedule, log)
    broken, details = "", ""
    try:
        run.train()
        run.end()
    except InvariantBroken as error:
        broken, details = error.invariant, str(error)
    counts = run.ledger.num_torn, len(run.took_over), len(run.left)
    return Outcome(broken, details, run.digest(), *counts)


@final
class _Run(FaultyNetwork):
    """A network that loses links and workers as a schedule says, and is watched."""

    def __init__(self, schedule: faults.FaultSchedule, log: Callable[[str], None] | None) -> None:
        self.schedule = schedule
        self.log = log
        self.random = Random(f"{schedule.seed} run")
        constants = Constants.of(
            build_graph(schedule.graph, schedule.num_workers),
            1.0 if schedule.comm_rate == "auto" else schedule.comm_rate,
        )
        self.live_graph = LiveGraph(constants)
        num_rows = schedule.num_workers + schedule.num_joins
        begun = Quadratic(DIMENSION, noise_variance=4.0).begin(num_rows, schedule.seed)
        generator = torch.Generator().manual_seed(schedule.seed)
        start = torch.randn(num_rows, DIMENSION, generator=generator, dtype=torch.float64)
        has_momentum = schedule.method == "a2cid2"
        self.population = Population(start, DIMENSION, momentum=has_momentum)
        eta = constants.eta if has_momentum else 0.0
        self.phases = {
            rank: Phase(eta, constants.worker_rate(rank) if rank < schedule.num_workers else 0.0)
            for rank in range(num_rows)
        }
        training = Training(begun, partial(torch.optim.SGD, lr=0.1), self.population)
        self.ledger = Ledger(training, self.phases)
        self.averaged = AveragedRows(self.population, NUM_CHUNKS)
        # How long a demand may wait: for silence to be noticed, and for the turn of a busy hub that
        # draws whom it serves, so that a leaf may be passed over for several rounds of all.
        turn_s = schedule.transfer_s + 3.0 * (schedule.latency_s + schedule.latency_jitter_s)
        longest_s = 4.0 * schedule.timeout_s + 16.0 * schedule.step_s
        longest_s += 8.0 * schedule.num_workers * turn_s
        self.invariants = Invariants(
            self, self.ledger, self.live_graph, step_s=schedule.step_s, longest_hunger_s=longest_s
        )
        self._digest = hashlib.blake2b(digest_size=8)
        self._delays_s = {broken.begin: broken.delay_s for broken in schedule.broken_exchanges}
        self._ending = {fault.frame: fault.kind for fault in schedule.ending}
        self._is_ending = False
        self._num_begins = self._num_frames = 0
        workers = {rank: self._make_worker(rank, 0, Status.ALIVE) for rank in constants.workers}
        everybody = [worker.membership.own for worker in workers.values()]
        for worker in workers.values():
            worker.membership.merge_all(everybody)
        random, jitter_s = Random(f"{schedule.seed} network"), schedule.latency_jitter_s

        def latency_s(sender: int, receiver: int) -> float:
            return schedule.latency_s + jitter_s * random.random()

        super().__init__(
            workers,
            constants.edges,
            Conditions(
                latency_s=latency_s,
                transfer_s=lambda *_: schedule.transfer_s * random.uniform(0.5, 1.5),
                step_s=lambda rank: schedule.step_s * random.uniform(0.5, 1.5),
            ),
            self.ledger,
            averaged=self.averaged,
            lost_at_messages=set(schedule.lost_at_messages),
            detection_s=latency_s,
        )

    # --- the run ---------------------------------------------------------------------------

    def train(self) -> None:
        """Until all is well after the last fault."""
        quiet_s = self.schedule.faulty_s
        for fault in self.schedule.faults:
            self.engine.at(fault.at_s, partial(self._inject, fault), priority=-1)
            quiet_s = max(quiet_s, fault.at_s + getattr(fault, "duration_s", 0.0))
        self.engine.run(until=quiet_s)
        self._delays_s.clear()  # from now on no message and no exchange loses its link
        self._lost_at_messages = ()
        while (amiss := self.invariants.is_well(quiet_s, WELL_WITHIN_S)) is not None:
            if self.engine.now > quiet_s + WELL_WITHIN_S:
                raise amiss
            self.engine.run(until=self.engine.now + LOOK_EVERY_S)

    def end(self) -> None:
        """Until all live workers have consolidated."""
        self._is_ending = True
        begin_s = self.engine.now
        for rank in self.invariants.live():
            done_s = begin_s + self.random.uniform(0.0, self.schedule.done_within_s)
            self.engine.at(done_s, partial(self._done, self.workers[rank]))
        while missing := [rank for rank in self.invariants.live() if rank not in self.left]:
            if self.engine.now > begin_s + ENDED_WITHIN_S:
                raise InvariantBroken(
                    "consolidation ends",
                    f"ranks {missing} are still at it {ENDED_WITHIN_S} s after all was well",
                )
            self.engine.run(until=self.engine.now + LOOK_EVERY_S)
        self.invariants.check_end(self.averaged)

    def digest(self) -> str:
        """Return a digest of every input so far, its number of actions, and the rows."""
        digest = self._digest.copy()
        digest.update(self.population.x.numpy().tobytes())
        digest.update(repr(sorted(self.num_messages.items())).encode())
        return digest.hexdigest()

    def _done(self, worker: WorkerProtocol) -> None:
        if self.lives(worker):
            self.done(worker.rank)

    # --- faults ----------------------------------------------------------------------------

    def _log(self, text: object) -> None:
        if self.log is not None:
            self.log(f"{self.engine.now:.6f} {text}")

    def _inject(self, fault: faults.Fault) -> None:
        self._log(f"FAULT {fault}")
        match fault:
            case faults.Crash(rank=rank):
                if rank not in self.crashed:
                    self.crash(rank)
            case faults.Restart(rank=rank, asked=asked):
                if rank in self.crashed:
                    self._start(rank, asked)
            case faults.Join(asked=asked):
                self._start(None, asked)
            case faults.Stall(rank=rank, duration_s=duration_s):
                self.stall(rank, duration_s)
            case faults.Partition(duration_s=duration_s, groups=groups):
                self.partition(groups, self.engine.now + duration_s)
            case faults.Cut(first=first, second=second):
                self.cut(first, second)

    def _start(self, rank: int | None, asked: int) -> None:
        """Start a process; as a real one it asks one live worker for all that it must know."""
        if not (live := self.invariants.live()):
            return
        answer = self.workers[live[asked % len(live)]].answer_joiner()
        if answer.is_ending:
            return
        rank, incarnation = first_incarnation(answer.members, rank)
        if rank in self.workers and rank not in self.crashed:
            return  # two joiners at once: the later one would be told by the handshake
        worker = self._make_worker(rank, incarnation, Status.JOINING)
        worker.membership.merge_all(answer.members)
        worker.progress.merge_all(answer.progress, self.engine.now)
        self.phases[rank] = Phase(0.0, 0.0)
        self.population.theta[rank] = 0.0
        self.join(worker)

    def _make_worker(self, rank: int, incarnation: int, status: Status) -> WorkerProtocol:
        schedule = self.schedule
        process_id = self.random.getrandbits(48)
        return WorkerProtocol(
            own=Member(rank, incarnation, process_id, status, f"host-{rank}", process_id % 65536),
            graph=self.live_graph,
            method=schedule.method,
            policy_type=NEIGHBOUR_POLICIES[schedule.policy],
            timeout_s=schedule.timeout_s,
            random=Random(f"{schedule.seed} {rank} {process_id}"),
            num_chunks=NUM_CHUNKS,
            exchange_rate=ExchangeRate() if schedule.comm_rate == "auto" else None,
        )

    # --- every input -----------------------------------------------------------------------

    def before(self, rank: int, actions: Sequence[Action]) -> None:
        self._digest.update(struct.pack("<dii", self.engine.now, rank, len(actions)))
        for action in actions if self.log is not None else ():
            self._log(f"{rank:2}: {action}")
        self.invariants.before(rank, actions)

    def after(self, rank: int, actions: Sequence[Action]) -> None:
        self.invariants.after(rank)
        now = self.engine.now
        for action in actions:
            match action:
                case Begin(peer=peer):
                    delay_s = self._delays_s.pop(self._num_begins, None)
                    self._num_begins += 1
                    if delay_s is not None:
                        self.engine.at(now + delay_s, partial(self.cut, rank, peer))
                case Finished() if self._is_ending:
                    self.engine.at(now + LEAVES_AFTER_S, partial(self._leave, self.workers[rank]))
                case Send(peer=peer, message=envelope) if self._is_ending:
                    if isinstance(envelope.message, ConsolidationMessage | ReductionMessage):
                        self._count_frame(rank, peer)

    def poll(self, rank: int) -> None:
        super().poll(rank)
        if rank not in self.crashed and rank not in self._stalled_until:
            self.invariants.polled(rank)

    def send_chunk(self, wire: Wire, rank: int, peer: int, frame: Frame) -> None:
        super().send_chunk(wire, rank, peer, frame)
        if self._is_ending:
            self._count_frame(rank, peer)

    def _count_frame(self, rank: int, peer: int) -> None:
        kind = self._ending.get(self._num_frames)
        self._num_frames += 1
        if kind is None:
            return
        self._log(f"FAULT {kind} with a frame of {rank} to {peer}")
        # Not at once: whoever performs actions just now must be left to do so.
        if kind == "cut":
            self.engine.at(self.engine.now, partial(self.cut, rank, peer), priority=-1)
        else:
            victim = rank if kind == "sender crashes" else peer
            self.engine.at(self.engine.now, partial(self._die, self.workers[victim]), priority=-1)

    def _die(self, worker: WorkerProtocol) -> None:
        """Unless it would be the last one."""
        others = [rank for rank in self.invariants.live() if rank != worker.rank]
        if self.lives(worker) and any(rank not in self.left for rank in others):
            self.crash(worker.rank)

    def _leave(self, worker: WorkerProtocol) -> None:
        if self.lives(worker):
            self.crash(worker.rank)
