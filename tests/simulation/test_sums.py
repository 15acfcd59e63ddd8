"""Sums over a tree in the simulated network: what they come to, and who may hold them up.

Workers run the real protocol and the real sums over real parameters, in float64.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from simulated_faults.averaged_rows import AveragedRows, Frame
from simulated_faults.network import FaultyNetwork, Loss

from gossipdp.errors import PeerLostError
from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.messages import (
    AverageMessage,
    ConsolidationMessage,
    Envelope,
    ReductionMessage,
)
from gossipdp.simulate.network import Conditions, Wire, make_workers
from gossipdp.simulate.population import Population

TIMEOUT_S = 1.0
LONGEST_END_S = 12 * TIMEOUT_S
NUM_CHUNKS = 9


class Sums(FaultyNetwork):
    """Workers without gradients; those of ``mute`` beat, exchange, and give nothing to any sum."""

    def __init__(self, num_workers: int, graph: str = "exponential", seed: int = 0) -> None:
        constants = Constants.of(build_graph(graph, num_workers, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(num_workers, NUM_CHUNKS, generator=generator, dtype=torch.float64)
        population = Population(start, NUM_CHUNKS, momentum=True)
        assert population.c is not None
        population.c += torch.randn(start.shape, generator=generator, dtype=torch.float64)
        self.population = population
        self.rows = AveragedRows(population, NUM_CHUNKS)
        self.mute: set[int] = set()
        self.mute_after = 0
        self.num_chunks_sent = 0
        super().__init__(
            make_workers(constants, seed=seed, timeout_s=TIMEOUT_S, num_chunks=NUM_CHUNKS),
            constants.edges,
            Conditions(lambda *_: 0.003, lambda *_: 0.01, lambda rank: 0.25),
            averaged=self.rows,
        )
        self.engine.run(until=2.0)

    def carries(self, rank: int, peer: int, envelope: Envelope) -> Envelope | Loss:
        is_of_sums = ConsolidationMessage | ReductionMessage | AverageMessage
        is_mute = rank in self.mute and self.num_chunks_sent >= self.mute_after
        if is_mute and isinstance(envelope.message, is_of_sums):
            return "message lost"
        return super().carries(rank, peer, envelope)

    def send_chunk(self, wire: Wire, rank: int, peer: int, frame: Frame) -> None:
        self.num_chunks_sent += 1
        if rank not in self.mute or self.num_chunks_sent < self.mute_after:
            super().send_chunk(wire, rank, peer, frame)

    def mean(self, ranks: Collection[int]) -> torch.Tensor:
        return torch.stack([self.rows.inputs(rank) for rank in ranks]).mean(dim=0)

    def asks(self, rank: int, within_s: float = LONGEST_END_S) -> Any:
        """Have ``rank`` ask for the average, and wait for it."""
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


# The end.


@pytest.mark.parametrize(
    ("num_workers", "mute"),
    [
        (4, {0}),
        (4, {1}),
        (4, {3}),
        (64, {0}),
        (64, {1}),
        (64, {5}),
        (64, {63}),
        (64, {0, 1}),
        (64, {0, 5, 60}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mute_after", [0, 20])
def test_those_that_beat_and_give_nothing_are_left_out(
    num_workers: int, mute: set[int], mute_after: int
) -> None:
    """A leader, an inner member, a leaf, and all at once: from the first, and in the middle."""
    network = Sums(num_workers)
    others = set(range(num_workers)) - mute
    mean = network.mean(others)
    network.mute, network.mute_after = mute, mute_after
    assert network.ends() >= others
    for rank in others:
        committed = network.rows.committed[rank]
        assert committed.outcome.num_workers == len(others)
        assert set(committed.outcome.without) == mute
        for reason in committed.outcome.without.values():
            assert "nothing of it for" in reason
        torch.testing.assert_close(committed.result, mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(committed.result, network.rows.committed[min(others)].result)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 6, 17])
def test_all_end_with_the_mean_and_their_distance_to_it(num_workers: int) -> None:
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


def test_the_end_takes_few_links_of_the_leader() -> None:
    """It was linked to every member: as many sockets as workers."""
    network = Sums(64, "ring")
    assert network.ends() == set(range(64))
    assert len(network._peers(0)) <= 2 + 2


# The average while they train on.


@pytest.mark.parametrize(("num_workers", "caller"), [(1, 0), (2, 1), (7, 3), (64, 0)])
def test_the_average_is_that_of_all_and_changes_nothing(num_workers: int, caller: int) -> None:
    network = Sums(num_workers, "complete")
    mean = network.mean(range(num_workers))
    average = network.asks(caller)
    assert average.num_workers == num_workers
    assert average.without == {}
    torch.testing.assert_close(torch.cat(average.values), mean, rtol=1e-12, atol=1e-12)
    run_on(network, 1.0)
    assert all(worker.averages.is_idle for worker in network.workers.values())
    assert not any(sums._slots for sums in network.sums.values()), "nothing is kept"
    torch.testing.assert_close(network.mean(range(num_workers)), mean, rtol=1e-12, atol=1e-12)


def run_on(network: Sums, seconds: float) -> None:
    network.engine.run(until=network.engine.now + seconds)


def test_all_may_ask_at_once() -> None:
    network = Sums(7, "complete")
    mean = network.mean(range(7))
    asked = [network.average(rank) for rank in range(7)]
    run_on(network, 2.0)
    for each in asked:
        torch.testing.assert_close(
            torch.cat(each.result(timeout=0).values), mean, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("victim", [1, 3, 6])
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.012, 0.025])
def test_a_death_leaves_the_average_of_those_that_live(victim: int, after_s: float) -> None:
    network = Sums(7, "complete")
    asked = network.average(0)
    run_on(network, after_s)
    network.crash(victim)
    others = [rank for rank in range(7) if rank != victim]
    run_on(network, 10.0)
    average = asked.result(timeout=0)
    assert average.num_workers == 6
    # The dead one may have exchanged first; the mean of the others is conserved since.
    torch.testing.assert_close(
        torch.cat(average.values), network.mean(others), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("mute", [1, 6])
def test_one_that_gives_nothing_is_left_out_of_the_average(mute: int) -> None:
    network = Sums(7, "complete")
    network.mute = {mute}
    average = network.asks(0)
    assert set(average.without) == {mute}
    others = [rank for rank in range(7) if rank != mute]
    assert average.num_workers == 6
    torch.testing.assert_close(
        torch.cat(average.values), network.mean(others), rtol=1e-9, atol=1e-9
    )


def test_one_without_parameters_passes_on_what_is_below_it() -> None:
    network = Sums(7, "complete")
    network.perform(1, network.workers[1].poisoned(network.engine.now))
    others = [0, 2, 3, 4, 5, 6]
    mean = network.mean(others)
    average = network.asks(0)
    assert average.num_workers == 6
    assert average.without == {1: "it has no parameters to give just now"}
    torch.testing.assert_close(torch.cat(average.values), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("poisoned", [1, 6])
def test_poison_is_let_into_no_average(poisoned: int) -> None:
    network = Sums(7, "complete")
    network.population.x[poisoned, 5] = float("nan")
    average = network.asks(0)
    assert average.num_workers == 6
    assert "NaN or infinity" in average.without[poisoned]
    assert torch.cat(average.values).isfinite().all()


def test_who_is_poisoned_itself_is_told_so() -> None:
    network = Sums(1, "complete")
    network.population.x[0, 5] = float("nan")
    with pytest.raises(PeerLostError, match="no worker has parameters"):
        network.asks(0)


@pytest.mark.parametrize("lost", range(0, 60, 3))
def test_a_lost_link_costs_an_average_nothing_but_time(lost: int) -> None:
    network = Sums(7, "ring")
    mean = network.mean(range(7))
    network._lost_at_messages = {network._num_sent + lost}
    average = network.asks(3)
    assert average.num_workers == 7
    torch.testing.assert_close(torch.cat(average.values), mean, rtol=1e-9, atol=1e-9)
