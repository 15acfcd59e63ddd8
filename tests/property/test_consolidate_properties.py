"""Consolidation under mishaps at any of its frames, in the simulated network."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_faults.network import FaultyNetwork

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.gossip.sums import Outcome
from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.actions import Commit, FinishChunk, Send, SendPartial, SendResult
from gossipdp.protocol.consolidate import Consolidation
from gossipdp.protocol.messages import BeginEpoch, ConsolidationMessage, Epoch, ReductionMessage
from gossipdp.protocol.reduction import tree
from gossipdp.protocol.worker import Action, WorkerProtocol
from gossipdp_lab.simulate.network import Conditions, make_workers

LATEST_END_S = 120.0
MOST_INPUTS = 1000
"""Bound of one consolidation of four workers; it has a few dozen."""

Process = tuple[int, int]
"""Rank and process id."""


class Ending(FaultyNetwork):
    """Workers that end their training at drawn moments, and mishaps while they consolidate.

    Args:
        num_chunks: float chunks of each worker, of one number each; one of an integer follows.
        mishaps: how many of each kind may happen: crash, cut, restart, false death.
        likelihood: of a mishap at one input that has to do with consolidation.
        at_inputs: what happens at such an input of that number, besides.
    """

    def __init__(
        self,
        num_workers: int,
        num_chunks: int = 3,
        *,
        seed: int = 0,
        mishaps: dict[str, int] | None = None,
        likelihood: float = 0.05,
        at_inputs: dict[int, Callable[[Ending], None]] | None = None,
    ) -> None:
        self.random = Random(seed)
        self.num_chunks = num_chunks
        self.mishaps = Counter(mishaps or {})
        self.likelihood = likelihood
        self.at_inputs = at_inputs or {}
        self.num_inputs = 0
        self.mean_latency_s: dict[tuple[int, int], float] = {}
        self.inputs: dict[Process, list[float]] = {}  # what each brings
        self.begun: dict[Epoch, BeginEpoch] = {}
        self.committed_in: list[tuple[Epoch, Epoch]] = []
        self.origins: dict[WorkerProtocol, Epoch] = {}
        self.held: dict[Process, list[Epoch]] = {}
        self.ended: list[tuple[WorkerProtocol, Outcome]] = []
        constants = Constants.of(build_graph("ring" if num_workers > 2 else "path", num_workers))
        workers = make_workers(constants, seed=seed, num_chunks=num_chunks)
        for worker in workers.values():
            self.give_machine(worker)
        conditions = Conditions(self.latency_s, lambda *_: 0.01, lambda rank: 2 * LATEST_END_S)
        super().__init__(
            workers, constants.edges, conditions, averaged=self, detection_s=self.latency_s
        )
        for worker in workers.values():
            self.engine.at(self.draw_s(), partial(self.end_training, worker))

    def draw_s(self) -> float:
        return float(10 ** self.random.uniform(-5.0, -1.5))

    def latency_s(self, sender: int, receiver: int) -> float:
        """Draw a latency: some links are always slow, so that one worker hears of all late."""
        if (sender, receiver) not in self.mean_latency_s:
            self.mean_latency_s[sender, receiver] = self.draw_s()
        return self.mean_latency_s[sender, receiver] * self.random.uniform(0.5, 1.5)

    def give_machine(self, worker: WorkerProtocol) -> None:
        is_linked = worker.peers.__contains__
        worker.consolidation = Consolidation(*process_of(worker), self.num_chunks, 1, is_linked)

    def end_training(self, worker: WorkerProtocol) -> None:
        if self.lives(worker):
            self.done(worker.rank)

    # --- what is averaged

    def state(self, rank: int) -> State:
        """Return the numbers of the process of ``rank``, drawn when they are asked for."""
        random = self.random
        floats = [random.uniform(-1, 1) * 10 ** random.randrange(8) for _ in range(self.num_chunks)]
        copied = random.getrandbits(30)
        self.inputs[process_of(self.workers[rank])] = [*floats, copied]
        double = partial(torch.tensor, dtype=torch.float64)
        trained = [Segment(double([each]), Role.TRAINED, momentum=False) for each in floats]
        return State([*trained, Segment(torch.tensor([copied]), Role.COPIED)])

    def forget(self, rank: int) -> None: ...

    def end(self, rank: int, outcome: Outcome) -> None:
        self.ended.append((self.workers[rank], outcome))

    # --- what goes wrong

    def send(self, rank: int, peer: int, envelope: Any) -> None:
        if isinstance(envelope.message, BeginEpoch):
            self.note_epoch(envelope.message)
        super().send(rank, peer, envelope)

    def note_epoch(self, begin: BeginEpoch) -> None:
        known = self.begun.setdefault(begin.epoch, begin)
        assert known.members == begin.members, "one epoch, one member list"

    def act(self, rank: int, action: Action) -> None:
        if isinstance(action, Commit):
            worker = self.workers[rank]
            attempt = worker.consolidation._attempt
            self.note_epoch(attempt.begin)
            self.committed_in.append((attempt.epoch, action.origin))
            self.origins[worker] = action.origin
        super().act(rank, action)

    def after(self, rank: int, actions: Sequence[Action]) -> None:
        worker = self.workers[rank]
        held, origin = self.held.setdefault(process_of(worker), []), worker.consolidation.origin
        if origin is not None and held[-1:] != [origin]:
            held.append(origin)
        if not any(map(is_of_the_end, actions)):
            return
        self.num_inputs += 1
        # Not at once: whoever performs actions just now must be left to do so.
        if event := self.at_inputs.get(self.num_inputs):
            self.engine.at(self.engine.now, partial(event, self), priority=-1)
        if self.random.random() < self.likelihood:
            self.engine.at(self.engine.now, self.mishap, priority=-1)

    def live(self) -> list[int]:
        return sorted(self.workers.keys() - self.crashed - self.left.keys())

    def mishap(self) -> None:
        kinds, live = sorted(+self.mishaps), self.live()
        if not kinds or len(live) < 2:
            return
        kind = self.random.choice(kinds)
        first, second = self.random.sample(live, 2)
        match kind:
            case "crash":
                self.crash(first)
            case "cut":
                self.cut(first, second)
            case "false death":
                worker = self.workers[first]
                worker.membership.declare_dead(second)
                self.perform(first, worker.poll(self.engine.now))
            case "restart" if self.crashed:
                self.restart(self.random.choice(sorted(self.crashed)), first)
            case _:
                return
        self.mishaps[kind] -= 1

    def crash(self, rank: int) -> None:
        """Let a process die; what it said last still arrives on some of its links, and late."""
        lingering = {
            pair: wire
            for pair, wire in self._wires.items()
            if rank in pair and self.random.random() < 0.5
        }
        for pair in lingering:
            del self._wires[pair]
        super().crash(rank)
        for pair, wire in lingering.items():
            self._wires[pair] = wire
            self.engine.at(self.engine.now + self.draw_s(), partial(self.cut_wire, *pair, wire))

    def cut_wire(self, first: int, second: int, wire: object) -> None:
        if self.wire(first, second) is wire:
            self.cut(first, second)

    def restart(self, rank: int, asked: int) -> None:
        """Start a process that knows what a live one does."""
        for first, second in [pair for pair in self._wires if rank in pair]:
            self.cut(first, second)
        worker = self.new_process(rank, self.random.getrandbits(48), asked, is_joining=False)
        self.give_machine(worker)
        self.start(worker)
        self.engine.at(self.engine.now + self.draw_s(), partial(self.end_training, worker))

    # --- what must hold

    def run(self) -> Ending:
        while live := self.live():
            assert self.engine.now < LATEST_END_S, f"workers {live} hang"
            self.engine.run(until=self.engine.now + 0.2)
        return self

    def expected(self, epoch: Epoch, chunk: int) -> float:
        """Return the mean over the members of an epoch, with the roundings of its tree."""
        begin = self.begun[epoch]
        ids = dict(begin.members)
        parents = tree([rank for rank, _ in begin.members], has_suspects=begin.has_suspects)

        def subtree(rank: int) -> float:
            own = self.inputs[rank, ids[rank]][chunk]
            below = [subtree(child) for child, parent in parents.items() if parent == rank]
            return own + sum(below[1:], below[0]) if below else own

        return subtree(epoch.leader) / len(begin.members)

    def check_results(self) -> None:
        """Check each result: the mean over the members of its epoch, and its leader's integer."""
        for worker, outcome in self.ended:
            origin = self.origins[worker]
            members = self.begun[origin].members
            assert outcome.num_workers == len(members)
            means = [self.expected(origin, chunk) for chunk in range(self.num_chunks)]
            assert list(result_of(outcome)) == [*means, self.inputs[members[0]][-1]]

    def check_agreement(self) -> None:
        ends = {
            (self.origins[worker], outcome.consensus_distance, result_of(outcome))
            for worker, outcome in self.ended
        }
        assert len(ends) <= 1, ends

    def check_claim(self) -> None:
        """Results that differ were first committed by groups without a common process.

        But for a process that has let go of one meanwhile, for a result of others alone.
        """
        first: dict[Epoch, set[Process]] = {}
        for epoch, origin in self.committed_in:
            first.setdefault(origin, set(self.begun[epoch].members))
        for one, other in itertools.combinations(first, 2):
            for process in first[one] & first[other]:
                held = self.held[process]
                meanwhile = held[held.index(one) : held.index(other)]
                assert any(first[one].isdisjoint(self.begun[each].members) for each in meanwhile), (
                    f"{process} computed {one} and {other}"
                )


def process_of(worker: WorkerProtocol) -> Process:
    return worker.rank, worker.membership.own.process_id


def result_of(outcome: Outcome) -> tuple[float | int, ...]:
    return tuple(each.item() for each in outcome.values)


def is_of_the_end(action: Action) -> bool:
    if isinstance(action, Send):
        return isinstance(action.message.message, ConsolidationMessage | ReductionMessage)
    return isinstance(action, SendPartial | SendResult | FinishChunk | Commit)


seeds = st.integers(0, 2**32)
sizes = st.integers(2, 9)
small = st.integers(2, 6)


@settings(max_examples=80)
@given(sizes, seeds, st.sampled_from([0.005, 0.02, 0.1]), st.booleans())
def test_links_may_be_lost_and_workers_die_at_any_event(num_workers, seed, likelihood, may_die):
    mishaps = {"crash": num_workers - 1, "cut": 4} if may_die else {"cut": 12}
    network = Ending(num_workers, mishaps=mishaps, likelihood=likelihood, seed=seed).run()
    network.check_results()
    network.check_agreement()
    averaged = [outcome.num_workers for _, outcome in network.ended]
    assert averaged if may_die else averaged == [num_workers] * num_workers


@pytest.mark.parametrize("num_workers", [2, 4])
def test_one_death_at_every_event(num_workers):
    """Kill every worker after every number of events of one schedule."""
    for victim in range(num_workers):
        for when in range(1, MOST_INPUTS):
            died: list[int] = []

            def die(network: Ending, victim: int = victim, died: list[int] = died) -> None:
                if victim not in network.left:
                    network.crash(victim)
                    died.append(victim)

            network = Ending(num_workers, num_chunks=2, seed=7, at_inputs={when: die}).run()
            network.check_results()
            network.check_agreement()
            assert len(network.ended) == num_workers - len(died)
            leads = {outcome.lead for _, outcome in network.ended}
            assert leads == {min(worker.rank for worker, _ in network.ended)}
            if not died:
                break
        else:
            raise AssertionError(f"no end after {MOST_INPUTS} events")


@settings(max_examples=25)
@given(sizes, seeds)
def test_restarted_workers_take_part_or_are_left_alone(num_workers, seed):
    """No worker hangs and every result is a mean; one that is back after all have left is alone."""
    mishaps = {"crash": num_workers, "cut": 3, "restart": 4}
    network = Ending(num_workers, mishaps=mishaps, likelihood=0.02, seed=seed).run()
    network.check_results()


@settings(max_examples=60)
@given(small, seeds, st.sampled_from([0.01, 0.1]))
def test_false_deaths_split_only_groups_without_a_common_member(num_workers, seed, likelihood):
    mishaps = {"false death": 6, "crash": 2, "cut": 3}
    network = Ending(num_workers, mishaps=mishaps, likelihood=likelihood, seed=seed).run()
    network.check_results()
    network.check_claim()
