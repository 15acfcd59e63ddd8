"""The main thread's end of the gossip: its pace, what it copies, drops and counts."""

import copy
import dataclasses
from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest
import torch
from reference import MomentumState
from torch import nn

from gossipdp import GossipDataParallel, SupersededError
from gossipdp.dynamics.chunks import Chunk
from gossipdp.dynamics.phase import Phase
from gossipdp.parallel import gossip_engine
from gossipdp.parallel.checkpoint import Counts
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


def momentum_and_pending(model: GossipDataParallel, theta: float) -> list[Chunk]:
    """Give a worker alone, which has none, momentum of an exchange at phase 0; it is at theta."""
    engine = model._engine
    engine._theta = lambda: theta
    for segment in engine._state.segments:
        segment.c = torch.zeros_like(segment.pending)
        for chunk, part in segment.split(segment.c):
            chunk.c = part
            chunk.exchange(0.0, 1.0 + chunk.x, chunk.x.clone(), 1.5)
    return engine._state.chunks


def test_a_checkpoint_is_of_one_phase(wrap: Callable[..., GossipDataParallel]) -> None:
    """Chunks that boundaries flowed to different phases: each is saved as it is at the present."""
    net = nn.Linear(2, 3)
    model = wrap(net, torch.optim.SGD(net.parameters(), 0.1))
    x = {name: value.double() for name, value in copy.deepcopy(net).state_dict().items()}
    chunks = momentum_and_pending(model, theta=1.0)
    chunks[0].flow(0.25)
    tensors = model._engine.capture().tensors
    for name, start in x.items():
        state = MomentumState(start, torch.zeros_like(start))
        state = state.exchange(torch.ones_like(start), 1.5).flow(1.0, 1.0)
        found = tensors[f"model/{name}"].double() + tensors[f"pending/{name}"].double()
        torch.testing.assert_close(found, state.x, rtol=0.0, atol=1e-6)
        torch.testing.assert_close(tensors[f"c/{name}"].double(), state.c, rtol=0.0, atol=1e-6)


def test_what_an_exchange_brings_until_it_is_stopped_is_dropped_by_a_load(
    wrap: Callable[..., GossipDataParallel],
) -> None:
    """The exchange runs until the gossip thread holds it, which is after the load."""
    net = nn.Linear(2, 3)
    model = wrap(net, torch.optim.SGD(net.parameters(), 0.1))
    engine = model._engine
    hold = engine._loop.hold

    def last_chunk_then_hold() -> None:
        for chunk in engine._state.chunks:
            chunk.exchange(0.0, 1.0 + chunk.x, chunk.x.clone(), 1.5)
        hold()

    engine._loop.hold = last_chunk_then_hold
    loaded = {name: torch.full_like(value, 3.0) for name, value in net.state_dict().items()}
    model.load_state_dict(loaded)
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_who_takes_another_rank_begins_to_count_anew() -> None:
    """What it did before is counted under its former rank."""
    engine = GossipEngine.__new__(GossipEngine)
    engine._gradient_steps, engine._samples = 5, 40
    before = Counts(step=3, steps=2, samples=16)
    engine._arrival = SimpleNamespace(
        come_anew=lambda superseded: None,
        rank=4,
        world_size=3,
        incarnation=0,
        run_id="run",
        settings=SimpleNamespace(graph="ring abc"),
        before=before,
        protocol=None,
        loop=None,
        thread=object(),
    )
    engine._come_anew(SupersededError("another has rank 3"))
    assert (engine.rank, engine.counts()) == (4, before)


def test_an_exchange_counts_for_both_of_its_ends(wrap: Callable[..., GossipDataParallel]) -> None:
    net = nn.Linear(2, 3)
    model = wrap(net, torch.optim.SGD(net.parameters(), 0.1))
    engine = model._engine
    published = dataclasses.replace(engine._loop.published, exchanges_initiated=3)
    engine._loop = SimpleNamespace(
        published=published, transfers=engine._loop.transfers, close=engine._loop.close
    )
    engine._gradient_steps = 4
    assert engine.stats().achieved_comm_rate == 1.5
