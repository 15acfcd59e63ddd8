"""Averages of live workers by a tree: many workers in one thread, on links in memory."""

import math
from random import Random

import pytest
import torch
from gossipdp.gossip.live_average import WINDOW, AverageFailedError, LiveAverages
from links import MemoryLink

from gossipdp.dynamics.chunks import Role, Segment, State
from gossipdp.protocol.messages import (
    AskAverage,
    Envelope,
    ProtocolError,
    PullAverage,
    decode,
    encode,
)

TIMEOUT_S = 5.0


class Worker:
    """Trained parameters over many chunks, a buffer, and an integer one."""

    def __init__(self, world: "World", rank: int, value: float, dtype: torch.dtype) -> None:
        self.rank = rank
        self.state = State(
            [
                Segment(torch.full((700,), value, dtype=dtype), Role.TRAINED, chunk_bytes=128),
                Segment(torch.full((5,), value), Role.BUFFER),
                Segment(torch.full((3,), rank), Role.COPIED),
            ]
        )
        self.links: dict[int, MemoryLink] = {}
        self.refusal: str | None = None
        self.is_alive = True
        self.most_sent = 0
        self.averages = LiveAverages(
            self.state,
            rank,
            links=self.links,
            send=self.send,
            refusal=lambda: self.refusal,
            clock=lambda: world.now,
            timeout_s=TIMEOUT_S,
        )

    def send(self, peer, message):
        if peer in self.links:
            self.links[peer].send_control(encode(Envelope(message)))

    @property
    def sums(self) -> list[torch.Tensor]:
        return [torch.empty(c.num_elements, dtype=c.pending.dtype) for c in self.state.chunks]


class World:
    def __init__(self, size: int, dtype=torch.float32, value=lambda rank: 1.0 + rank) -> None:
        self.now = 0.0
        self.workers = [Worker(self, rank, value(rank), dtype) for rank in range(size)]
        for one in self.workers:
            for other in self.workers:
                if one is not other:
                    one.links[other.rank] = MemoryLink(other.rank)

    def die(self, rank: int) -> None:
        self.workers[rank].is_alive = False
        for worker in self.workers:
            if worker.links.pop(rank, None) is not None:
                worker.averages.gone(rank, "dead")

    def work(self, random: Random, turns: int = 10_000) -> None:
        """Deliver messages and chunks in an order that is drawn, until nothing moves."""
        for _ in range(turns):
            live = [worker for worker in self.workers if worker.is_alive]
            random.shuffle(live)
            for worker in live:
                worker.averages.pump()
            moved = [
                self.deliver(worker, self.workers[peer], link)
                for worker in live
                for peer, link in list(worker.links.items())
            ]
            if not any(moved):
                return
        raise AssertionError("it never ends")

    def deliver(self, worker: Worker, to: Worker, link: MemoryLink) -> bool:
        back = to.links.get(worker.rank)
        if back is None or not (link.controls or link.queue):
            return False
        while link.controls:
            to.averages.receive(back, decode(link.controls.popleft()).message)
        if link.queue:
            worker.most_sent = max(worker.most_sent, len(link.queue))
            frame_type, key, payload = link.take()
            room = to.averages.landing(back, frame_type, key)
            if room is not None:
                room[:] = payload
                to.averages.landed(back, frame_type, key)
        return True


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("caller", [0, -1])
def test_the_sums_are_those_of_all(size, caller):
    world = World(size)
    worker = world.workers[caller]
    for each in world.workers:
        each.state.segments[0].pending.fill_(0.5)
        each.state.segments[0].c.fill_(1.0)
        for chunk in each.state.chunks:
            chunk.restored()
    sums = worker.sums
    others = [rank for rank in range(size) if rank != worker.rank]
    ended = worker.averages.begin([worker.rank, *others], sums)
    world.work(Random(0))
    assert (ended.result(0).count, ended.result(0).without) == (size, ())
    x = float(sum(range(1, size + 1)))
    assert torch.equal(torch.cat(sums[:-1]), torch.full((700,), x + size))  # z = x + 1/2 + 1/2
    assert torch.equal(sums[-1], torch.full((5,), x))
    assert all(each.most_sent <= WINDOW for each in world.workers)
    assert not any(each.averages._requests for each in world.workers)


def test_sixty_four_equal_copies_in_bfloat16_average_to_themselves():
    """Summed in bfloat16 they would end 6% off."""
    value = float(torch.tensor(1.1, dtype=torch.bfloat16))
    world = World(64, torch.bfloat16, lambda rank: value)
    sums = world.workers[0].sums
    ended = world.workers[0].averages.begin(range(64), sums)
    world.work(Random(0))
    mean = torch.cat(sums[:-1]).div_(ended.result(0).count)
    assert torch.equal(mean, torch.full((700,), value))


def test_several_ask_at_once():
    world = World(6)
    all_sums = [worker.sums for worker in world.workers]
    ended = [
        worker.averages.begin([worker.rank, *(r for r in range(6) if r != worker.rank)], sums)
        for worker, sums in zip(world.workers, all_sums, strict=True)
    ]
    world.work(Random(1))
    for each, sums in zip(ended, all_sums, strict=True):
        assert each.result(0).count == 6
        assert torch.equal(torch.cat(sums[:-1]), torch.full((700,), 21.0))


@pytest.mark.parametrize("victim", [1, 3, 6])
@pytest.mark.parametrize("after", [1, 5, 20])
def test_after_a_death_the_caller_asks_again_without_it(victim, after):
    world = World(7)
    caller = world.workers[0]
    ended = caller.averages.begin(range(7), caller.sums)
    random = Random(after)
    with pytest.raises(AssertionError, match="never ends"):
        world.work(random, after)
    assert not ended.done()
    world.die(victim)
    world.work(random)
    with pytest.raises(AverageFailedError) as failed:
        ended.result(0)
    assert failed.value.rank == victim
    sums = caller.sums
    again = caller.averages.begin([r for r in range(7) if r != victim], sums)
    world.work(random)
    assert again.result(0).count == 6
    expected = 28.0 - (1 + victim)
    assert torch.equal(torch.cat(sums[:-1]), torch.full((700,), expected))


def test_one_without_a_state_passes_on_what_is_below_it():
    world = World(7)
    world.workers[1].refusal = "it joins"
    sums = world.workers[0].sums
    ended = world.workers[0].averages.begin(range(7), sums)
    world.work(Random(0))
    assert (ended.result(0).count, ended.result(0).without) == (6, (1,))
    assert torch.equal(torch.cat(sums[:-1]), torch.full((700,), 28.0 - 2.0))


def test_poison_fails_the_request_by_name():
    world = World(7)
    world.workers[4].state.segments[0].x[600] = math.nan
    ended = world.workers[0].averages.begin(range(7), world.workers[0].sums)
    world.work(Random(0))
    with pytest.raises(AverageFailedError, match="NaN") as failed:
        ended.result(0)
    assert failed.value.rank == 4


def test_one_that_stands_still_is_named_after_the_time_out():
    world = World(3)
    world.workers[2].averages.receive = lambda link, message: None  # it hears, and does nothing
    ended = world.workers[0].averages.begin(range(3), world.workers[0].sums)
    world.work(Random(0))
    world.now = 2 * TIMEOUT_S + 0.1
    for worker in world.workers:
        worker.averages.look(world.now, ())
    with pytest.raises(AverageFailedError) as failed:
        ended.result(0)
    assert failed.value.rank == 2
    assert not any(worker.averages._requests for worker in world.workers)


@pytest.mark.parametrize(
    "members",
    [(1, 0, 2), (0, 2), (0, 1, 1), (0, 2, 3, 1)],
    ids=["caller", "left out", "twice", "child"],
)
def test_who_asks_out_of_turn_is_told_so(members):
    world = World(4)
    with pytest.raises(ProtocolError, match="out of its turn"):
        world.workers[1].averages.receive(MemoryLink(0), AskAverage(0, 1, members))


def test_what_is_asked_of_nothing_is_nothing():
    worker = World(2).workers[0]
    worker.averages.receive(MemoryLink(1), PullAverage(1, 3, 10))
    worker.averages.gone(1, "dead")
    worker.averages.pump()
