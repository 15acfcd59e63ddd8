"""A sum over a tree and one worker's values; the test plays the protocol."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from consolidation import epoch
from links import MemoryLink
from torch import Tensor

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.errors import PeerLostError
from gossipdp.gossip.sums import Sums
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.protocol import actions as do
from gossipdp.protocol.messages import Epoch
from gossipdp.protocol.reduction import Blame, Reduction, tree

EPOCH = epoch(1)


class Member:
    """One of three workers with two parameters and two integers, and what it tells its protocol."""

    def __init__(self, rank: int, x: Tensor) -> None:
        self.rank = rank
        self.x = Segment(x.clone(), Role.TRAINED)
        self.said: list[tuple[Any, ...]] = []
        self.begin(EPOCH)
        self.consolidation = SimpleNamespace(
            lead=EPOCH.leader,
            accepts_result=lambda peer, origin, index: (peer, origin) == (0, EPOCH),
            left_out={},
            origin=EPOCH,
        )
        self.averages = SimpleNamespace(sum_of=lambda name: None)
        self.result_landed = partial(self.tell, "result")
        self.chunk_finished = partial(self.tell, "finished")
        self.poisoned: list[int] = []
        self.links: Any = {peer: MemoryLink(peer) for peer in range(3) if peer != rank}
        state = State([self.x, Segment(torch.tensor([3, 4]), Role.COPIED)])
        told: Any = self
        poisoned = partial(self.poisoned.append, rank)
        self.sums = Sums(state, told, self.links, self.perform, lambda: 0.0, poisoned=poisoned)

    def begin(self, name: Epoch) -> None:
        blame = Blame(self.rank) if self.rank == 0 else None
        self.reduction: Reduction | None = Reduction(
            name, self.rank, tree(range(3)), 1, [], blame=blame, divisor=3
        )
        self.reduction.advance()

    def perform(self, actions: list[do.DataAction]) -> None:
        for action in actions:
            self.sums.perform(action)
        while self.sums.pump():
            pass

    # Its protocol.

    def sum_of(self, name: Epoch) -> Reduction | None:
        return self.reduction if self.reduction and self.reduction.epoch == name else None

    def tell(self, word: str, *told: Any) -> list[Any]:
        """Note what the sums say, but for the sum's name and the time."""
        self.said.append((word, *(each for each in told[:-1] if not isinstance(each, Epoch))))
        return []

    def partial_landed(self, peer: int, name: Epoch, index: int, now: float) -> list[Any]:
        self.reduction.landed(peer, index)
        return self.tell("partial", peer, index, now)

    def cannot_give(self, name: Epoch, rank: int, reason: str, now: float) -> list[Any]:
        if rank == self.rank:
            self.reduction = None
        return self.tell("cannot give", rank, reason, now)

    # Its links.

    def land(self, kind: FrameType, peer: int, values: Tensor) -> None:
        self.lands(kind, peer, values)
        self.sums.landed(self.links[peer], kind, self.key)

    def lands(self, kind: FrameType, peer: int, values: Tensor) -> None:
        room = self.sums.landing(self.links[peer], kind, self.key)
        room[:] = memoryview(values.numpy()).cast("B")

    key = ChunkKey(EPOCH.leader, EPOCH.process_tag, EPOCH.number, 0)

    def outcome(self) -> list[Tensor]:
        self.perform([do.Commit(EPOCH, 0.25, 3)])
        return self.sums.outcome.values


PARTIAL, RESULT = FrameType.PARTIAL_CHUNK, FrameType.RESULT_CHUNK


def test_sums_of_bfloat16_parameters_are_in_float32():
    """At 256 a quarter is less than half of the last digit of bfloat16."""
    root = Member(0, torch.full((2,), 256.0, dtype=torch.bfloat16))
    root.land(PARTIAL, 1, torch.tensor([0.25, 0.75]))
    root.land(PARTIAL, 2, torch.tensor([0.5, 0.5]))
    root.perform([do.FinishChunk(EPOCH, 0, 3)])
    mean = torch.tensor([256.75, 257.25]) / 3.0
    ((kind, index, distance),) = [each for each in root.said if each[0] == "finished"]
    assert (kind, index) == ("finished", 0)
    assert distance == pytest.approx(float((256.0 - mean).square().sum()), rel=1e-6)
    assert torch.equal(root.outcome()[0], mean)
    assert root.x.x.tolist() == [256.0, 256.0], "nothing is written to the parameters"


def test_the_mean_of_equal_workers_is_what_they_hold():
    """A third of three times x is often the number next to x."""
    x = 1.5 + torch.arange(100) * torch.finfo(torch.float32).eps
    assert not torch.equal((x + 2.0 * x) / 3.0, x)
    root = Member(0, x)
    for child in (1, 2):
        root.land(PARTIAL, child, x)
    root.perform([do.FinishChunk(EPOCH, 0, 3)])
    assert torch.equal(root.outcome()[0], x)


def test_a_sum_that_is_sent_again_has_the_same_values():
    member = Member(1, torch.tensor([1.0, 2.0]))
    member.perform([do.SendPartial(0, EPOCH, 0)])
    member.x.x.add_(1.0)  # as it would, were it read again
    member.lands(RESULT, 0, torch.ones(2))
    member.sums.link_lost(0)
    tables = ("_queues", "_rooms", "_leaving", "_coming")
    assert not any(vars(member.sums)[name] for name in tables), "nothing is kept of a lost link"
    member.perform([do.SendPartial(0, EPOCH, 0)])
    sent = [(kind, key.index, bytes(payload)) for kind, key, payload in member.links[0].queue]
    assert sent == [(PARTIAL, 0, torch.tensor([1.0, 2.0]).numpy().tobytes())] * 2
    member.perform([do.SendPartial(0, EPOCH, 1)])
    for before, num_kept in ((0, 2), (2, 0)):
        member.perform([do.Forget(EPOCH, before)])
        assert len(member.sums._slots[EPOCH]) == num_kept


@pytest.mark.parametrize("kind", [PARTIAL, RESULT])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_that_arrives_is_not_taken(kind, poison):
    rank, peer = (0, 1) if kind is PARTIAL else (1, 0)
    worker = Member(rank, torch.ones(2))
    worker.land(kind, peer, torch.tensor([1.0, poison]))
    reason = "what it sent to be averaged holds NaN or infinity"
    assert worker.said == [("cannot give", peer, reason)]
    assert worker.links[peer].closed_for == reason
    if kind is PARTIAL:
        worker.land(PARTIAL, 2, torch.ones(2))
        worker.perform([do.FinishChunk(EPOCH, 0, 2)])
        assert worker.outcome()[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("rank", "x", "action"),
    [
        (1, float("nan"), do.SendPartial(0, EPOCH, 0)),
        # Each part of the sum is finite, so no worker before has seen anything wrong.
        (0, 3e38, do.FinishChunk(EPOCH, 0, 3)),
    ],
)
def test_poison_of_its_own_or_of_a_sum_is_not_given(rank, x, action):
    member = Member(rank, torch.full((2,), x))
    for peer in (1, 2) if rank == 0 else ():
        member.land(PARTIAL, peer, torch.full((2,), 1e38))
    member.said.clear()
    member.perform([action])
    ((word, said_of, reason),) = member.said
    assert (word, said_of) == ("cannot give", rank)
    assert reason.endswith("hold NaN or infinity")
    assert member.poisoned == [rank], "and it hears that itself"
    assert not any(link.queue for link in member.links.values())


def test_an_old_result_is_not_sent_in_place_of_a_new_one():
    """It waits behind a full link while a new sum begins, and only so many chunks wait."""
    worker = Member(1, torch.ones(2))
    queue = worker.links[2].queue
    queue.extend(range(3))
    worker.perform([do.SendResult(2, EPOCH, 1)] * 5000)
    assert (len(queue), len(worker.sums._queues[2])) == (4, 1023)
    worker.consolidation.origin = epoch(2)
    worker.perform([do.Forget(EPOCH)])
    queue.clear()
    worker.perform([])
    assert not queue
    assert not worker.sums._slots


def test_what_arrives_of_a_sum_that_was_given_up_is_left_alone():
    """A chunk is on its way in when the next attempt begins."""
    root = Member(0, torch.tensor([1.0, 2.0]))
    root.land(PARTIAL, 2, torch.tensor([3.0, 3.0]))
    root.said.clear()
    root.lands(PARTIAL, 1, torch.tensor([5.0, 5.0]))
    root.perform([do.Forget(EPOCH)])
    root.begin(epoch(2))
    root.sums.landed(root.links[1], PARTIAL, root.key)
    assert root.said == []
    root.perform([do.FinishChunk(epoch(2), 0, 1), do.FinishChunk(EPOCH, 0, 1)])
    assert [each[:2] for each in root.said] == [("finished", 0)]
    assert not root.sums._slots.keys() - {epoch(2)}


def test_a_worker_that_closes_fails_its_own_request_and_keeps_nothing():
    worker = Member(1, torch.ones(2))
    worker.average = lambda now: []
    asked, sums = worker.sums.ask(), worker.sums
    worker.outcome()
    worker.links[2].queue.extend(range(4))
    worker.perform([do.SendResult(2, EPOCH, 1)])
    sums.end("it closes")
    with pytest.raises(PeerLostError, match="it closes"):
        asked.result(timeout=0)
    assert (sums.outcome, sums._slots, sums._queues) == (None, {}, {})
    worker.perform([do.AverageEnded(EPOCH, 3, {})])  # too late
