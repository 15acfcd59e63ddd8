"""Exchanges in each wire format, two workers in one thread."""

import math
from random import Random

import pytest
import torch
from links import MemoryLink

from gossipdp.dynamics.chunks import Moment, Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.gossip.codec import FORMATS, Codec, PoisonFound, tensor_bytes
from gossipdp.gossip.exchange import Exchange
from gossipdp.links.frames import HEADER_BYTES, ChunkKey, FrameType
from gossipdp.protocol.messages import ExchangeId

CHUNK = FrameType.EXCHANGE_CHUNK
ID = ExchangeId(0, 0, 1)


def make_state(seed: int, dtype=torch.float32, num_elements=1000, chunk_bytes=256) -> State:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_elements, generator=generator).to(dtype)
    return State([Segment(x, Role.TRAINED, chunk_bytes=chunk_bytes)])


def present(segment: Segment) -> torch.Tensor:
    """Return x + pending in float64; buffers are held in another way."""
    return segment.copy()[0].double()


def x_and_z(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + pending, and x + c/2 with it, of all exchanged values, in float64."""
    segments = [segment for segment in state.segments if segment.role.is_exchanged]
    x = [present(segment) for segment in segments]
    c = [0.0 if s.c is None else s.c.double() for s in segments]
    return torch.cat(x), torch.cat([a + 0.5 * b for a, b in zip(x, c, strict=True)])


def pair(name: str, make=make_state, **options):
    states = [make(seed, **options) for seed in (0, 1)]
    return states, [Codec(name, state) for state in states]


def deliver(link: MemoryLink, to: Exchange) -> None:
    land(to, *link.take())


def land(to: Exchange, frame_type: FrameType, key: ChunkKey, payload: bytes | memoryview) -> None:
    room = to.landing(frame_type, key)
    assert room is not None, (frame_type, key)
    assert len(room) == len(payload)
    room[:] = payload
    assert to.expects(frame_type, key)
    to.landed(frame_type, key, room)


def start(states, codecs=None, id=ID, moments=(), *, kinds=2 * (MemoryLink,)):
    """Begin an exchange between two, in their wire formats (by default new full ones)."""
    codecs = codecs or [Codec("full", state) for state in states]
    links = [kind(peer) for kind, peer, _ in zip(kinds, (1, 0), states, strict=False)]
    return links, [
        Exchange(state, codec, link, id, alpha_tilde=1.3, theta=0.0, moments=moments)
        for state, codec, link in zip(states, codecs, links, strict=True)
    ]


def exchange(states, codecs, random: Random, *, id=ID, moments=()):
    """Run one whole exchange, frames and turns of the two ends in an order that is drawn."""
    links, exchanges = start(states, codecs, id, moments)
    run(links, exchanges, random)
    return links, exchanges


def run(links, exchanges, random: Random):
    idle = 0
    while not all(each.is_finished for each in exchanges):
        end = random.randrange(2)
        before = links[end].queued_chunks
        if random.random() < 0.5:
            exchanges[end].pump()
        elif links[end].queue:
            deliver(links[end], exchanges[1 - end])
            before = -1
        idle = 0 if links[end].queued_chunks != before else idle + 1
        assert idle < 100, "nothing moves any more"


def test_the_time_on_arrays_is_counted_on_demand_alone():
    states, codecs = pair("full")
    codecs[1].is_timed = True
    exchange(states, codecs, Random(0))
    assert codecs[0].busy_s == 0.0 < codecs[1].busy_s


def test_chunks_of_another_exchange_or_out_of_turn_are_not_taken():
    _, exchanges = start([make_state(0), make_state(1)])
    exchanges[0].pump()
    assert exchanges[1].landing(CHUNK, ChunkKey(0, 0, 1, 0)) is not None
    assert exchanges[1].landing(FrameType.EXCHANGE_REPEAT, ChunkKey(0, 0, 1, 0)) is None
    others = (ChunkKey(0, 0, 2, 0), ChunkKey(0, 1, 1, 0), ChunkKey(1, 0, 1, 0))
    for key in (*others, ChunkKey(0, 0, 1, 1), ChunkKey(0, 0, 1, 10**6)):
        assert exchanges[1].landing(CHUNK, key) is None


@pytest.mark.parametrize("name", FORMATS)
def test_an_exchange_ends_although_a_state_travels_on_its_link(name):
    """A transfer keeps its chunks queued all the time; that holds up none of the exchange's."""
    states, codecs = pair(name, mixed_state)
    links, exchanges = start(states, codecs=codecs)
    other, num_turns = FrameType.STATE_CHUNK, 0
    while not all(exchange.is_finished for exchange in exchanges):
        num_turns += 1
        assert num_turns < 400, "they did not end"
        for here, there in ((0, 1), (1, 0)):
            exchanges[here].pump()
            if links[here].queue and links[here].queue[0][0] is not other:
                deliver(links[here], exchanges[there])
            elif links[here].queue:
                links[here].queue.popleft()
            while links[here].queued_of(other) < 2:
                links[here].send_chunk(other, ChunkKey(0, 0, 1, 0), memoryview(b"state"))


def mixed_state(seed: int) -> State:
    """Make trained parameters of two precisions and buffers, over several chunks each."""
    drawn = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float32}
    segments = [
        Segment(torch.randn(3000, **drawn), Role.TRAINED, chunk_bytes=1024),
        Segment(torch.randn(700, **drawn).abs(), Role.BUFFER, chunk_bytes=1024),
        Segment(torch.randn(1501, **drawn).double(), Role.TRAINED, chunk_bytes=4096),
        Segment(torch.arange(5), Role.COPIED),
    ]
    return State(segments)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float64])
def new_tensors(request):
    """Let new tensors have a precision that a script has chosen, which is no matter."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("new_tensors")
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_conserves_the_mean_of_z(name):
    """Both ends apply the same delta with opposite signs; the distance is without buffers."""
    states, codecs = pair(name, mixed_state)
    values = [torch.cat([s.x for s in state.segments if s.c is not None]) for state in states]
    distances = [float((values[0] - values[1]).square().sum())]
    before = sum(x_and_z(state)[1] for state in states)
    random = Random(0)
    for _ in range(6):
        links, ends = exchange(states, codecs, random)
        assert ends[0].squared_distance == ends[1].squared_distance
        beyond = ChunkKey(0, 0, 1, ends[0].num_chunks)
        assert not ends[0].expects(FrameType.EXCHANGE_REPEAT, beyond)
        distances.append(ends[0].squared_distance)
        # Beside codes, verdicts and repeats may be queued.
        most = FORMATS[name].window * (1 if name != "lattice8" else 3)
        assert all(link.most_queued <= most for link in links)
        for mine, peers in zip(*(state.segments for state in states), strict=True):
            if mine.role is Role.BUFFER:
                assert torch.equal(present(mine), present(peers))
                continue
            assert torch.equal(mine.pending, -peers.pending)
            assert mine.c is None or torch.equal(mine.c, -peers.c)
    after = sum(x_and_z(state)[1] for state in states)
    assert torch.allclose(after, before, rtol=0, atol=3e-6)
    assert torch.allclose(after[3700:], before[3700:], rtol=0, atol=1e-14)
    assert distances[1] == pytest.approx(distances[0], rel=1e-5 if name == "full" else 1e-2)
    assert distances[-1] < 1e-3 * distances[0]


class SharedLink(MemoryLink):
    is_shared = True


@pytest.mark.parametrize("initiators", [MemoryLink, SharedLink])
@pytest.mark.parametrize("others", [MemoryLink, SharedLink])
def test_by_default_a_link_of_shared_memory_takes_values_and_any_other_codes(initiators, others):
    """Both ends take the form of the one that asked, even if the other would ask for another."""
    states, codecs = pair("auto", mixed_state)
    for codec in codecs:
        codec.load()
    before = sum(x_and_z(state)[1] for state in states)
    wanted, distances = "full" if initiators is SharedLink else "lattice8", []
    for counter in range(6):
        links, ends = start(states, codecs=codecs, kinds=(initiators, others))
        run(links, ends, Random(counter))
        assert [codec.form.name for codec in codecs] == [wanted] * 2
        distances.append(ends[0].squared_distance)
    assert torch.allclose(sum(x_and_z(state)[1] for state in states), before, rtol=0, atol=3e-6)
    assert ends[0].num_repeated == 0
    assert distances[-1] < 1e-3 * distances[0]


def test_a_worker_whose_arrays_are_a_device_s_asks_for_values(monkeypatch):
    state, loaded = make_state(0), set()
    monkeypatch.setattr("gossipdp.dynamics.update.compile_loops", lambda *of: loaded.add(of))
    state.chunks[0].is_compiled = True
    float32, bfloat16 = torch.float32, torch.bfloat16
    for name, wires in (("full", [float32]), ("auto", [float32, bfloat16])):
        loaded.clear()
        codec = Codec(name, state)
        assert loaded == {(float32, wire) for wire in wires}
    assert not codec.chooses_code(is_shared=False), "it would compile in an exchange"
    monkeypatch.setattr("gossipdp.gossip.codec.loop", loaded.add)
    codec.load()
    assert {"encode", "exchange_coded"} < loaded, "the first and the last"
    assert codec.chooses_code(is_shared=False)
    assert not codec.chooses_code(is_shared=True)
    codec._is_on_device = True
    assert not codec.chooses_code(is_shared=False)


def state_with_moments(seed: int, dtype=torch.float32) -> State:
    """Make parameters of eight chunks, and two moments of seven each, which differ by worker."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(480, generator=generator, dtype=torch.float32).to(dtype)
    moments = [
        Segment(
            torch.rand(420, generator=generator, dtype=torch.float32).to(dtype),
            Role.MOMENT,
            momentum=False,
            chunk_bytes=60 * dtype.itemsize,
            moment=Moment(name, period, 0.9, steps=3 + seed),
        )
        for name, period in (("exp_avg", 2), ("exp_avg_sq", 3))
    ]
    trained = Segment(x, Role.TRAINED, chunk_bytes=60 * dtype.itemsize)
    return State([trained], moments=moments)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("full", torch.bfloat16), ("bfloat16", torch.float32), ("lattice8", torch.float32)],
)
@pytest.mark.usefixtures("new_tensors")
def test_an_exchange_carries_the_moments_that_are_due(name, dtype):
    """Neither, one, or both; more chunks than the window has slots, in frames of a drawn order."""
    random = Random(3)
    states, codecs = pair(name, state_with_moments, dtype=dtype)
    for counter, periods in enumerate([(), (2,), (3,), (2, 3), ()] * 2):
        carried = [state.carried(periods) for state in states]
        due = [2 in periods, 3 in periods]
        assert [len(each) for each in carried] == [8 + 7 * sum(due)] * 2
        # What each optimizer makes of its moment: v / (1 - beta^t).
        masses = [[m.moment.mass for m in state.moments] for state in states]
        before = [
            [present(m) / mass for m, mass in zip(state.moments, row, strict=True)]
            for state, row in zip(states, masses, strict=True)
        ]
        links, ends = exchange(
            states, codecs, random, id=ExchangeId(0, 0, counter), moments=periods
        )
        assert [each.num_applied for each in ends] == [8 + 7 * sum(due)] * 2
        num_bytes = sum(codecs[0].num_bytes(each) + HEADER_BYTES for each in carried[0])
        if name != "lattice8":  # which sends its steps, verdicts and repeats besides
            assert [link.bytes_sent for link in links] == [num_bytes] * 2
        for index, is_due in enumerate(due):
            mean = (before[0][index] + before[1][index]) / 2
            for end, state in enumerate(states):
                after = present(state.moments[index]) / masses[end][index]
                if not is_due:
                    assert torch.equal(after, before[end][index])
                else:
                    # A code of squares may be off by a sixteenth of what the peer has.
                    is_coded = name == "lattice8" and index == 1
                    assert torch.allclose(after, mean, rtol=2**-4 if is_coded else 2**-8)
        for state in states:  # what steps do meanwhile, on each worker in its own way
            state.boundary(0.0)
            for segment in state.moments:
                segment.x.mul_(0.5 + random.random())


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_at_the_link(name):
    expected = {"full": (4, 2, 8), "bfloat16": (2, 2, 2), "lattice8": (1, 1, 8)}[name]
    dtypes = torch.float32, torch.bfloat16, torch.float64
    for dtype, num_bytes in zip(dtypes, expected, strict=True):
        states, codecs = pair(name, dtype=dtype, num_elements=60_000, chunk_bytes=1 << 17)
        _, ends = exchange(states, codecs, Random(0))
        # The first exchange finds out how far apart the two are.
        assert all((end.num_repeated > 0) is (num_bytes == 1) for end in ends)
        links, ends = exchange(states, codecs, Random(0))
        assert all(end.num_repeated == 0 for end in ends)
        assert links[0].bytes_sent / 60_000 == pytest.approx(num_bytes, rel=0.03)
    states, codecs = pair(name, dtype=torch.float16, num_elements=100)
    assert len(codecs[0].preface_landing) == 1, "a block at most"
    exchange(states, codecs, Random(0))  # which rounds no two bytes, but for a repeat
    x, y = (present(state.segments[0]) for state in states)
    assert torch.allclose(x, y, rtol=0, atol=2.0**-5 if name == "lattice8" else 1e-6)


@pytest.mark.parametrize(("num_elements", "num_bytes"), [(2, 8), (3, 11)])
def test_a_chunk_whose_code_would_be_longer_travels_as_it_is(num_elements, num_bytes):
    states, codecs = pair("lattice8", num_elements=num_elements)
    _, ends = exchange(states, codecs, Random(0))
    assert codecs[0].num_bytes(states[0].chunks[0]) == num_bytes
    assert ends[0].num_applied == 1


def test_a_slot_waits_for_the_repeat_in_it_though_its_chunk_is_closed():
    """The peer's repeat came while ours is queued: the next chunk of the slot must not be taken."""
    states, codecs = pair("lattice8", chunk_bytes=512)
    (mine, theirs), (here, there) = start(states, codecs=codecs)
    window = 6
    here.pump()  # the steps: the finest, with which no code can be read
    deliver(mine, there)
    there.pump()
    deliver(theirs, here)
    here.pump()
    deliver(mine, there)
    there.pump()  # its verdict on our first code
    for _ in range(window - 1):
        here.pump()
        deliver(mine, there)
    while theirs.queue:
        deliver(theirs, here)
    deliver(mine, there)  # our verdict: both know now that both repeat
    while theirs.queue:
        deliver(theirs, here)
    ((frame_type, key, repeat),) = mine.queue
    assert (frame_type, key.index) == (FrameType.EXCHANGE_REPEAT, 0)
    before = bytes(repeat)
    here.pump()
    assert len(mine.queue) == 1
    assert bytes(repeat) == before
    deliver(mine, there)
    here.pump()
    assert [key.index for _, key, _ in mine.queue] == [window]


def test_the_end_that_knows_the_distance_decides_on_the_steps():
    states, codecs = pair("lattice8", chunk_bytes=4096)
    _, ends = exchange(states, codecs, Random(0))
    assert all(end.num_repeated == end.num_chunks for end in ends)
    states[1].segments[0].x.add_(make_state(2).segments[0].x)  # as far apart as before
    codecs[1] = Codec("lattice8", states[1])
    _, ends = exchange(states, codecs, Random(0), id=ExchangeId(0, 0, 2))
    assert [end.num_repeated for end in ends] == [0, 0]


def test_a_distance_beyond_the_steps_is_repeated_and_learnt():
    states = [make_state(0, chunk_bytes=2048), make_state(0, chunk_bytes=2048)]
    codecs = [Codec("lattice8", state) for state in states]
    random = Random(0)
    exchange(states, codecs, random)
    _, ends = exchange(states, codecs, random)
    assert [end.num_repeated for end in ends] == [0, 0]
    # One value of one worker jumps, as no exchange before has shown.
    states[0].segments[0].x[600] += 50.0
    z = sum(x_and_z(state)[1] for state in states)
    _, ends = exchange(states, codecs, random)
    assert [end.num_repeated for end in ends] == [1, 1]
    x, y = (x_and_z(state)[0] for state in states)
    assert abs(float(x[600] - y[600])) < 50 * 2**-7
    assert torch.allclose(sum(x_and_z(state)[1] for state in states), z, atol=1e-5)
    states[1].segments[0].x[600] += 50.0
    _, ends = exchange(states, codecs, random)
    assert [end.num_repeated for end in ends] == [0, 0]


def test_hostile_steps_and_codes_end_in_a_repeat_or_in_nothing_applied():
    states, codecs = pair("lattice8")
    before = x_and_z(states[0])[0]
    links, ends = start(states, codecs=codecs)
    ends[0].pump()
    frame_type, key, steps = links[0].queue.popleft()
    assert frame_type is FrameType.EXCHANGE_STEPS
    first = ChunkKey(0, 0, 1, 0)
    assert ends[0].landing(CHUNK, first) is None, "steps come first"
    for step in (-128, -10, 127):
        codec = Codec("lattice8", states[0])
        end = Exchange(states[0], codec, links[0], ID, alpha_tilde=1.3, theta=0.0)
        end.pump()
        links[0].queue.clear()
        land(end, frame_type, key, tensor_bytes(torch.full((len(steps),), step, dtype=torch.int8)))
        end.pump()
        assert [kind for kind, *_ in links[0].queue] == [CHUNK, CHUNK]
        land(end, CHUNK, first, Random(0).randbytes(72))
        land(end, FrameType.EXCHANGE_VERDICT, first, b"\x01")
        verdicts = [bytes(data) for kind, _, data in links[0].queue if len(data) == 1]
        assert verdicts == [b"\x00"], "random bytes have not the checksum of what they decode to"
        assert torch.equal(x_and_z(states[0])[0], before)
        assert end.landing(FrameType.EXCHANGE_VERDICT, first) is None
        infinite = tensor_bytes(torch.full((64,), math.inf, dtype=torch.bfloat16))
        with pytest.raises(PoisonFound) as found:
            land(end, FrameType.EXCHANGE_REPEAT, first, infinite)
        assert not found.value.ours
        assert torch.equal(x_and_z(states[0])[0], before)
        links[0].queue.clear()


@pytest.mark.parametrize("size", [64, 600])
@pytest.mark.parametrize("name", FORMATS)
def test_no_format_sends_poison(name, size):
    """In the larger chunk one block of the code is poisoned, and the other is not."""
    for seed in range(5):  # either half of the chunk comes first
        states, codecs = pair(name, chunk_bytes=4 * size)
        states[0].segments[0].x[130] = math.nan
        links, ends = start(states, codecs=codecs)
        with pytest.raises(PoisonFound) as found:
            run(links, ends, Random(seed))
        assert found.value.ours
        assert ends[0]._num_encoded == 130 // size, "that chunk is never encoded"
        assert not torch.isnan(x_and_z(states[1])[0]).any()
