"""Sequences of events of several pairings on a random graph, in any order, with cuts and delays."""

from collections import deque
from collections.abc import Iterable
from itertools import permutations
from random import Random
from typing import Any

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import NEIGHBOUR_POLICIES

from gossipdp.protocol import messages as say
from gossipdp.protocol.actions import Begin, Send
from gossipdp.protocol.pairing import MAX_BACKLOG, Exchanging, Idle, MomentsDue, Pairing, Proposing

INCARNATION = 7
PERIODS, MOST_STEPS = (1, 2, 4), 6  # of moments
ANSWER = say.Accept | say.Busy


@st.composite
def graphs(draw: st.DrawFn) -> nx.Graph:
    """Draw a connected graph: a random tree on shuffled ranks and some more edges."""
    num_workers = draw(st.integers(2, 6))
    ranks = draw(st.permutations(range(num_workers)))
    graph: nx.Graph = nx.Graph()
    for position in range(1, num_workers):
        graph.add_edge(ranks[position], ranks[draw(st.integers(0, position - 1))])
    others = list(nx.non_edges(graph))
    if others:
        graph.add_edges_from(draw(st.lists(st.sampled_from(others), unique=True)))
    return graph


class Links:
    """Pairings whose messages wait until they are delivered; after each event all must hold.

    A link is cut at both ends at once, though each end hears of it when it is its turn.
    """

    def __init__(self, graph: nx.Graph, policy: str, random: Random) -> None:
        self._random = random
        self._edges = {frozenset(edge) for edge in graph.edges}
        self._cut: dict[frozenset[int], set[int]] = {}  # those who have not heard of it
        self._queues: dict[tuple[int, int], deque[say.ExchangeMessage]] = {}
        self._begun: dict[say.ExchangeId, dict[int, Begin]] = {}
        self._open: dict[int, say.ExchangeId] = {}
        self._proposed: dict[say.ExchangeId, float] = {}  # with its gain
        self._num_exchanges, self._num_steps = dict.fromkeys(graph, 0), dict.fromkeys(graph, 0)
        # Both counts as moments of each period travelled last.
        self._carried = {rank: dict.fromkeys(PERIODS, (0, 0)) for rank in graph}
        self._demands = dict.fromkeys(graph, 0)
        self._have_stopped: set[int] = set()
        self.pairings = {
            rank: Pairing(
                rank=rank,
                incarnation=INCARNATION,
                policy=NEIGHBOUR_POLICIES[policy](Random(random.random())),
                alpha_tilde=random.uniform(0.5, 2.0),
                moments_due=MomentsDue(PERIODS, MOST_STEPS),
            )
            for rank in graph
        }
        for one, other in self._edges:
            self._queues |= {(one, other): deque(), (other, one): deque()}
        self._link_all()

    def happen(self, kinds: str) -> None:
        """Let one event happen, of one of these kinds if it can."""
        rank = self._random.choice(list(self.pairings))
        pairing = self.pairings[rank]
        waiting = [ends for ends, queue in self._queues.items() if queue]
        ready = [end for end, id in self._open.items() if len(self._begun[id]) == 2]
        unheard = [(edge, end) for edge, ends in self._cut.items() for end in ends]
        match self._random.choice(kinds.split()):
            case "tick" if rank not in self._have_stopped:
                self._demands[rank] = min(MAX_BACKLOG, self._demands[rank] + 1)
                self._do(rank, pairing.tick())
            case "step":
                pairing.moments_due.step()
                self._num_steps[rank] += 1
            case "deliver" if waiting:
                sender, receiver = self._random.choice(waiting)
                message = self._queues[sender, receiver].popleft()
                self._do(receiver, self.pairings[receiver].receive(sender, message))
            case "finish" if ready:
                self._finish(self._random.choice(ready))
            case "abort":
                self._do(rank, pairing.abort("it is poisoned"))
            case "stop" if self._random.random() < 0.1:
                self._have_stopped.add(rank)
                self._demands[rank] = 0
                pairing.stop_asking()
            case "close":
                self._do(rank, pairing.close())
            case "open" if not pairing.answers:
                self._do(rank, pairing.open())
            case "gain":
                pairing.alpha_tilde = self._random.uniform(0.5, 2.0)
            case "late" if isinstance(pairing.state, Proposing):
                self._do(rank, pairing.unanswered(pairing.state.peer))
            case "late" if pairing.freed is not None:
                self._do(rank, pairing.unanswered(pairing.freed))
            case "cut":
                edge = self._random.choice(sorted(self._edges, key=sorted))
                if edge not in self._cut:
                    for ends in permutations(edge):
                        self._queues[ends].clear()
                    self._cut[edge] = set(edge)
            case "hear" if unheard:
                edge, end = self._random.choice(unheard)
                self._cut[edge].remove(end)
                self._do(end, self.pairings[end].lost(*(edge - {end})))
            case "link":
                self._cut = {edge: ends for edge, ends in self._cut.items() if ends}
                self._link_all()
        self.check()

    def settle(self) -> None:
        """Open all, then let everything arrive and end that is on its way."""
        for rank, pairing in self.pairings.items():
            if not pairing.answers:
                self._do(rank, pairing.open())
                self.check()
        for _ in range(10_000):
            if not (self._open or any(self._queues.values()) or any(self._cut.values())):
                return
            self.happen("deliver finish hear")
        raise AssertionError("messages go round without an end")

    def check(self) -> None:
        for rank, pairing in self.pairings.items():
            state = pairing.state
            assert pairing.backlog == self._demands[rank]
            assert isinstance(state, Exchanging) == (rank in self._open)
            has_asked = rank in self._open and self._open[rank].initiator == rank
            assert pairing.is_initiating == (isinstance(state, Proposing) or has_asked)
            # Waits only go up in rank, and only while an own proposal is open.
            assert not pairing._parked or isinstance(state, Proposing)
            assert all(peer < rank for peer in pairing._parked)
            # Nobody who is free has a waiter that it does not serve.
            is_free = isinstance(state, Idle) and pairing.answers and pairing.freed is None
            assert not (is_free and pairing._refused), f"rank {rank} forgets {pairing._refused}"
            if pairing.freed is not None and not self._is_cut(rank, pairing.freed):
                assert self._are_on_way(rank, pairing.freed, say.Free) or self._are_on_way(
                    pairing.freed, rank, (say.Pass, say.Propose)
                ), f"rank {rank} waits for the answer of {pairing.freed}, which has given it"
            if isinstance(state, Proposing) and not self._is_cut(rank, state.peer):
                assert self._has_answer_to(rank, state), f"rank {rank} waits for no answer"
        for ends in self._begun.values():
            assert len({(begin.alpha_tilde, begin.moments) for begin in ends.values()}) == 1

    def _has_answer_to(self, rank: int, state: Proposing) -> bool:
        """Return whether a proposal or its answer is on its way, or its peer keeps it."""
        parked = self.pairings[state.peer]._parked.get(rank)
        answers = self._queues[state.peer, rank]
        return (
            any(message == state.proposal for message in self._queues[rank, state.peer])
            or (parked is not None and parked.id == state.id)
            or any(isinstance(each, ANSWER) and each.id == state.id for each in answers)
            or (state.peer < rank and self._are_on_way(state.peer, rank, say.Propose))
        )

    def _due(self, rank: int) -> tuple[int, ...]:
        """Return the periods of which no exchange lately, or in many steps, carried any."""
        exchanges, steps = self._num_exchanges[rank] + 1, self._num_steps[rank]
        return tuple(
            period
            for period, (exchanges_then, steps_then) in self._carried[rank].items()
            if exchanges - exchanges_then >= period or steps - steps_then >= MOST_STEPS
        )

    def _are_on_way(self, sender: int, receiver: int, kinds: Any) -> bool:
        return any(isinstance(message, kinds) for message in self._queues[sender, receiver])

    def _is_cut(self, one: int, other: int) -> bool:
        return frozenset((one, other)) in self._cut

    def _link_all(self) -> None:
        for rank, pairing in self.pairings.items():
            ends = [edge - {rank} for edge in self._edges - self._cut.keys() if rank in edge]
            self._do(rank, pairing.set_available({peer: 1.0 for (peer,) in ends}))

    def _finish(self, rank: int) -> None:
        id = self._open.pop(rank)
        if id.initiator == rank:
            self._demands[rank] = max(0, self._demands[rank] - 1)
        self._num_exchanges[rank] += 1
        counts = self._num_exchanges[rank], self._num_steps[rank]
        self._carried[rank] |= dict.fromkeys(self._begun[id][rank].moments, counts)
        self._do(rank, self.pairings[rank].finished(id))

    def _do(self, rank: int, actions: Iterable[Any]) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    if isinstance(message, say.Propose):
                        assert self.pairings[rank].answers
                        assert rank not in self._have_stopped, "it asks no more"
                        assert (message.id.initiator, message.id.incarnation) == (rank, INCARNATION)
                        assert message.id not in self._proposed
                        self._proposed[message.id] = message.alpha_tilde
                        assert message.moments == self._due(rank)
                    if not self._is_cut(rank, peer):
                        self._queues[rank, peer].append(message)
                case Begin(id=id):
                    assert rank not in self._open, f"rank {rank} exchanges twice at once"
                    if id.initiator != rank:
                        own = self.pairings[rank].alpha_tilde
                        assert action.alpha_tilde == min(self._proposed[id], own)
                    self._open[rank] = id
                    self._begun.setdefault(id, {})[rank] = action
                case _:
                    assert self._open.pop(rank) == action.id


@settings(max_examples=80)
@given(
    graph=graphs(),
    policy=st.sampled_from(["fresh", *NEIGHBOUR_POLICIES]),
    seed=st.integers(0, 2**32),
    is_calm=st.booleans(),
)
def test_after_every_event_each_wait_has_something_that_ends_it(graph, policy, seed, is_calm):
    """Each proposal has an answer on its way, each FREE too, and no waiter is forgotten.

    No worker is in two exchanges at a time, and both ends begin with the smaller gain.
    """
    links = Links(graph, policy, Random(seed))
    usual = "tick step deliver deliver deliver finish finish close open gain"
    unusual = "late cut abort stop hear hear link link"
    for _ in range(400):
        links.happen(usual if is_calm else f"{usual} {unusual}")
    links.settle()
    for rank, pairing in links.pairings.items():
        assert not isinstance(pairing.state, Exchanging)
        if is_calm:
            assert pairing.state == Idle(), f"rank {rank} is stuck"
            assert pairing.backlog == 0 or policy != "fresh"
