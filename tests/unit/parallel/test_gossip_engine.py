"""The pace of ``pace="strict"``."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest

from gossipdp.dynamics.phase import Phase
from gossipdp.parallel import gossip_engine
from gossipdp.parallel.gossip_engine import MAX_LAG, GossipEngine, is_rate_low
from gossipdp.protocol.messages import Accept, ExchangeId, Propose
from gossipdp.protocol.neighbours import make_policy
from gossipdp.protocol.pairing import Exchanging, Pairing


class Paced(GossipEngine):
    """As much of a worker as keeps the pace; each of its turns does what the test says."""

    def __init__(self, turn: Callable[[int], object]) -> None:
        self.num_turns = 0
        self.pairing = Pairing(
            rank=1, incarnation=0, policy=make_policy("fresh", Random(0)), alpha_tilde=0.5
        )
        self.pairing.set_available({0: 1.0})
        # Worker 0 asked for the exchange that runs: its end serves none of this worker's demands.
        self.asked = Propose(ExchangeId(0, 0, 1), 0.5)
        self.pairing.receive(0, self.asked)
        for _ in range(MAX_LAG + 1):
            self.pairing.tick()

        def boundary(theta: float, optimizer_index: int, *, wait: bool) -> None:
            self.num_turns += 1
            assert self.num_turns < 10, "it waits for ever"
            turn(self.num_turns)

        self._protocol = SimpleNamespace(pairing=self.pairing, neighbours=frozenset({0}))
        self._thread = SimpleNamespace(steps_behind=0, check=lambda: None)
        self._options = SimpleNamespace(network=SimpleNamespace(timeout_s=5.0))
        self._state = SimpleNamespace(boundary=boundary)
        self._arrival = SimpleNamespace(phase=Phase(0.0, 1.0))
        self._states = SimpleNamespace()
        self._first_link_due_s = None
        self._waited_s = 0.0


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_engine, "TURN_WHILE_WAITING_S", 0.0)


@pytest.mark.usefixtures("no_pause")
def test_strict_pace_waits_until_a_demand_is_served() -> None:
    def turn(number: int) -> None:
        if number == 2:
            worker.pairing.finished(worker.asked.id)
        elif number == 4:
            state = worker.pairing.state
            worker.pairing.receive(0, Accept(state.id, 0.5))
        elif number == 6:
            worker.pairing.finished(worker.pairing.state.id)

    worker = Paced(turn)
    worker._keep_pace()
    assert worker.num_turns == 6


@pytest.mark.usefixtures("no_pause")
def test_strict_pace_waits_for_nothing_while_a_checkpoint_waits_for_an_exchange() -> None:
    worker = Paced(lambda number: worker.pairing.finished(worker.asked.id))
    worker.pairing.close()
    assert isinstance(worker.pairing.state, Exchanging)
    worker._keep_pace()
    assert worker.num_turns == 0


@pytest.mark.usefixtures("no_pause")
def test_strict_pace_lets_go_of_a_worker_that_is_poisoned_meanwhile() -> None:
    worker = Paced(lambda number: worker.pairing.close() if number == 3 else None)
    worker._keep_pace()
    assert worker.num_turns == 3


@pytest.mark.parametrize(
    ("num_steps", "num_due", "num_served", "is_low"),
    [
        (199, 100, 0, False),  # links may be coming up
        (200, 100, 72, True),
        (200, 100, 76, False),
        (10_000, 19, 0, False),  # rare exchanges: too few to tell
        (10_000, 20, 11, True),
        (10_000, 20, 12, False),
    ],
)
def test_a_low_rate_is_told_from_a_backlog(
    num_steps: int, num_due: int, num_served: int, is_low: bool
) -> None:
    assert is_rate_low(num_steps, num_due, num_served) is is_low
