"""One run under a schedule of faults: the real protocol, small parameters, every invariant."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from policies import NEIGHBOUR_POLICIES

from gossipdp.dynamics.phase import Phase
from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.exchange_rate import ExchangeRate
from gossipdp.protocol.members import Member, Status, first_incarnation
from gossipdp.protocol.worker import WorkerProtocol
from gossipdp_lab.simulate.objectives import Quadratic
from gossipdp_lab.simulate.population import Population, Training
from simulated_faults import schedule as faults
from simulated_faults.averaged_rows import AveragedRows
from simulated_faults.ledger import InvariantBroken, Ledger
from simulated_faults.rows import FaultyRows
from simulated_faults.watched_network import WatchedNetwork

DIMENSION = 4
NUM_CHUNKS = 3
WELL_WITHIN_S = 30.0
"""A dial to the dead is repeated every 10 s at the latest; an inquiry every 8 time-outs."""
ENDED_WITHIN_S = 60.0
LOOK_EVERY_S = 0.25


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run under faults.

    Attributes:
        digest: the same for the same schedule and protocol, and for no other.
        hungriest_s: the longest that a demand went unserved while somebody could have served it.
        broken: which invariant broke first, and how; empty for none.
    """

    broken: str
    details: str
    digest: str
    hungriest_s: float
    num_exchanges: int
    num_torn: int
    num_taken_over: int
    num_consolidated: int


def run_schedule(
    schedule: faults.FaultSchedule, log: Callable[[str], None] | None = None
) -> Outcome:
    """Run a schedule; an invariant that breaks ends the run, and is in the outcome.

    Args:
        schedule: what is run.
        log: told of every message, exchange and fault; None: of nothing, which is quicker.
    """
    run = _Run(schedule, log)
    broken, details, network = "", "", run.network
    try:
        run.train()
        run.end()
    except InvariantBroken as error:
        broken, details = error.invariant, str(error)
    digest = network.digest(run.population.x.numpy().tobytes())
    counts = network.num_exchanges, run.ledger.num_torn, len(network.took_over), len(network.left)
    return Outcome(broken, details, digest, run.invariants.hungriest_s, *counts)


class _Run:
    """A run under way."""

    def __init__(self, schedule: faults.FaultSchedule, log: Callable[[str], None] | None) -> None:
        self.schedule = schedule
        self.log = log
        self.random = Random(f"{schedule.seed} run")
        self.constants = Constants.of(
            build_graph(schedule.graph, schedule.num_workers),
            1.0 if schedule.comm_rate == "auto" else schedule.comm_rate,
        )
        self.live_graph = LiveGraph(self.constants)
        self.phases: dict[int, Phase] = {}
        num_rows = schedule.num_workers + schedule.num_joins
        begun = Quadratic(DIMENSION, noise_variance=4.0).begin(num_rows, schedule.seed)
        generator = torch.Generator().manual_seed(schedule.seed)
        start = torch.randn(num_rows, DIMENSION, generator=generator, dtype=torch.float64)
        has_momentum = schedule.method == "a2cid2"
        self.population = Population(start, DIMENSION, momentum=has_momentum)
        eta = self.constants.eta if has_momentum else 0.0
        for rank in range(num_rows):
            rate = self.constants.worker_rate(rank) if rank < schedule.num_workers else 0.0
            self.phases[rank] = Phase(eta, rate)
        training = Training(begun, partial(torch.optim.SGD, lr=0.1), self.population)
        self.ledger = Ledger(FaultyRows(training, self.phases))
        self.averaged = AveragedRows(self.population, NUM_CHUNKS)
        self.network = WatchedNetwork(
            schedule,
            {rank: self._make_worker(rank, 0, is_joining=False) for rank in self.constants.workers},
            self.constants.edges,
            ledger=self.ledger,
            averaged=self.averaged,
            live_graph=self.live_graph,
            log=log,
        )
        self.invariants = self.network.invariants

    # --- the run ---------------------------------------------------------------------------

    def train(self) -> None:
        """Until all is well after the last fault."""
        schedule, engine = self.schedule, self.network.engine
        quiet_s = schedule.faulty_s
        for fault in schedule.faults:
            engine.at(fault.at_s, partial(self._inject, fault), priority=-1)
            quiet_s = max(quiet_s, fault.at_s + getattr(fault, "duration_s", 0.0))
        engine.run(until=quiet_s)
        self.network.stop_losses()
        while (amiss := self.invariants.is_well(quiet_s, WELL_WITHIN_S)) is not None:
            if engine.now > quiet_s + WELL_WITHIN_S:
                raise amiss
            engine.run(until=engine.now + LOOK_EVERY_S)

    def end(self) -> None:
        """Until all live workers have consolidated."""
        network, engine = self.network, self.network.engine
        network.begin_ending()
        begin_s = engine.now
        for rank in self.invariants.live():
            done_s = begin_s + self.random.uniform(0.0, self.schedule.done_within_s)
            engine.at(done_s, partial(self._done, network.workers[rank]))
        while missing := [rank for rank in self.invariants.live() if rank not in network.left]:
            if engine.now > begin_s + ENDED_WITHIN_S:
                raise InvariantBroken(
                    "consolidation ends",
                    f"ranks {missing} are still at it {ENDED_WITHIN_S} s after all was well",
                )
            engine.run(until=engine.now + LOOK_EVERY_S)
        self.invariants.check_end(self.averaged)

    def _done(self, worker: WorkerProtocol) -> None:
        if self.network.lives(worker):
            self.network.done(worker.rank)

    # --- faults ----------------------------------------------------------------------------

    def _inject(self, fault: faults.Fault) -> None:
        network, now = self.network, self.network.engine.now
        if self.log is not None:
            self.log(f"{now:.6f} FAULT {fault}")
        match fault:
            case faults.Crash(rank=rank):
                if rank not in network.crashed:
                    network.crash(rank)
            case faults.Restart(rank=rank, asked=asked):
                if rank in network.crashed:
                    self._start(rank, asked)
            case faults.Join(asked=asked):
                self._start(None, asked)
            case faults.Stall(rank=rank, duration_s=duration_s):
                network.stall(rank, duration_s)
            case faults.Partition(duration_s=duration_s, groups=groups):
                network.partition(groups, now + duration_s)
            case faults.Cut(first=first, second=second):
                network.cut(first, second)

    def _start(self, rank: int | None, asked: int) -> None:
        """Start a process; as a real one it asks one live worker for all that it must know."""
        network = self.network
        if not (live := self.invariants.live()):
            return
        answer = network.workers[live[asked % len(live)]].answer_joiner()
        if answer.is_ending:
            return
        rank, incarnation = first_incarnation(answer.members, rank)
        if rank in network.workers and rank not in network.crashed:
            return  # two joiners at once: the later one would be told by the handshake
        worker = self._make_worker(rank, incarnation, is_joining=True)
        worker.membership.merge_all(answer.members)
        worker.progress.merge_all(answer.progress)
        self.phases[rank] = Phase(0.0, 0.0)
        self.population.theta[rank] = 0.0
        network.join(worker)

    def _make_worker(self, rank: int, incarnation: int, *, is_joining: bool) -> WorkerProtocol:
        schedule = self.schedule
        process_id = self.random.getrandbits(48)
        status = Status.JOINING if is_joining else Status.ALIVE
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
