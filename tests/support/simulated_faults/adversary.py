"""One worker of a simulated run that holds the key and lies: what may it cost the honest ones?

It runs the real protocol, so it is asked and answers like any other, and lies on top of that: it
answers no proposal, or accepts and sends nothing, or chunks of a wrong length; it raises what it
proposes and accepts; it makes up records of members, their incarnations and deaths, progress, and
messages of consolidation. What does not decode ends its link, as in the runtime.
"""

import random as random_module
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import msgspec

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol import messages as say
from gossipdp.protocol.actions import Begin
from gossipdp.protocol.members import MAX_INCARNATION, MAX_RANK, Member, ProgressEntry, Status
from gossipdp.protocol.participants import PASS_OVER_AFTER
from gossipdp.protocol.reduction import GRACE, STALLED_AFTER, TICKS_PER_TIMEOUT
from gossipdp_lab.simulate.network import Conditions, make_workers
from simulated_faults.network import Data, FaultyNetwork, Loss

NUM_WORKERS = 8
TIMEOUT_S, STEP_S, TRANSFER_S = 1.0, 0.25, 0.03
TRAINING_S = 12.0
LONGEST_PAUSE_S = 8.0 * TIMEOUT_S
"""The longest pause of an honest worker's exchanges with the other honest ones."""
WAIT_S = 2.0 * TIMEOUT_S
"""For those that are never done: ``consolidate(timeout_s=)``."""
END_TICKS = PASS_OVER_AFTER + 2 * (STALLED_AFTER + GRACE)
LONGEST_END_S = WAIT_S + END_TICKS / TICKS_PER_TIMEOUT * TIMEOUT_S
"""Time to pass over one leader, and for the next to begin anew without a leaf."""
TIMES_WITH_GHOSTS = 2
"""As long, where members or epochs are made up: whenever one comes, and when it is found dead, the
next leader begins anew. An epoch ends once none came for long enough, which chance decides."""
MOST_ITEMS = 200_000
"""In all tables of one honest worker."""
MOST_MESSAGES_PER_S = 400.0
"""That one honest worker sends, all news and answers to lies included."""
GRAPHS = ("ring", "exponential", "complete", "torus")
LIES = ("stall", "lengths", "members", "deaths", "progress", "gains", "epochs", "ids")


@dataclass(frozen=True)
class Adversary:
    """One schedule: who lies and what about, and the share of its messages that are lies."""

    seed: int
    graph: str
    rank: int
    lies: tuple[str, ...]
    share: float
    is_ever_done: bool


def draw_adversary(seed: int) -> Adversary:
    random = Random(f"{seed} adversary")
    return Adversary(
        seed,
        graph=random.choice(GRAPHS),
        rank=random.randrange(NUM_WORKERS),
        lies=tuple(sorted(random.sample(LIES, random.choice([1, 1, 2, 3, len(LIES)])))),
        share=random.choice([0.05, 0.3, 1.0]),
        is_ever_done=random.random() < 0.5,
    )


class _Network(FaultyNetwork):
    """Lets one worker lie; nothing else goes wrong."""

    def __init__(self, adversary: Adversary, *arguments: Any) -> None:
        self.adversary = adversary
        self.random = Random(f"{adversary.seed} lies")
        self.num_sent = [0] * NUM_WORKERS
        self.exchanged_s = [0.0] * NUM_WORKERS
        super().__init__(*arguments)

    def answer(self, rank: int, peer: int) -> Any:
        # Where nobody is, a member was made up.
        return super().answer(rank, peer) if peer in self.workers else "refused"

    def sends(self, rank: int, begin: Begin) -> Data:
        if rank == self.adversary.rank and self._lies("stall"):
            return "nothing"
        return "refused" if rank == self.adversary.rank and self._lies("lengths") else "all"

    def carries(self, rank: int, peer: int, envelope: say.Envelope) -> say.Envelope | Loss:
        self.num_sent[rank] += 1
        if rank != self.adversary.rank:
            return envelope
        if isinstance(envelope.message, say.Accept | say.Busy) and self._lies("no answer"):
            return "message lost"
        try:
            return say.decode(say.encode(self._lie(peer, envelope)))
        except (say.ProtocolError, msgspec.ValidationError, ValueError):
            return "link lost"

    def after(self, rank: int, actions: Collection[Any]) -> None:
        running = self._running.get(rank)
        if running is not None and self.adversary.rank not in running.ends:
            self.exchanged_s[rank] = self.engine.now

    def _lies(self, about: str) -> bool:
        return about in self.adversary.lies and self.random.random() < self.adversary.share

    def _lie(self, peer: int, told: say.Envelope) -> say.Envelope:
        random, message = self.random, told.message
        members, progress = list(told.members), list(told.progress)
        if self._lies("members"):
            members += [self._member() for _ in range(random.choices([1, 4, 64], [90, 9, 1])[0])]
        if self._lies("deaths"):
            members += [
                msgspec.structs.replace(member, status=random.choice([Status.DEAD, Status.LEFT]))
                for member in self.workers[peer].membership.members()
                if member.rank != self.adversary.rank and random.random() < 0.5
            ]
        if self._lies("progress"):
            progress += [self._progress() for _ in range(random.choices([1, 4, 64], [90, 9, 1])[0])]
        if self._lies("gains") and isinstance(message, say.Propose | say.Accept):
            gain = random.choice([0.5, 3.0, 1e3, 1e9, 1e300, float("nan")])
            message = msgspec.structs.replace(message, alpha_tilde=gain)
        if self._lies("ids") and isinstance(
            message, say.Propose | say.Accept | say.Busy | say.Cancel
        ):
            id = msgspec.structs.replace(
                message.id,
                initiator=random.choice([message.id.initiator, random.randrange(NUM_WORKERS)]),
                incarnation=random.choice([0, 1, MAX_INCARNATION]),
                counter=random.choice([0, message.id.counter + 1, 2**62]),
            )
            message = msgspec.structs.replace(message, id=id)
        if self._lies("ids") and isinstance(message, say.Heartbeat):
            suspect = random.randrange(NUM_WORKERS)
            lives = say.AskLife(suspect, 5), say.TellLife(suspect, 5, is_heard=False)
            message = random.choice([say.Free(), say.Pass(), *lives])
        if self._lies("epochs"):
            message = self._consolidation(peer)
        # What is longer than an envelope may be ends the link at once, and nothing is learnt.
        return say.Envelope(message, tuple(members[:256]), tuple(progress[:256]))

    def _member(self) -> Member:
        random = self.random
        ranks = [*range(NUM_WORKERS + 1), random.randrange(NUM_WORKERS, 300), MAX_RANK]
        return Member(
            rank := random.choice(ranks),
            incarnation=random.choice([0, 1, 2, 900, 2**30, MAX_INCARNATION]),
            process_id=random.choice([rank, random.getrandbits(40)]),
            status=random.choice(list(Status)),
            host=random.choice(["simulated", "nowhere", "x" * 200]),
            port=random.choice([0, 1, 65535]),
        )

    def _progress(self) -> ProgressEntry:
        random = self.random
        process_id = random.choice([0, 3, random.getrandbits(62)])
        count = random.choice([0, 10, 2**53])
        return ProgressEntry(random.randrange(NUM_WORKERS + 3), process_id, count, count)

    def _consolidation(self, peer: int) -> Any:
        random, known = self.random, self.workers[peer].consolidation.highest
        next_number = 1 if known is None else known.number + 1
        leader = random.choice([random.randrange(NUM_WORKERS), self.adversary.rank])
        number = random.choice([0, 1, 5, 900, 2**50, 2**62, next_number, next_number])
        epoch = say.Epoch(number, leader, leader)
        ranks = sorted({leader, *random.choices(range(leader, NUM_WORKERS + 2), k=3)})
        average = say.Average(epoch, len(ranks), random.choice([None, 0.0, 1e300]))
        return random.choice(
            [
                say.BeginEpoch(epoch, tuple((rank, rank) for rank in ranks), None),
                say.BeginEpoch(epoch, tuple((rank, rank) for rank in ranks), average),
                say.NewerEpoch(epoch),
                say.Held(epoch, average),
                say.PullPartials(epoch, 0, 10**6),
                say.PullResults(epoch, epoch, 0, 10**6),
                say.Progressed(epoch, random.getrandbits(20)),
                say.Stalled(epoch, random.choice(ranks), random.random() < 0.5, "it is a lie"),
                say.AskAverage(epoch, tuple(ranks)),
                say.TellAverage(epoch, random.randrange(NUM_WORKERS), tuple(ranks[1:])),
                say.Distance(epoch, 1e300),
                say.CommitEpoch(epoch, 0.0),
                say.Committed(epoch),
                say.Release(epoch),
            ]
        )


def run_adversary(adversary: Adversary) -> list[str]:
    """Run a schedule: training, then consolidation; return what was out of bounds, in words."""
    random = Random(f"{adversary.seed} run")
    constants = Constants.of(build_graph(adversary.graph, NUM_WORKERS))
    workers = make_workers(constants, seed=adversary.seed, timeout_s=TIMEOUT_S, num_chunks=3)
    network = _Network(
        adversary,
        workers,
        constants.edges,
        Conditions(
            latency_s=lambda sender, receiver: 0.002 * random.random(),
            transfer_s=lambda sender, receiver: TRANSFER_S * random.uniform(0.5, 1.5),
            step_s=lambda rank: STEP_S * random.uniform(0.5, 1.5),
        ),
    )
    honest = [rank for rank in range(NUM_WORKERS) if rank != adversary.rank]
    engine, pause_s, most_items = network.engine, 0.0, 0

    def look() -> None:
        nonlocal most_items
        engine.run(until=engine.now + 0.5)
        most_items = max(most_items, *(num_items(network.workers[rank]) for rank in honest))

    while engine.now < TRAINING_S:
        look()
        pause_s = max(pause_s, *(engine.now - network.exchanged_s[rank] for rank in honest))
    for rank in honest:
        engine.at(engine.now + random.random(), partial(network.done, rank, WAIT_S))
    if adversary.is_ever_done:
        engine.at(engine.now + random.random(), partial(network.done, adversary.rank))
    begin_s = engine.now + 1.0
    has_ghosts = not {"members", "epochs"}.isdisjoint(adversary.lies)
    longest_end_s = LONGEST_END_S * (TIMES_WITH_GHOSTS if has_ghosts else 1)
    while not set(honest) <= set(network.left) and engine.now < begin_s + 2 * longest_end_s:
        look()
    messages_per_s = max(network.num_sent[rank] for rank in honest) / engine.now
    broken = [
        f"{what}: {found:.6g}, at most {most:g} is allowed"
        for what, found, most in (
            ("seconds without an exchange with another honest one", pause_s, LONGEST_PAUSE_S),
            ("seconds until all had left", engine.now - begin_s, longest_end_s),
            ("items in the tables of one", most_items, MOST_ITEMS),
            ("messages a second of one", messages_per_s, MOST_MESSAGES_PER_S),
        )
        if found > most
    ]
    if missing := [rank for rank in honest if rank not in network.left]:
        broken.append(f"ranks {missing} never left")
    if set(network.superseded) & set(honest):
        broken.append(f"ranks {network.superseded} gave way to somebody who is not there")
    return broken


def num_items(root: object) -> int:
    """Count the items of all tables that can be reached from an object of the protocol."""
    seen: set[int] = set()
    count, waiting = 0, [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | random_module.Random):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            count += len(value)
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset) or hasattr(value, "popleft"):
            count += len(value)
            waiting += value
        elif type(value).__module__.startswith("gossipdp.protocol"):
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()
            names = getattr(type(value), "__slots__", ())
            waiting += [getattr(value, name) for name in names if hasattr(value, name)]
    return count
