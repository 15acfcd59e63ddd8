"""Consolidation on a network of links that are FIFO, and of which anything else may be expected.

Every event (a delivery, a crash, a lost link, a restart, a worker that is done) is picked by a
seeded random source. Payloads are floats, summed in the order in which frames land, so that a
wrong order or a chunk counted twice shows in the bits.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipdp.protocol.actions import (
    Commit,
    FinishChunk,
    Finished,
    Forget,
    Send,
    SendPartial,
    SendResult,
)
from gossipdp.protocol.consolidate import Consolidation
from gossipdp.protocol.members import Member, Membership, Status
from gossipdp.protocol.messages import (
    BeginEpoch,
    ConsolidationMessage,
    Epoch,
    ReductionMessage,
)
from gossipdp.protocol.reduction import tree

MAX_EVENTS = 200_000


@dataclass(frozen=True)
class Frame:
    """A Partial (float) or Result frame."""

    kind: str
    epoch: Epoch
    chunk: int
    value: float | int


@dataclass
class Node:
    """One process: its view, its machine, its chunks."""

    membership: Membership
    machine: Consolidation
    x: list[float]
    copied: list[int]
    slots: dict[Epoch, dict[int, float | int]] = field(default_factory=dict)
    below: dict[tuple[Epoch, int], float | int] = field(default_factory=dict)
    commit: Commit | None = None
    result: list[float | int] = field(default_factory=list)
    is_gone: bool = False
    generation: dict[int, int | None] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)

    def value(self, epoch: Epoch, chunk: int) -> float | int:
        """The sum or result of a chunk; to a sum this worker's own is added."""
        slots = self.slots.setdefault(epoch, {})
        if chunk not in slots:
            below = self.below.get((epoch, chunk))
            own = [*self.x, *self.copied][chunk]
            slots[chunk] = own if below is None else own + below
        return slots[chunk]

    def squared_distance(self, chunk: int, value: float | int) -> float:
        return (self.x[chunk] - value) ** 2 if chunk < len(self.x) else 0.0


@dataclass
class Plan:
    """How many of each mishap may happen, and how likely one is at an event."""

    crashes: int = 0
    lost_links: int = 0
    restarts: int = 0
    false_deaths: int = 0
    likelihood: float = 0.05


class Network:
    """All processes and the links between them, on no clock: any enabled event may be next."""

    def __init__(
        self,
        num_workers: int,
        num_chunks: int = 3,
        num_copied: int = 1,
        *,
        plan: Plan | None = None,
        seed: int = 0,
        show: Callable[[Member], Member] = lambda member: member,
        machine_type: type[Consolidation] = Consolidation,
    ) -> None:
        self.machine_type = machine_type
        self.random = random.Random(seed)
        self.num_chunks, self.num_copied = num_chunks, num_copied
        self.plan = plan or Plan()
        self.show = show
        self.queues: dict[tuple[int, int], deque[tuple[int, Any]]] = {}
        self.pairs: dict[frozenset[int], tuple[int, bool]] = {}  # generation, broken
        self.members_of: dict[Epoch, tuple[tuple[int, int], ...]] = {}
        self.inputs: dict[tuple[int, int], list[float]] = {}
        self.committed_in: list[tuple[Epoch, Commit]] = []
        self.num_messages = 0
        self.nodes: dict[int, Node] = {}
        self.ended: list[Node] = []
        self.to_finish: list[tuple[Node, FinishChunk]] = []
        self.to_end: list[int] = list(range(num_workers))
        members = [Member(rank, 1, self.random.getrandbits(63)) for rank in range(num_workers)]
        for member in members:
            self.start(member, members)

    def start(self, member: Member, known: list[Member]) -> None:
        membership = Membership(member)
        membership.merge_all(known)
        x = [self.random.uniform(-1, 1) * 10 ** self.random.randrange(8)
             for _ in range(self.num_chunks)]  # fmt: skip
        copied = [self.random.getrandbits(30) for _ in range(self.num_copied)]
        machine = self.machine_type(
            member.rank, member.process_id, self.num_chunks, self.num_copied
        )
        self.nodes[member.rank] = Node(membership, machine, x, copied)
        self.inputs[member.rank, member.process_id] = list(x)

    # --- links

    def pair(self, a: int, b: int) -> tuple[int, bool]:
        return self.pairs.setdefault(frozenset((a, b)), (0, False))

    def send(self, a: int, b: int, item: object, *, dial: bool) -> None:
        node = self.nodes[a]
        generation, is_broken = self.pair(a, b)
        if node.generation.get(b) is None:
            if not dial:
                return
            known = node.membership.get(b)
            peer = self.nodes[b]
            is_other = known is not None and known.process_id != peer.membership.own.process_id
            if peer.is_gone or is_other:  # nobody, or nobody any more, listens at that address
                if node.membership.declare_dead(b):
                    self.review(a)
                return
            if is_broken:
                generation, is_broken = generation + 1, False
                self.pairs[frozenset((a, b))] = (generation, is_broken)
            node.generation[b] = generation
            node.told[b] = 0
        news, node.told[b] = node.membership.news(node.told.get(b, 0))
        if node.generation[b] == generation and not is_broken:
            self.queues.setdefault((a, b), deque()).append((generation, (item, news)))
            self.num_messages += 1

    def break_link(self, a: int, b: int) -> None:
        generation, is_broken = self.pair(a, b)
        if is_broken:
            return
        self.pairs[frozenset((a, b))] = (generation, True)
        for source, target in ((a, b), (b, a)):
            self.queues.setdefault((source, target), deque()).clear()
            self.queues[source, target].append((generation, "lost"))

    def drop_link(self, a: int, b: int) -> None:
        """The end at ``a`` notices that its link to ``b`` is gone."""
        self.nodes[a].generation[b] = None
        self.perform(a, self.nodes[a].machine.link_lost(b))

    def deliver(self, a: int, b: int) -> None:
        generation, item = self.queues[a, b].popleft()
        node = self.nodes.get(b)
        if node is None or node.is_gone:
            return
        here = node.generation.get(a)
        if here is not None and generation < here:
            return  # of an old link
        if item == "lost":
            if here == generation:
                self.drop_link(b, a)
            return
        if here is not None and generation > here:
            self.drop_link(b, a)
        if node.generation.get(a) is None:
            node.generation[a], node.told[a] = generation, 0
        message, news = item
        if node.membership.merge_all(news):
            self.review(b)
        if not node.is_gone:
            self.handle(b, a, message)

    def handle(self, rank: int, peer: int, message: object) -> None:
        node = self.nodes[rank]
        machine = node.machine
        if isinstance(message, Frame):
            epoch, chunk, current = message.epoch, message.chunk, machine.current
            if message.kind == "partial":
                if current is not None and current.epoch == epoch and current.accepts(peer, chunk):
                    before = node.below.get((epoch, chunk))
                    node.below[epoch, chunk] = (
                        message.value if before is None else before + message.value
                    )
                    self.perform(rank, machine.partial_landed(peer, epoch, chunk))
            elif machine.accepts_result(peer, epoch, chunk):
                node.slots.setdefault(epoch, {})[chunk] = message.value
                distance = node.squared_distance(chunk, message.value)
                self.perform(rank, machine.result_landed(peer, epoch, chunk, distance))
        elif message is not None:
            data = msgspec.msgpack.encode(message)
            kinds = ConsolidationMessage | ReductionMessage
            decoded: ConsolidationMessage = msgspec.msgpack.decode(data, type=kinds)
            self.perform(rank, machine.receive(peer, decoded))

    # --- what a machine asks for

    def review(self, rank: int) -> None:
        node = self.nodes[rank]
        if not node.is_gone:
            members = [self.show(member) for member in node.membership.members()]
            self.perform(rank, node.machine.review(members))

    def perform(self, rank: int, actions: list[Any]) -> None:
        node = self.nodes[rank]
        for action in actions:
            match action:
                case Send(peer, message):
                    assert peer != rank
                    if isinstance(message, BeginEpoch):
                        known = self.members_of.setdefault(message.epoch, message.members)
                        assert known == message.members, "one epoch, one member list"
                    self.send(rank, peer, message, dial=True)
                case SendPartial(peer, epoch, chunk):
                    if self.epoch_of(node) == epoch:
                        frame = Frame("partial", epoch, chunk, node.value(epoch, chunk))
                        self.send(rank, peer, frame, dial=False)
                case FinishChunk():
                    self.to_finish.append((node, action))
                case SendResult(peer, origin, chunk):
                    frame = Frame("result", origin, chunk, node.value(origin, chunk))
                    self.send(rank, peer, frame, dial=False)
                case Forget(epoch):
                    node.slots.pop(epoch, None)
                case Commit(origin):
                    node.commit = action
                    node.result = [
                        node.value(origin, chunk)
                        for chunk in range(self.num_chunks + self.num_copied)
                    ]
                    self.committed_in.append((self.epoch_of(node), action))
                case Finished():
                    self.leave(rank)

    def epoch_of(self, node: Node) -> Epoch:
        attempt = node.machine._attempt
        assert attempt is not None
        self.members_of.setdefault(attempt.epoch, attempt.begin.members)
        return attempt.epoch

    def leave(self, rank: int) -> None:
        node = self.nodes[rank]
        node.membership.set_status(Status.LEFT)
        for peer in self.nodes:
            if node.generation.get(peer) is not None:
                self.send(rank, peer, None, dial=False)
        self.ended.append(node)
        self.vanish(rank)

    def vanish(self, rank: int) -> None:
        self.nodes[rank].is_gone = True
        for peer in self.nodes:
            if peer != rank:
                generation, is_broken = self.pair(rank, peer)
                if not is_broken:
                    self.pairs[frozenset((rank, peer))] = (generation, True)
                    self.queues.setdefault((peer, rank), deque()).clear()
                    self.queues.setdefault((rank, peer), deque()).append((generation, "lost"))

    # --- mishaps

    def crash(self, rank: int) -> None:
        for peer in self.nodes:
            queue = self.queues.get((rank, peer), deque())
            unsent = self.random.randint(0, len(queue))
            while unsent and queue and queue[-1][1] != "lost":
                queue.pop()
                unsent -= 1
        self.vanish(rank)
        if rank in self.to_end:
            self.to_end.remove(rank)

    def restart(self, rank: int) -> None:
        donor = self.random.choice(self.live())
        known = list(self.nodes[donor].membership.members())
        incarnation = 1 + max(member.incarnation for member in known if member.rank == rank)
        for peer in self.nodes:
            generation, _ = self.pair(rank, peer)
            self.pairs[frozenset((rank, peer))] = (generation + 1, False)
        self.start(Member(rank, incarnation, self.random.getrandbits(63)), known)
        self.to_end.append(rank)
        self.send(rank, donor, None, dial=True)

    def live(self) -> list[int]:
        return [rank for rank, node in self.nodes.items() if not node.is_gone]

    def mishap(self) -> None:
        plan, live = self.plan, self.live()
        kinds = [kind for kind in ("crashes", "lost_links", "restarts", "false_deaths")
                 if getattr(plan, kind) > 0]  # fmt: skip
        if not kinds or len(live) < 2:
            return
        kind = self.random.choice(kinds)
        a, b = self.random.sample(live, 2)
        if kind == "crashes":
            self.crash(a)
        elif kind == "lost_links":
            self.break_link(a, b)
        elif kind == "false_deaths":
            self.nodes[a].membership.declare_dead(b)
            self.review(a)
        else:
            ended = {id(node) for node in self.ended}
            dead = [r for r, node in self.nodes.items() if node.is_gone and id(node) not in ended]
            if not dead:
                return
            self.restart(self.random.choice(dead))
        setattr(plan, kind, getattr(plan, kind) - 1)

    # --- running

    def enabled(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        for (a, b), queue in self.queues.items():
            if queue:
                events.append(lambda a=a, b=b: self.deliver(a, b))  # type: ignore[misc]
        for rank in self.to_end:
            events.append(lambda rank=rank: self.done(rank))  # type: ignore[misc]
        for index in range(len(self.to_finish)):
            events.append(lambda index=index: self.finish(index))  # type: ignore[misc]
        if events and self.random.random() < 0.7:
            return events
        live = self.live()
        for a in live:
            node = self.nodes[a]
            for b in self.nodes:
                known = node.membership.get(b)
                own = node.membership.own
                if known is None or known == own or not known.is_live:
                    continue
                if node.generation.get(b) is None or node.told[b] < node.membership.version:
                    events.append(lambda a=a, b=b: self.send(a, b, None, dial=True))  # type: ignore[misc]
        return events

    def done(self, rank: int) -> None:
        self.to_end.remove(rank)
        self.nodes[rank].membership.set_status(Status.DONE)
        self.review(rank)

    def finish(self, index: int) -> None:
        node, action = self.to_finish.pop(index)
        current, chunk = node.machine.current, action.chunk
        if node.is_gone or current is None or current.epoch != action.epoch:
            return
        if current.num_finished != chunk:  # they are finished in order
            self.to_finish.append((node, action))
            return
        value = node.value(action.epoch, chunk) / action.divisor
        node.slots[action.epoch][chunk] = value
        rank, distance = node.membership.own.rank, node.squared_distance(chunk, value)
        self.perform(rank, node.machine.chunk_finished(action.epoch, chunk, distance))

    def run(self) -> Network:
        for _ in range(MAX_EVENTS):
            if self.random.random() < self.plan.likelihood:
                self.mishap()
            events = self.enabled()
            if not events:
                break
            self.random.choice(events)()
        else:
            raise AssertionError(f"no end after {MAX_EVENTS} events")
        hung = {rank: self.nodes[rank].machine.missing() for rank in self.live()}
        assert not hung, f"workers {sorted(hung)} hang"
        return self

    # --- what must hold

    def expected(self, epoch: Epoch, chunk: int) -> float:
        members = self.members_of[epoch]
        parents, process_ids = tree([rank for rank, _ in members]), dict(members)

        def subtree(rank: int) -> float:
            own = self.inputs[rank, process_ids[rank]][chunk]
            below = [subtree(child) for child, parent in parents.items() if parent == rank]
            return own + sum(below[1:], below[0]) if below else own

        return subtree(epoch.leader) / len(members)

    def check_results(self) -> None:
        """Every result is the mean over exactly the members of the epoch that computed it."""
        for node in self.ended:
            assert node.commit is not None
            members = self.members_of[node.commit.origin]
            assert node.commit.num_members == len(members)
            expected = [self.expected(node.commit.origin, k) for k in range(self.num_chunks)]
            assert node.result[: self.num_chunks] == expected

    def check_agreement(self) -> None:
        assert len({node.commit for node in self.ended}) <= 1
        assert len({tuple(node.result) for node in self.ended}) <= 1

    def check_claim(self) -> None:
        """Results that differ were first committed by groups without a common process."""
        first: dict[Epoch, set[tuple[int, int]]] = {}
        for epoch, commit in self.committed_in:
            first.setdefault(commit.origin, set(self.members_of[epoch]))
        for one, other in itertools.combinations(first, 2):
            assert not first[one] & first[other], f"{one} and {other}"


@pytest.mark.parametrize("num_workers", range(1, 10))
@pytest.mark.parametrize("num_chunks", [0, 1, 4])
@pytest.mark.parametrize("num_copied", [0, 2])
def test_undisturbed(num_workers: int, num_chunks: int, num_copied: int) -> None:
    for seed in range(3):
        network = Network(num_workers, num_chunks, num_copied, seed=seed).run()
        network.check_results()
        network.check_agreement()
        assert len(network.ended) == num_workers
        commit = network.ended[0].commit
        assert commit is not None
        assert commit.num_members == num_workers
        exact = [network.expected(commit.origin, k) for k in range(num_chunks)]
        squared = [
            (x - mean) ** 2
            for inputs in network.inputs.values()
            for x, mean in zip(inputs, exact, strict=True)
        ]
        assert commit.consensus_distance == pytest.approx(sum(squared) / num_workers, rel=1e-12)


seeds = st.integers(0, 2**32)
sizes = st.integers(2, 12)


@settings(max_examples=60)
@given(sizes, seeds)
def test_links_may_be_lost_at_any_event(num_workers: int, seed: int) -> None:
    network = Network(num_workers, plan=Plan(lost_links=12), seed=seed).run()
    network.check_results()
    network.check_agreement()
    assert len(network.ended) == num_workers
    assert network.ended[0].commit is not None
    assert network.ended[0].commit.num_members == num_workers


@settings(max_examples=100)
@given(sizes, seeds, st.sampled_from([0.005, 0.02, 0.1]))
def test_workers_may_die_at_any_event(num_workers: int, seed: int, likelihood: float) -> None:
    plan = Plan(crashes=num_workers - 1, lost_links=4, likelihood=likelihood)
    network = Network(num_workers, plan=plan, seed=seed).run()
    network.check_results()
    network.check_agreement()
    assert network.ended


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_one_death_at_every_event(num_workers: int) -> None:
    """Every worker killed after every number of events of one schedule."""
    for victim in range(num_workers):
        for when in range(1000):
            network = Network(num_workers, num_chunks=2, seed=7)
            for _ in range(when):
                events = network.enabled()
                if not events:
                    break
                network.random.choice(events)()
            if network.nodes[victim].is_gone:
                break
            network.crash(victim)
            network.run()
            network.check_results()
            network.check_agreement()
            assert len(network.ended) == num_workers - 1


@settings(max_examples=60)
@given(sizes, seeds)
def test_restarted_workers_take_part_or_are_left_alone(num_workers: int, seed: int) -> None:
    """Nobody hangs, every result is a mean; who comes back after all have left is on its own."""
    plan = Plan(crashes=num_workers, lost_links=3, restarts=4, likelihood=0.02)
    network = Network(num_workers, plan=plan, seed=seed).run()
    assert all(node.commit is not None for node in network.ended)


@settings(max_examples=100)
@given(sizes, seeds, st.sampled_from([0.01, 0.1]))
def test_false_deaths_split_only_groups_without_a_common_member(
    num_workers: int, seed: int, likelihood: float
) -> None:
    plan = Plan(false_deaths=6, crashes=2, lost_links=3, likelihood=likelihood)
    network = Network(num_workers, plan=plan, seed=seed).run()
    network.check_results()
    network.check_claim()


def num_caught(seeds: range, plan: Callable[[], Plan], **options: Any) -> int:
    """How many schedules show that something is wrong."""
    caught = 0
    for seed in seeds:
        try:
            network = Network(6, plan=plan(), seed=seed, **options).run()
            network.check_results()
            network.check_claim()
        except AssertionError:
            caught += 1
    return caught


def test_the_harness_catches_a_protocol_that_does_not_remove_the_dead() -> None:
    def show(member: Member) -> Member:
        if member.status is Status.DEAD:
            return msgspec.structs.replace(member, status=Status.DONE)
        return member

    assert num_caught(range(20), lambda: Plan(crashes=1), show=show) > 0
    assert num_caught(range(20), lambda: Plan(crashes=1)) == 0


class Forgetful(Consolidation):
    """Joins epochs that replace a result which it holds."""

    def refuses(self, begin: BeginEpoch) -> bool:
        return False


def test_the_harness_catches_a_protocol_that_forgets_accepted_results() -> None:
    def plan() -> Plan:
        return Plan(false_deaths=6, lost_links=3, likelihood=0.02)

    assert num_caught(range(50), plan) == 0
    assert num_caught(range(50), plan, machine_type=Forgetful) > 0
