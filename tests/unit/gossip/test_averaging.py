"""What arrives to be averaged, on links and a protocol of the test's own."""

import math
from types import SimpleNamespace

import pytest
import torch
from gossipdp.gossip.averaging import Averaging

from gossipdp.dynamics.chunks import Role, Segment, State
from gossipdp.gossip.codec import tensor_bytes
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.protocol.actions import Prepare
from gossipdp.protocol.messages import Epoch

EPOCH = Epoch(1, 0, 7)
PEER = 3


class Awaiting:
    """A protocol that awaits every chunk, and says what landed."""

    def __init__(self) -> None:
        self.consolidation = SimpleNamespace(
            accepts_partial=lambda *what: True, accepts_result=lambda *what: True
        )

    def partial_landed(self, peer, epoch, chunk, now_s):
        return [("partial", peer, epoch, chunk)]

    def result_landed(self, peer, epoch, chunk, now_s):
        return [("result", peer, epoch, chunk)]


class Worker:
    """Trained parameters, a float buffer and an integer one; a link to ``PEER``."""

    def __init__(self) -> None:
        segments = [
            Segment(torch.ones(4), Role.TRAINED),
            Segment(torch.ones(3), Role.BUFFER),
            Segment(torch.ones(2, dtype=torch.int64), Role.COPIED),
        ]
        self.state = State(segments)
        self.landed: list[object] = []
        self.closed_for: list[str] = []
        self.link = SimpleNamespace(peer=PEER, close=self.closed_for.append)
        self.averaging = Averaging(
            self.state, Awaiting(), {PEER: self.link}, self.landed.extend, lambda: 0.0
        )
        self.averaging.perform(Prepare())

    def sums(self, chunk: int) -> torch.Tensor:
        return self.averaging._sums[chunk]

    def give(self, frame_type: FrameType, chunk: int, values: torch.Tensor) -> None:
        key = ChunkKey(EPOCH.leader, EPOCH.process_tag, EPOCH.number, chunk)
        data = tensor_bytes(values)
        room = self.averaging.landing(self.link, frame_type, key)
        assert room is not None
        room[:] = data
        self.averaging.landed(self.link, frame_type, key)


@pytest.mark.parametrize("frame_type", [FrameType.PARTIAL_CHUNK, FrameType.RESULT_CHUNK])
@pytest.mark.parametrize(("chunk", "size"), [(0, 4), (1, 3)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_is_let_into_no_sum_and_no_result(frame_type, chunk, size, poison):
    worker = Worker()
    values = torch.full((size,), 2.0)
    values[-1] = poison
    worker.give(frame_type, chunk, values)
    assert worker.landed == []
    assert torch.equal(worker.sums(chunk), torch.ones(size))
    (reason,) = worker.closed_for
    assert "NaN or infinity" in reason
    # Asked for again, and sound this time.
    worker.give(frame_type, chunk, torch.full((size,), 2.0))
    assert len(worker.landed) == 1
    expected = 3.0 if frame_type is FrameType.PARTIAL_CHUNK else 2.0
    assert torch.equal(worker.sums(chunk), torch.full((size,), expected))


def test_while_sums_are_under_way_the_parameters_are_what_they_are():
    """Sums lay in the memory of pending: who read x + pending meanwhile got twice the values."""
    worker = Worker()
    worker.give(FrameType.PARTIAL_CHUNK, 0, torch.full((4,), 2.0))
    assert torch.equal(worker.sums(0), torch.full((4,), 3.0))
    for chunk in worker.state.chunks:
        out = torch.empty_like(chunk.x)
        chunk.read(out)
        assert torch.equal(out, torch.ones_like(out))


def test_integers_are_never_poisoned():
    worker = Worker()
    worker.give(FrameType.RESULT_CHUNK, 2, torch.tensor([2**62, -1]))
    assert worker.closed_for == []
    assert worker.landed == [("result", PEER, EPOCH, 2)]
