"""Taking and giving states, over a gossip thread that answers at once."""

from math import nan
from types import SimpleNamespace

import pytest
import torch
from clocks import Clock
from torch import nn

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.errors import PeerLostError, RendezvousError
from gossipdp.gossip.transfer import NoStateYetError, Offer, TurnedAwayError
from gossipdp.parallel import training_state
from gossipdp.parallel.training_state import Arriving, BetweenSteps


def given(learning_rate: float, gradient: float = 1.0, num_values: int = 384) -> Offer:
    """Return the state of an AdamW after its first step, as its worker gives it."""
    weight = nn.Parameter(torch.ones(num_values))
    optimizer = torch.optim.AdamW([weight], lr=learning_rate)
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return BetweenSteps([optimizer])._describe()


def rate_of(state) -> float:
    return state["optimizers"][0]["param_groups"][0]["lr"]


class Peers:
    """The gossip thread and its loop: what each worker answers, by rank, one answer a time.

    ``states`` holds a list for each; its last answer is for good. None: parameters alone.
    """

    def __init__(self) -> None:
        self.states: dict[int, list[Offer | Exception | None]] = {}
        self.asked: list[int] = []
        self.patience: list[float] = []
        self.num_chunks_received, self.chunks_a_fetch = 0, 1
        membership = SimpleNamespace(live=lambda: tuple(self.states))
        self.protocol = SimpleNamespace(rank=2, membership=membership)
        self.transfers = self

    def call(self, function) -> SimpleNamespace:
        return SimpleNamespace(result=function)

    def check(self) -> None: ...

    def fetch(self, peer, unfold, on_end, timeout_s):
        self.asked.append(peer)
        self.patience.append(timeout_s)
        self.num_chunks_received += self.chunks_a_fetch
        answers = self.states[peer]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        assert isinstance(answer, Exception) or (answer is None) == (unfold is None)
        if isinstance(answer, Offer):
            try:
                for source, room in zip(answer.tensors, unfold(answer.layout), strict=True):
                    answer.copy(source, room)
                answer = None
            except ValueError as error:
                answer = TurnedAwayError(f"worker {peer} cannot give its state: {error}")
        on_end(answer)


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the time, of which only pauses take any."""
    clock = Clock(longest_s=20.0)
    monkeypatch.setattr(training_state, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep))
    return clock


STATE = State([Segment(torch.ones(24), Role.TRAINED)])


def take(peers, *, is_start=False):
    times = SimpleNamespace(timeout_s=1.0, start_timeout_s=5.0)
    return training_state.take_state(peers, peers, STATE, times, is_start=is_start)


def test_the_nearest_gives_and_after_one_that_dies_or_has_none_the_next_gives_all(peers, clock):
    without = {1: [PeerLostError("dead")], 3: [NoStateYetError("3 has none")]}
    peers.states = without | {7: [given(0.5)], 4: [given(0.25)]}
    assert (rate_of(take(peers)), peers.asked) == (0.25, [1, 3, 4])


@pytest.mark.parametrize("bad", [given(0.5, nan), given(0.5, 1.0, 385), Offer(b"waste", [], bool)])
def test_a_poisoned_too_large_or_damaged_state_is_not_taken(peers, monkeypatch, bad):
    """A state may take 32 bytes for each of the 96 that this worker has itself."""
    monkeypatch.setattr(training_state, "OTHER_TRAINING_BYTES", 0)
    peers.states = {1: [bad], 0: [given(0.25)]}
    assert rate_of(take(peers)) == 0.25
    with pytest.raises(PeerLostError, match="worker 1 cannot give its state"):
        training_state.fetch_state(peers, peers, 1, Arriving(3072), 1.0)


@pytest.mark.parametrize(
    ("error", "chunks_a_fetch"),
    [(TurnedAwayError("its parameters hold NaN"), 1), (PeerLostError("1 is silent"), 0)],
)
def test_being_turned_away_or_given_nothing_is_no_progress(peers, clock, error, chunks_a_fetch):
    peers.num_chunks_received, peers.chunks_a_fetch = 3, chunks_a_fetch
    peers.states = {1: [error]}
    with pytest.raises(RendezvousError, match=f"gave it a state; the last: {error}$"):
        take(peers)
    assert 5.0 <= clock.now_s < 6.0
    assert peers.patience[:5] == [1.0, 2.0, 4.0, 5.0, 5.0], "a step may take longer"


def test_a_state_that_breaks_off_and_comes_on_again_may_take_any_time(peers, clock):
    peers.states = {1: [PeerLostError("1 is silent")] * 150 + [given(0.25)]}
    assert rate_of(take(peers)) == 0.25
    assert clock.now_s > 5.0


def test_at_the_start_a_worker_waits_for_its_parent_and_passes_over_a_silent_one(peers, clock):
    peers.protocol.rank = 13
    peers.states = {
        0: [None],
        12: [None],
        2: [NoStateYetError("2 has none"), NoStateYetError("2 has none"), None],
        6: [NoStateYetError("6 has none"), PeerLostError("6 is silent")],
    }
    assert take(peers, is_start=True) is None
    # Whoever has none yet is asked again, by way of those that did not answer.
    assert peers.asked == [6, 6, 2, 6, 2, 6, 2]


def test_at_the_start_a_worker_waits_for_a_parent_that_waits_itself_however_long(peers, clock):
    """A large model on a slow link comes down the tree one worker after another."""
    peers.protocol.rank = 3
    peers.states = {0: [None], 1: [NoStateYetError("1 has none")] * 150 + [None]}
    assert take(peers, is_start=True) is None
    assert clock.now_s > 5.0
    assert set(peers.asked) == {1}


def test_without_an_ancestor_workers_do_not_wait_for_one_another_for_ever(peers, clock):
    peers.protocol.rank = 1
    peers.states = {rank: [NoStateYetError(f"{rank} has none")] for rank in (2, 3)}
    with pytest.raises(RendezvousError, match="2 has none"):
        take(peers, is_start=True)
    assert 5.0 <= clock.now_s < 6.0


def test_a_bad_state_of_its_parent_ends_the_start_at_once(peers, clock):
    peers.states = {0: [TurnedAwayError("its parameters hold NaN")], 1: [None]}
    with pytest.raises(RendezvousError, match="worker 2 cannot start: its parameters hold NaN"):
        take(peers, is_start=True)
    assert clock.now_s == 0.0
