"""Sums over a tree in the simulated network: what they come to, and who may hold them up."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from links import MemoryLink
from simulated_faults.averaged_rows import AveragedRows, Frame
from simulated_faults.network import FaultyNetwork, Loss

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.errors import PoisonedError
from gossipdp.gossip import sums as data_side
from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol import actions as do
from gossipdp.protocol import messages as say
from gossipdp.protocol.reduction import WINDOW
from gossipdp_lab.simulate.network import Conditions, Wire, make_workers
from gossipdp_lab.simulate.population import Population

TIMEOUT_S = 1.0
LONGEST_END_S = 12 * TIMEOUT_S
OF_SUMS = say.ConsolidationMessage | say.ReductionMessage | say.AverageMessage


class Sums(FaultyNetwork):
    """Workers without gradients; those of ``mute`` beat, exchange, and give nothing to any sum.

    The message of sums of number ``lost`` is lost on its way, on a link that stays up.
    """

    def __init__(
        self,
        num_workers: int,
        graph: str = "exponential",
        num_chunks: int = 9,
        chunk_s: Callable[[int], float] | None = None,
    ) -> None:
        constants = Constants.of(build_graph(graph, num_workers))
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(num_workers, num_chunks, generator=generator, dtype=torch.float64)
        population = Population(start, num_chunks, momentum=True)
        population.c += torch.randn(start.shape, generator=generator, dtype=torch.float64)
        self.population = population
        self.rows = AveragedRows(population, num_chunks)
        self.mute: set[int] = set()
        self.mute_after = 0
        self.num_chunks_sent = 0
        self.lost = self.num_said = 0
        workers = make_workers(constants, seed=0, timeout_s=TIMEOUT_S, num_chunks=num_chunks)
        conditions = Conditions(lambda *_: 0.003, lambda *_: 0.01, lambda rank: 0.25)
        super().__init__(workers, constants.edges, conditions, averaged=self.rows, chunk_s=chunk_s)
        self.engine.run(until=2.0)

    def carries(self, rank: int, peer: int, envelope: say.Envelope) -> say.Envelope | Loss:
        if isinstance(envelope.message, OF_SUMS):
            self.num_said += 1
            is_mute = rank in self.mute and self.num_chunks_sent >= self.mute_after
            if is_mute or self.num_said == self.lost:
                return "message lost"
        return super().carries(rank, peer, envelope)

    def send_chunk(self, wire: Wire, rank: int, peer: int, frame: Frame) -> None:
        self.num_chunks_sent += 1
        if rank not in self.mute or self.num_chunks_sent < self.mute_after:
            super().send_chunk(wire, rank, peer, frame)

    def mean(self, *without: int) -> torch.Tensor:
        """Return the mean of what the workers hold, but for these."""
        ranks = self.workers.keys() - set(without)
        return torch.stack([self.rows.inputs(rank) for rank in sorted(ranks)]).mean(dim=0)

    def asks(self, rank: int, within_s: float = LONGEST_END_S) -> Any:
        asked = self.average(rank)
        until = self.engine.now + within_s
        while not asked.done() and self.engine.now < until:
            self.engine.run(until=self.engine.now + 0.05)
        return asked.result(timeout=0)

    def ends(self, within_s: float = LONGEST_END_S) -> set[int]:
        """Have all be done, and return who has left in time; the mute live on."""
        began_s = self.engine.now
        for rank in self.workers:
            if rank not in self.crashed:
                self.done(rank)
        live = set(self.workers) - self.crashed - self.mute
        while not live <= self.left.keys() and self.engine.now < began_s + within_s:
            self.engine.run(until=self.engine.now + 0.05)
        return set(self.left)


@pytest.mark.parametrize(
    ("num_workers", "mute", "mute_after"),
    [
        *((4, {0}, 0), (4, {1}, 0), (4, {0}, 20), (4, {1}, 20), (4, {3}, 20)),
        *((12, {0, 4, 11}, 0), (12, {0, 4, 11}, 20), (64, {63}, 0), (64, {0, 5, 60}, 20)),
    ],
    ids=str,
)
def test_those_that_beat_and_give_nothing_are_left_out(num_workers, mute, mute_after):
    """A leader, an inner member, a leaf, and all at once: from the first, and in the middle."""
    network = Sums(num_workers)
    others = set(range(num_workers)) - mute
    mean = network.mean(*mute)
    network.mute, network.mute_after = mute, mute_after
    assert network.ends() >= others
    for rank in others:
        committed = network.rows.committed[rank]
        assert committed.outcome.num_workers == len(others)
        assert set(committed.outcome.without) == mute
        assert all("nothing of it for" in why for why in committed.outcome.without.values())
        torch.testing.assert_close(committed.result, mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(committed.result, network.rows.committed[min(others)].result)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 6, 16])
def test_all_end_with_the_mean_and_their_distance_to_it(num_workers):
    network = Sums(num_workers, "ring" if num_workers > 2 else "complete")
    given = torch.stack([network.rows.inputs(rank) for rank in range(num_workers)])
    mean = given.mean(dim=0)
    assert network.ends() == set(range(num_workers))
    for rank in range(num_workers):
        committed = network.rows.committed[rank]
        torch.testing.assert_close(committed.result, mean, rtol=1e-12, atol=1e-12)
        distance = float((given - mean).square().sum() / num_workers)
        assert committed.outcome.consensus_distance == pytest.approx(distance, rel=1e-9)
        assert committed.outcome.num_workers == num_workers
    assert len(network._peers(0)) <= 2 + 2, "the leader is linked to its neighbours and children"


@pytest.mark.parametrize("lost", range(1, 36, 2))
def test_the_end_relies_on_no_single_message(lost):
    network = Sums(6, "ring", num_chunks=2)
    network.lost = lost
    assert network.ends(within_s=60.0) == set(range(6))
    assert network.num_said >= lost


@pytest.mark.parametrize(
    ("chunk_s", "num_chunks"),
    [([0.7] * 2, 32), ([1.34] * 3, 16), ([0.07, 0.07, 2.7, 0.07], 16), ([0.7] * 8, 16)],
    ids=["2", "3", "4, of which one is slow", "8"],
)
def test_one_epoch_over_slow_links_averages_all(chunk_s, num_chunks):
    """Every chunk takes a good part of the time-out, or more than one."""
    everybody = set(range(len(chunk_s)))
    network = Sums(
        len(chunk_s), "complete", num_chunks=num_chunks, chunk_s=lambda rank: chunk_s[rank]
    )
    assert network.ends(within_s=1000.0) == everybody
    for rank in everybody:
        outcome = network.rows.committed[rank].outcome
        assert (outcome.num_workers, outcome.without) == (len(chunk_s), {})
        assert network.workers[rank].consolidation.highest.number == 1


@pytest.mark.parametrize(("num_workers", "callers"), [(1, [0]), (2, [1]), (7, [3]), (7, range(7))])
def test_the_average_is_that_of_all_and_changes_nothing(num_workers, callers):
    """Also if all ask at once."""
    network = Sums(num_workers, "complete")
    mean = network.mean()
    asked = [network.average(rank) for rank in callers]
    network.engine.run(until=network.engine.now + 3.0)
    for each in asked:
        average = each.result(timeout=0)
        assert (average.num_workers, average.without) == (num_workers, {})
        torch.testing.assert_close(torch.cat(average.values), mean, rtol=1e-12, atol=1e-12)
    assert all(worker.averages.is_idle for worker in network.workers.values())
    assert not any(sums._slots for sums in network.sums.values()), "nothing is kept"
    torch.testing.assert_close(network.mean(), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("victim", "after_s"), [(1, 0.0), (3, 0.005), (6, 0.012), (1, 0.012), (3, 0.025)]
)
def test_a_death_leaves_the_average_of_those_that_live(victim, after_s):
    network = Sums(7, "complete")
    asked = network.average(0)
    network.engine.run(until=network.engine.now + after_s)
    network.crash(victim)
    network.engine.run(until=12.0)
    average = asked.result(timeout=0)
    assert average.num_workers == 6
    # The dead one may have exchanged first; the mean of the others is conserved since.
    values = torch.cat(average.values)
    torch.testing.assert_close(values, network.mean(victim), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("after_s", [0.015, 0.02, 0.03])
def test_a_caller_that_was_taken_for_dead_meanwhile_averages_all(after_s):
    """The others have forgotten its request, though some had told it their numbers."""
    network = Sums(7, "complete")
    mean = network.mean()
    asked = network.average(0)
    network.engine.run(until=network.engine.now + after_s)
    network.stall(0, 1.5 * TIMEOUT_S)
    network.engine.run(until=network.engine.now + 2 * LONGEST_END_S)
    average = asked.result(timeout=0)
    assert (average.num_workers, average.without) == (7, {})
    torch.testing.assert_close(torch.cat(average.values), mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("what", "victim", "reason"),
    [
        *(("says nothing", rank, "had nothing of it for") for rank in (1, 6)),
        *(("holds NaN", rank, "NaN or infinity") for rank in (1, 6)),
        ("has no parameters", 1, "it has no parameters to give just now"),
    ],
)
def test_one_that_gives_nothing_is_left_out_of_the_average(what, victim, reason):
    """If it has no parameters, it passes on what is below it all the same."""
    network = Sums(7, "complete")
    match what:
        case "says nothing":
            network.mute = {victim}
        case "holds NaN":
            network.population.x[victim, 5] = float("nan")
        case "has no parameters":
            network.perform(victim, network.workers[victim].poisoned(network.engine.now))
    average = network.asks(0)
    assert average.num_workers == 6
    assert set(average.without) == {victim}
    assert reason in average.without[victim]
    values = torch.cat(average.values)
    torch.testing.assert_close(values, network.mean(victim), rtol=1e-9, atol=1e-9)


def test_who_is_poisoned_itself_is_told_so():
    network = Sums(1, "complete")
    network.population.x[0, 5] = float("nan")
    with pytest.raises(PoisonedError, match="cannot average: its parameters"):
        network.asks(0)


@pytest.mark.parametrize("lost", range(0, 60, 6))
def test_a_lost_link_costs_an_average_nothing_but_time(lost):
    network = Sums(7, "ring")
    mean = network.mean()
    network._lost_at_messages = {network._num_sent + lost}
    average = network.asks(3)
    assert average.num_workers == 7
    torch.testing.assert_close(torch.cat(average.values), mean, rtol=1e-9, atol=1e-9)


def test_a_turn_does_a_few_chunks_and_says_that_work_is_left():
    """Each costs a pass: at each look at the clock so much time has gone."""
    clock = partial(next, itertools.count(0.0, 0.003))
    constants = Constants.of(build_graph("complete", 1))
    (worker,) = make_workers(constants, seed=0, num_chunks=40).values()
    ended: list[Any] = []
    state = State([Segment(torch.ones(40), Role.TRAINED, chunk_bytes=4)])

    def perform(actions: list[Any]) -> None:
        for action in actions:
            sums.perform(action)

    links = {peer: MemoryLink(peer) for peer in (1, 2)}
    sums = data_side.Sums(state, worker, links, perform, clock, poisoned=pytest.fail)
    sums.on_end = ended.append
    perform(worker.done(0.0))
    turns = 0
    while not worker.consolidation.is_finished:
        before = worker.consolidation._num_results
        assert sums.pump(), "the clock says that it was long enough"
        assert worker.consolidation._num_results - before <= 3
        turns += 1
    assert 14 <= turns <= 20
    assert torch.equal(torch.cat(ended[0].values), torch.ones(40))
    perform([do.SendResult(peer, worker.consolidation.origin, 0) for peer in links] * 5)
    assert [sums.pump() for _ in range(3)] == [True, True, False], "a turn sends four"


def test_no_worker_but_the_one_that_asks_holds_more_than_its_window():
    network = Sums(7, "complete")
    most = 0
    asked = network.average(0)
    while not asked.done():
        network.engine.run(until=network.engine.now + 0.0005)
        for worker, sums in network.sums.items():
            if worker.rank:
                most = max(most, *(len(slots) for slots in sums._slots.values()), 0)
    assert 0 < most <= 2 * WINDOW
