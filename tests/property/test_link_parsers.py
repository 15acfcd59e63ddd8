"""Parsers of what strangers send, and the targets of ``make fuzz``: a value or the one error."""

import itertools
import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_processes import load_script

from gossipdp.links import frames
from gossipdp.links.frames import FrameType
from gossipdp.links.handshake import Handshake, HandshakeError

FUZZ = Path(__file__).parents[1] / "fuzz"
targets, mutation = load_script(FUZZ / "targets.py"), load_script(FUZZ / "mutation.py")
TAG = frames.run_tag("run")


def pair() -> tuple[Handshake, Handshake]:
    return (
        Handshake(targets.identity(0), targets.SECRET, dialler=True, wanted_rank=1),
        Handshake(targets.identity(1), targets.SECRET, dialler=False),
    )


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


keys = st.builds(frames.ChunkKey, unsigned(32), unsigned(32), unsigned(64), unsigned(32))
chunk_types = st.sampled_from([kind for kind in FrameType if kind not in frames.KEYLESS_TYPES])


numbers = st.tuples(unsigned(40), st.integers(1, 2**16 - 1), unsigned(58))


@given(chunk_types, unsigned(40), st.integers(1, frames.MAX_CHUNK_BYTES), keys, numbers)
def test_headers_round_trip(frame_type, sequence, length, key, numbers):
    num_read, segment, place = numbers
    segment, offset = (segment, 64 * place) if frame_type is FrameType.EXCHANGE_CHUNK else (0, 0)
    fields = {"num_read": num_read, "segment": segment, "offset": offset}
    data = frames.pack_header(TAG, frame_type, sequence, length, frames.pack_key(key), **fields)
    header = frames.parse_header(data, TAG, sequence)
    assert (header.frame_type, header.length, header.key) == (frame_type, length, key)
    assert header.num_read == num_read % 2**32
    assert (header.segment, header.offset) == (segment, offset)


@given(st.data())
def test_a_changed_handshake_never_opens_a_link(data):
    """Whatever byte of whatever message changes on the way: never a link between others, or of
    another run, or without the proofs of both.
    """
    dialler, acceptor = pair()
    changed, ends = data.draw(st.integers(0, 3), label="which message"), (dialler, acceptor)
    with suppress(HandshakeError):
        for number in itertools.count():
            if not (said := bytearray(ends[number % 2].take_output())):
                break
            if number == changed:
                position = data.draw(st.integers(0, len(said) - 1), label="position")
                said[position] ^= data.draw(st.integers(1, 255), label="change")
            targets.feed(ends[1 - number % 2], bytes(said))
    if all(each.is_over and each.refusal is None for each in (dialler, acceptor)):
        assert changed in (0, 3)  # a hello or a welcome, of which the proofs cover ranks and run
        assert (dialler.peer.rank, acceptor.peer.rank) == (1, 0)
        assert acceptor.peer.run_id == "run"


@given(st.integers(1, 60))
def test_bytes_may_come_in_any_pieces(size):
    dialler, acceptor = pair()
    for _ in range(4):
        for speaker, listener in ((dialler, acceptor), (acceptor, dialler)):
            said = speaker.take_output()
            while said:
                count = min(size, listener.num_wanted)
                listener.receive(said[:count])
                said = said[count:]
    assert all(each.is_over and each.refusal is None for each in (dialler, acceptor))


@pytest.mark.parametrize("name", targets.TARGETS)
def test_what_is_really_said_passes_every_target(name):
    for seed in targets.SEEDS[name]():
        targets.TARGETS[name](seed)


@pytest.mark.parametrize("name", targets.TARGETS)
@given(data=st.data())
def test_any_bytes_pass_every_target(name, data):
    """Random ones, and real ones with a few bytes changed."""
    real = st.sampled_from(targets.SEEDS[name]())
    said = bytearray(data.draw(real | st.binary(max_size=300), label="said"))
    changes = st.lists(st.tuples(st.integers(0, 2**16), unsigned(8)), max_size=3)
    for position, value in data.draw(changes, label="changes"):
        if said:
            said[position % len(said)] = value
    targets.TARGETS[name](bytes(said))


@pytest.mark.parametrize("name", mutation.MUTATIONS)
@given(seed=st.integers(0, 2**32 - 1))
def test_nearly_valid_messages_pass_every_target(name, seed):
    """A value of a message replaced, repeated, dropped or moved."""
    chance = random.Random(seed)
    said = chance.choice(targets.SEEDS[name]())
    for _ in range(chance.randrange(1, 6)):
        said = mutation.MUTATIONS[name](said, chance)
    targets.TARGETS[name](said)
