"""The graph over the live workers."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.graph.constants import MAX_CACHED, Constants, LiveGraph
from gossipdp.graph.topology import GRAPH_NAMES, build_graph, without


def live_graph(name: str = "ring", num_workers: int = 8, comm_rate: float = 1.0) -> LiveGraph:
    return LiveGraph(Constants.of(build_graph(name, num_workers), comm_rate))


def test_all_alive_is_the_original() -> None:
    live = live_graph()
    assert live.constants(range(8)) is live.original


@pytest.mark.parametrize("name", GRAPH_NAMES)
@pytest.mark.parametrize("comm_rate", [0.5, 3.0])
def test_the_comm_rate_is_that_of_the_busiest_worker(name: str, comm_rate: float) -> None:
    assert live_graph(name, 8, comm_rate).comm_rate == pytest.approx(comm_rate)


def test_after_deaths_it_is_the_graph_without_the_dead_at_the_same_rate() -> None:
    live = live_graph("torus", 12, 2.0)
    expected = Constants.of(without(build_graph("torus", 12), [0, 7]), 2.0)
    constants = live.constants(set(range(12)) - {0, 7})
    assert constants.edges == expected.edges
    assert constants.rates == pytest.approx(expected.rates)
    assert live.constants(set(range(12)) - {7, 0}) is constants, "worked out once"


def test_one_worker_and_one_joiner() -> None:
    live = live_graph()
    assert live.constants({3}).edges == ()
    assert LiveGraph(Constants.of(build_graph("ring", 1))).constants({0, 1}).edges == ((0, 1),)


def test_the_cache_is_bounded() -> None:
    live = live_graph("ring", 12)
    first = live.constants({0, 1})
    for bits in range(1, MAX_CACHED + 1):
        live.constants({rank for rank in range(12) if (bits << 2) >> rank & 1})
    assert live.constants({0, 1}) is not first


@given(
    name=st.sampled_from(["ring", "star", "path", "exponential"]),
    live=st.sets(st.integers(0, 15), min_size=1),
)
def test_any_set_of_survivors_and_joiners_is_connected(name: str, live: set[int]) -> None:
    """Ranks from 8 on are joiners; all of the first 8 may be dead."""
    graph = live_graph(name).graph(live)
    assert set(graph) == live
    assert nx.is_connected(graph)
    joiners = [rank for rank in live if rank >= 8]
    others = sorted(live)
    for rank in joiners:
        position = others.index(rank)
        following = {others[(position + step) % len(others)] for step in (1, 2)} - {rank}
        assert following <= set(graph[rank])
