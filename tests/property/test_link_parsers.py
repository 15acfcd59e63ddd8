"""Parsers of what strangers send: any bytes give a value or the one error, never anything else.

The targets of ``make fuzz`` run here too, on a few inputs that are nearly valid.
"""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.links.frames import (
    KEYLESS_TYPES,
    MAX_CHUNK_BYTES,
    ChunkKey,
    FrameType,
    pack_header,
    pack_key,
    parse_header,
    run_tag,
)
from gossipdp.links.handshake import Handshake, HandshakeError, Identity, Stage

FUZZ = Path(__file__).parents[1] / "fuzz"
TAG = run_tag("run")
SECRET = b"secret"


def identity(rank: int) -> Identity:
    return Identity(rank, 0, rank, "run", "model", "gossip", "ring", "1.0", "float32")


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


keys = st.builds(ChunkKey, unsigned(32), unsigned(32), unsigned(64), unsigned(32))
chunk_types = st.sampled_from([kind for kind in FrameType if kind not in KEYLESS_TYPES])


@given(chunk_types, unsigned(40), st.integers(1, MAX_CHUNK_BYTES), keys, unsigned(40))
def test_headers_round_trip(frame_type, sequence, length, key, num_read):
    data = pack_header(TAG, frame_type, sequence, length, pack_key(key), num_read=num_read)
    header = parse_header(data, TAG, sequence)
    assert (header.frame_type, header.length, header.key) == (frame_type, length, key)
    assert header.num_read == num_read % 2**32
    assert (header.segment, header.offset) == (0, 0)


@given(st.integers(1, MAX_CHUNK_BYTES), keys, st.integers(1, 2**16 - 1), unsigned(58))
def test_headers_of_chunks_read_in_place_round_trip(length, key, segment, place):
    offset = 64 * place
    data = pack_header(
        TAG, FrameType.EXCHANGE_CHUNK, 0, length, pack_key(key), segment=segment, offset=offset
    )
    header = parse_header(data, TAG, 0)
    assert (header.length, header.key) == (length, key)
    assert (header.segment, header.offset) == (segment, offset)


def take(machine: Handshake, data: bytes) -> None:
    while data and machine.num_wanted:
        assert 0 < machine.num_wanted <= 4096
        count = machine.num_wanted
        machine.receive(data[:count])
        data = data[count:]


@given(st.data())
def test_a_changed_handshake_never_opens_a_link(data):
    """Whatever byte of whatever message changes on the way: never a link between others, or of
    another run, or without the proofs of both.
    """
    dialler = Handshake(identity(0), SECRET, dialler=True, wanted_rank=1)
    acceptor = Handshake(identity(1), SECRET, dialler=False)
    changed = data.draw(st.integers(0, 3), label="which message")
    number = 0
    try:
        while True:
            speaker, listener = (dialler, acceptor) if number % 2 == 0 else (acceptor, dialler)
            said = bytearray(speaker.take_output())
            if not said:
                break
            if number == changed:
                position = data.draw(st.integers(0, len(said) - 1), label="position")
                said[position] ^= data.draw(st.integers(1, 255), label="change")
            take(listener, bytes(said))
            number += 1
    except HandshakeError:
        pass
    if dialler.stage is Stage.DONE and acceptor.stage is Stage.DONE:
        assert changed in (0, 3)  # a hello or a welcome, of which the proofs cover ranks and run
        assert dialler.peer is not None
        assert acceptor.peer is not None
        assert (dialler.peer.rank, acceptor.peer.rank) == (1, 0)
        assert acceptor.peer.run_id == "run"


@given(st.integers(1, 60))
def test_bytes_may_come_in_any_pieces(size):
    dialler = Handshake(identity(0), SECRET, dialler=True, wanted_rank=1)
    acceptor = Handshake(identity(1), SECRET, dialler=False)
    for _ in range(4):
        for speaker, listener in ((dialler, acceptor), (acceptor, dialler)):
            said = speaker.take_output()
            while said:
                count = min(size, listener.num_wanted)
                listener.receive(said[:count])
                said = said[count:]
    assert dialler.stage is acceptor.stage is Stage.DONE


def module(name: str) -> ModuleType:
    """Import a file of tests/fuzz, which is on no import path."""
    spec = importlib.util.spec_from_file_location(f"fuzz_{name}", FUZZ / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


targets, mutation = module("targets"), module("mutation")


@pytest.mark.parametrize("name", targets.TARGETS)
def test_what_is_really_said_passes_every_target(name):
    for seed in targets.SEEDS[name]():
        targets.TARGETS[name](seed)


@pytest.mark.parametrize("name", targets.TARGETS)
@given(data=st.data())
def test_any_bytes_pass_every_target(name, data):
    """Random ones, and real ones with a few bytes changed."""
    said = bytearray(
        data.draw(st.sampled_from(targets.SEEDS[name]()) | st.binary(max_size=300), label="said")
    )
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
