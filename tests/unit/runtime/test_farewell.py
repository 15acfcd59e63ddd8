"""The end of a supervisor under torchrun; the clock moves with each of its pauses."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from gossipdp.runtime import farewell
from gossipdp.runtime.farewell import LOST_AFTER_S, POLL_S, Farewell, alive_key, ended_key
from gossipdp.runtime.store import HostedStore, reach

PREFIX = "run/"


@pytest.fixture
def agent() -> Iterator[HostedStore]:
    """The store of torchrun itself."""
    with HostedStore() as store:
        store.open()
        yield store


def say(
    port: int, *, wait: bool = True, each: Callable[[float], None] = lambda now: None
) -> tuple[list[int], float]:
    """What the supervisor of worker 0 of two is told, and after how many seconds of its clock.

    ``each`` is called with the time after each pause.
    """
    passed_s = 0.0

    def pause(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds
        each(passed_s)

    one = Farewell("127.0.0.1", port, PREFIX, 0, 2, sleep=pause, now=lambda: passed_s)
    return one.say(wait=wait), passed_s


def test_it_ends_after_the_others(agent: HostedStore) -> None:
    def each(now: float) -> None:
        if now == 3 * POLL_S:
            agent.put(ended_key(PREFIX, 1), "1")
            assert agent.have_set([ended_key(PREFIX, 1)])  # a set alone may still be on its way

    assert say(agent.port, each=each) == ([], 3 * POLL_S)
    assert agent.have_set([ended_key(PREFIX, 0)])


def test_who_is_lost_is_not_waited_for(agent: HostedStore) -> None:
    store = reach("127.0.0.1", agent.port)

    def each(now: float) -> None:
        if now <= 10:
            store.add(alive_key(PREFIX, 1), 1)

    lost, passed_s = say(agent.port, each=each)
    assert lost == [1]
    assert 10 + LOST_AFTER_S < passed_s <= 10 + LOST_AFTER_S + 2 * POLL_S


def test_who_lives_is_waited_for_as_long_as_it_takes(agent: HostedStore) -> None:
    store = reach("127.0.0.1", agent.port)

    def each(now: float) -> None:
        if now % 5 == 0:
            store.add(alive_key(PREFIX, 1), 1)
        if now == 5 * LOST_AFTER_S:
            store.set(ended_key(PREFIX, 1), "1")
            assert store.check([ended_key(PREFIX, 1)])

    assert say(agent.port, each=each) == ([], 5 * LOST_AFTER_S)


def test_nobody_is_waited_for_unless_asked(agent: HostedStore) -> None:
    assert say(agent.port, wait=False) == ([], 0.0)
    assert agent.have_set([ended_key(PREFIX, 0)])


def test_a_store_that_comes_back_has_been_away_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    back: list[HostedStore] = []

    def each(now: float) -> None:
        if now == 2 * POLL_S:
            back.append(HostedStore(port=port))
            back[0].open()
            back[0].put(ended_key(PREFIX, 1), "1")

    assert say(port, each=each)[0] == []
    back[0].close()


@pytest.mark.parametrize("wait", [True, False])
def test_a_store_that_never_answers_is_left(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "POLL_S", 0.01)
    clock = iter(range(10**9))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = Farewell(
            "127.0.0.1", silent.getsockname()[1], PREFIX, 0, 2, now=lambda: float(next(clock))
        )
        assert one.say(wait=wait) == ([1] if wait else [])
    # Now that nobody listens it ends; an interpreter that ends under torch's own code is aborted.
    for thread in threading.enumerate():
        if thread.name == farewell.THREAD_NAME:
            thread.join(30)
            assert not thread.is_alive()
