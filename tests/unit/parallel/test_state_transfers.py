"""Taking and giving states, over a gossip thread that answers at once."""

import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossipdp.dynamics.chunks import Chunk, Role
from gossipdp.dynamics.device import Device
from gossipdp.dynamics.state import Segment, State
from gossipdp.errors import PeerLostError, RendezvousError
from gossipdp.gossip.transfer import Offer, TurnedAwayError
from gossipdp.parallel import state_transfers
from gossipdp.parallel.training_state import BetweenSteps

RANK = 2
TIMEOUT_S = 1.0


def trained(learning_rate: float = 0.1, gradient: float = 1.0) -> torch.optim.Optimizer:
    """AdamW after one step."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=learning_rate)
    weight.grad = torch.full((3,), gradient)
    optimizer.step()
    return optimizer


def given(optimizer: torch.optim.Optimizer) -> Offer:
    """Return the state that it gives."""
    between, woken = BetweenSteps([optimizer]), threading.Event()
    between.attach(Device().mark(), woken.set)
    while (offer := between.offer("a request")) is None:
        assert woken.wait(30.0)
    return offer


FOREIGN = Offer(b"of another program", [], lambda source, room: True)


def rate_of(state: Any) -> float:
    return state["optimizers"][0]["param_groups"][0]["lr"]


class Peers:
    """The gossip thread and its loop: what each worker answers, by rank.

    ``training`` and ``parameters`` hold a list for each: one answer a time, the last for good.
    Before each answer for its parameters a worker sends ``chunks``.
    """

    def __init__(self) -> None:
        self.training: dict[int, list[Offer | Exception]] = {}
        self.parameters: dict[int, list[Exception | None]] = {}
        self.asked: Counter[str] = Counter()
        self.chunks: list[tuple[Chunk, torch.Tensor]] = []
        self.num_chunks_received = 0
        self.protocol = SimpleNamespace(
            rank=RANK, membership=SimpleNamespace(live=lambda: tuple(self.training))
        )
        self.transfers = self

    def call(self, function: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function())
        return done

    def check(self) -> None: ...

    def fetch_training(self, peer: int, unfold: Any, on_end: Any, timeout_s: float) -> None:
        self.asked[f"training of {peer}"] += 1
        self.num_chunks_received += 1
        answer = self._next(self.training[peer])
        if isinstance(answer, Exception):
            on_end(answer)
            return
        try:
            rooms = unfold(answer.layout)
        except ValueError as error:
            on_end(TurnedAwayError(f"worker {peer} cannot give its state: {error}"))
            return
        for source, room in zip(answer.tensors, rooms, strict=True):
            answer.copy(source, room)
        on_end(None)

    def fetch(self, peer: int, on_end: Any, timeout_s: float) -> None:
        self.asked[f"parameters of {peer}"] += 1
        for chunk, values in self.chunks:
            chunk.replace(values)
        on_end(self._next(self.parameters[peer]))

    @staticmethod
    def _next(answers: list[Any]) -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, in a list of one; only pauses take any."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        assert now[0] < 20.0, "it goes on for ever"

    monkeypatch.setattr(state_transfers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(state_transfers.time, "sleep", sleep)
    return now


STATE = State([Segment(torch.ones(3), Role.TRAINED)])


def take(peers: Any) -> Any:
    times = SimpleNamespace(timeout_s=TIMEOUT_S, start_timeout_s=5.0)
    return state_transfers.take_state(peers, peers, STATE, times)


def test_what_a_donor_gave_that_dies_is_kept(peers):
    peers.training = {1: [given(trained(0.5))], 0: [given(trained(0.25))]}
    peers.parameters = {1: [PeerLostError("dead")], 0: [None]}
    assert rate_of(take(peers)) == 0.5
    assert peers.asked["training of 0"] == 0


def test_what_a_donor_gave_whose_parameters_are_refused_is_dropped(peers):
    peers.training = {1: [given(trained(0.5))], 0: [given(trained(0.25))]}
    peers.parameters = {1: [TurnedAwayError("its parameters hold NaN")], 0: [None]}
    assert rate_of(take(peers)) == 0.25


@pytest.mark.parametrize("bad", [given(trained(0.5, float("nan"))), FOREIGN])
def test_a_poisoned_or_damaged_optimizers_state_is_not_taken(peers, bad):
    peers.training = {1: [bad], 0: [given(trained(0.25))]}
    peers.parameters = {1: [None], 0: [None]}
    assert rate_of(take(peers)) == 0.25
    assert peers.asked["parameters of 1"] == 0
    with pytest.raises(PeerLostError, match="worker 1 cannot give its state"):
        state_transfers.fetch_training(peers, peers, STATE, 1, 1.0)


def test_being_turned_away_for_ever_is_no_progress(peers, now):
    peers.training = {1: [given(trained())]}
    peers.parameters = {1: [TurnedAwayError("its parameters hold NaN")]}
    with pytest.raises(RendezvousError, match="hold NaN"):
        take(peers)
    assert 5.0 <= now[0] < 6.0
