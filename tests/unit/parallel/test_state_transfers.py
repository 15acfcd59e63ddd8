"""Taking and giving states, over a gossip thread that answers at once."""

from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Chunk, Role, Segment, State
from gossipdp.errors import PeerLostError, RendezvousError
from gossipdp.parallel import state_transfers, training_state
from gossipdp.parallel.state_transfers import StateTransfers
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.transfers import StateRefusedError, TurnedAwayError

RANK = 2
TIMEOUT_S = 1.0


def trained(learning_rate: float = 0.1, gradient: float = 1.0) -> torch.optim.Optimizer:
    """AdamW after one step."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=learning_rate)
    weight.grad = torch.full((3,), gradient)
    optimizer.step()
    return optimizer


def encoded(optimizer: torch.optim.Optimizer) -> bytes:
    return training_state.encode(training_state.capture([optimizer]))


def rate_of(state: Any) -> float:
    return state["optimizers"][0]["param_groups"][0]["lr"]


class Peers:
    """The gossip thread and its loop: what each worker answers, by rank.

    ``training`` and ``parameters`` hold a list for each: one answer a time, the last for good.
    Before each answer for its parameters a worker sends ``chunks``.
    """

    def __init__(self) -> None:
        self.training: dict[int, list[bytes | Exception]] = {}
        self.parameters: dict[int, list[Exception | None]] = {}
        self.asked: Counter[str] = Counter()
        self.chunks: list[tuple[Chunk, torch.Tensor]] = []
        self.num_chunks_received = 0
        self.training_wanted = True
        self.given: list[bytes] = []
        self.refused: list[str] = []
        self.protocol = SimpleNamespace(
            rank=RANK, membership=SimpleNamespace(live=lambda: tuple(self.training))
        )
        self.transfers = self
        self.give_training = self.given.append
        self.refuse_training = self.refused.append

    def call(self, function: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function())
        return done

    def check(self) -> None: ...

    def fetch_training(self, peer: int, max_bytes: int, on_end: Any, timeout_s: float) -> None:
        self.asked[f"training of {peer}"] += 1
        self.num_chunks_received += 1
        on_end(self._next(self.training[peer]))

    def fetch_state(self, peer: int, sink: Any, on_end: Any, timeout_s: float) -> None:
        self.asked[f"parameters of {peer}"] += 1
        for chunk, values in self.chunks:
            sink(chunk, values)
        on_end(self._next(self.parameters[peer]))

    @staticmethod
    def _next(answers: list[Any]) -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one; only pauses take any."""
    now = [0.0]
    monkeypatch.setattr(state_transfers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        state_transfers.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    return now


def transfers(
    peers: Any, *optimizers: torch.optim.Optimizer, start_timeout_s: float = 5.0
) -> StateTransfers:
    shared = SharedState(State([Segment(torch.ones(3), Role.TRAINED)]), Phase(0.0, 1.0))
    times = SimpleNamespace(timeout_s=TIMEOUT_S, start_timeout_s=start_timeout_s)
    return StateTransfers(peers, peers, shared, optimizers, times)


def test_what_a_donor_gave_that_dies_is_kept(peers):
    peers.training = {1: [encoded(trained(0.5))], 0: [encoded(trained(0.25))]}
    peers.parameters = {1: [PeerLostError("dead")], 0: [None]}
    assert rate_of(transfers(peers).take()) == 0.5
    assert peers.asked["training of 0"] == 0


def test_what_a_donor_gave_whose_parameters_are_refused_is_dropped(peers):
    peers.training = {1: [encoded(trained(0.5))], 0: [encoded(trained(0.25))]}
    peers.parameters = {1: [TurnedAwayError("its parameters hold NaN")], 0: [None]}
    assert rate_of(transfers(peers).take()) == 0.25


@pytest.mark.parametrize("bad", [encoded(trained(0.5, float("nan"))), b"of another program"])
def test_a_poisoned_or_damaged_optimizers_state_is_not_taken(peers, bad):
    peers.training = {1: [bad], 0: [encoded(trained(0.25))]}
    peers.parameters = {1: [None], 0: [None]}
    states = transfers(peers)
    assert rate_of(states.take()) == 0.25
    assert peers.asked["parameters of 1"] == 0
    with pytest.raises(PeerLostError, match="worker 1 cannot give its state"):
        states.fetch_training(1, 1.0)


def test_being_turned_away_for_ever_is_no_progress(peers, now):
    peers.training = {1: [encoded(trained())]}
    peers.parameters = {1: [TurnedAwayError("its parameters hold NaN")]}
    with pytest.raises(RendezvousError, match="hold NaN"):
        transfers(peers, start_timeout_s=5.0).take()
    assert 5.0 <= now[0] < 6.0


def test_of_all_one_that_refuses_for_a_while_is_asked_again_and_counts_once(peers, now, caplog):
    peers.protocol.membership.live = lambda: (0, 1, RANK)
    peers.parameters = {0: [*[StateRefusedError("it takes another's")] * 5, None], 1: [None]}
    peers.chunks = [(chunk, chunk.x) for chunk in Segment(torch.ones(3), Role.TRAINED).chunks]
    given: list[torch.Tensor] = []
    transfers(peers).fetch_all(lambda chunk, values: given.append(values))
    assert (peers.asked["parameters of 0"], peers.asked["parameters of 1"]) == (6, 1)
    assert len(given) == 2
    assert 0.0 < now[0] < TIMEOUT_S
    assert not caplog.records


def test_of_all_those_that_refuse_for_ever_are_left_out_after_one_time_out(peers, now, caplog):
    peers.protocol.membership.live = lambda: (1, RANK, 3, 4) if peers.asked else (0, 1, RANK, 3, 4)
    refusing, dead = [StateRefusedError("it is poisoned")], [PeerLostError("dead")]
    peers.parameters = {0: dead, 1: refusing, 3: [None], 4: refusing}
    transfers(peers).fetch_all(lambda chunk, values: None)
    assert TIMEOUT_S <= now[0] < 2 * TIMEOUT_S
    assert sorted(record.getMessage() for record in caplog.records) == [
        "worker 2 averages without worker 0: dead",
        "worker 2 averages without worker 1: it is poisoned",
        "worker 2 averages without worker 4: it is poisoned",
    ]


def test_of_all_one_that_sends_nan_is_left_out_at_once(peers, now, caplog):
    peers.protocol.membership.live = lambda: (0, RANK)
    peers.parameters = {0: [TurnedAwayError("its parameters hold NaN")]}
    transfers(peers).fetch_all(lambda chunk, values: None)
    assert (peers.asked["parameters of 0"], now[0]) == (1, 0.0)
    assert "averages without worker 0: its parameters hold NaN" in caplog.text


def test_of_all_a_live_one_that_does_not_answer_is_an_error(peers):
    peers.training = {0: [b""]}
    peers.parameters = {0: [PeerLostError("sent nothing")]}
    with pytest.raises(PeerLostError, match="sent nothing"):
        transfers(peers).fetch_all(lambda chunk, values: None)


def test_a_poisoned_optimizers_state_is_not_given(peers, caplog):
    sound = trained(0.5)
    transfers(peers, sound).donate()
    (given,) = peers.given
    assert rate_of(training_state.decode(given)) == 0.5
    states = transfers(peers, trained(), trained(gradient=float("inf")))
    states.donate()
    assert len(peers.given) == 1
    assert states.num_donated == 0
    (reason,) = peers.refused
    assert "optimizer 1's state[0]['exp_avg'] holds NaN or infinity" in reason
    assert "cannot help another to join" in caplog.text
