"""Frames: the units that travel on an established link.

A frame is a fixed header of 56 bytes, little-endian, followed by ``length`` bytes of payload::

    magic 4s   version u8   type u8   segment u16   run tag 8s   sequence u32   length u32
    read u32   chunk key: initiator u32   incarnation u32   counter u64   index u32   offset u64

The chunk key names the exchange (or the epoch of a consolidation) that a chunk belongs to and its
place in it; in other frames it is zero. The sequence counts the frames of one direction of one
link from 0, modulo 2**32, so that a lost, repeated or reordered frame cannot pass.

If ``segment`` is not 0, no payload follows: the ``length`` bytes lie at ``offset`` of that segment
of the sender's memory (:mod:`.shared_memory`), to be read in place. ``read`` says, in every frame,
how many such chunks of the other direction have been read on this link, modulo 2**32; an
ACKNOWLEDGEMENT says nothing else. SEGMENT_READY says that the receiver's ``segment`` is mapped.
SEGMENT_OFFER says where its sender's segment is.

:func:`parse_header` checks all of it, with the bound on ``length``, before the caller allocates
or reads anything else.
"""

import dataclasses
import enum
import hashlib
import struct
from typing import NamedTuple

MAGIC = b"GDP1"
VERSION = 3
RUN_TAG_BYTES = 8
MAX_CONTROL_BYTES = 1 << 20
# A bound, not a size: chunks are about 1 MB, and the receiver checks each against its own layout.
MAX_CHUNK_BYTES = 64 << 20
SEQUENCE_MODULUS = 1 << 32
MAX_SEGMENT = (1 << 16) - 1
SEGMENT_OFFER_BYTES = 32
# A chunk begins at a multiple of this in its segment, so that it can be read as any numbers.
SEGMENT_ALIGNMENT_BYTES = 64

_KEY = struct.Struct("<IIQI")
_HEADER = struct.Struct("<4sBBH8sIII20sQ")
HEADER_BYTES = _HEADER.size


class FrameError(ValueError):
    """The bytes that arrived are not the frame that had to come next on this link."""


class FrameType(enum.IntEnum):
    """The kinds of frames. Those from 64 on stay between the two transports of a link."""

    CONTROL = 1
    EXCHANGE_CHUNK = 2
    PARTIAL_CHUNK = 3
    RESULT_CHUNK = 4
    STATE_CHUNK = 5
    EXCHANGE_STEPS = 7
    EXCHANGE_VERDICT = 8
    EXCHANGE_REPEAT = 9
    SEGMENT_READY = 64
    ACKNOWLEDGEMENT = 65
    SEGMENT_OFFER = 66


# The part of a worker that each chunk belongs to: exchanges, sums over all workers, and the state
# that a starting worker is given.
EXCHANGE_TYPES = (
    FrameType.EXCHANGE_STEPS,
    FrameType.EXCHANGE_CHUNK,
    FrameType.EXCHANGE_VERDICT,
    FrameType.EXCHANGE_REPEAT,
)
SUM_TYPES = (FrameType.PARTIAL_CHUNK, FrameType.RESULT_CHUNK)
# Chunks whose payload lies in a slot of an exchange, and so may be read in place.
SHARED_TYPES = (FrameType.EXCHANGE_CHUNK, FrameType.EXCHANGE_REPEAT)
# Frames that are a header and nothing else.
BARE_TYPES = (FrameType.SEGMENT_READY, FrameType.ACKNOWLEDGEMENT)
# Frames that are no chunks.
KEYLESS_TYPES = (FrameType.CONTROL, FrameType.SEGMENT_OFFER, *BARE_TYPES)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkKey:
    """The exchange of a chunk (``initiator``, ``incarnation``, ``counter``), and its place."""

    initiator: int
    incarnation: int
    counter: int
    index: int

    @property
    def id(self) -> tuple[int, int, int]:
        """The exchange that the chunk belongs to."""
        return self.initiator, self.incarnation, self.counter


class Header(NamedTuple):
    """A checked frame header; ``key`` is None exactly for frames that are not chunks."""

    frame_type: FrameType
    length: int
    key: ChunkKey | None
    num_read: int = 0
    segment: int = 0
    offset: int = 0


_TYPES = {int(frame_type): frame_type for frame_type in FrameType}
_NO_KEY = bytes(_KEY.size)
_LENGTHS = {
    FrameType.CONTROL: (1, MAX_CONTROL_BYTES),
    FrameType.SEGMENT_OFFER: (SEGMENT_OFFER_BYTES, SEGMENT_OFFER_BYTES),
    **dict.fromkeys(BARE_TYPES, (0, 0)),
}


def run_tag(run_id: str) -> bytes:
    """Return eight bytes that stand for ``run_id`` in every frame."""
    return hashlib.sha256(run_id.encode()).digest()[:RUN_TAG_BYTES]


def check_length(frame_type: FrameType, length: int) -> None:
    """Raise :class:`FrameError` unless a frame of this type may carry ``length`` bytes."""
    least, most = _LENGTHS.get(frame_type, (1, MAX_CHUNK_BYTES))
    if not least <= length <= most:
        text = f"{least} to {most} are allowed"
        raise FrameError(f"{frame_type.name} frame of {length} bytes; {text}")


def pack_key(key: ChunkKey) -> bytes:
    """Return the key as bytes of a header; raise FrameError if a number does not fit."""
    try:
        return _KEY.pack(*key.id, key.index)
    except struct.error as error:
        raise FrameError(f"{key} does not fit a frame header: {error}") from None


def pack_header(
    tag: bytes,
    frame_type: FrameType,
    sequence: int,
    length: int,
    packed_key: bytes | None = None,
    *,
    num_read: int = 0,
    segment: int = 0,
    offset: int = 0,
) -> bytes:
    """Return a header of ``HEADER_BYTES``; ``packed_key`` is None for frames that are no chunks."""
    assert len(tag) == RUN_TAG_BYTES
    assert (frame_type in KEYLESS_TYPES) == (packed_key is None)
    check_length(frame_type, length)
    _check_place(frame_type, segment, offset)
    sequence, num_read = sequence % SEQUENCE_MODULUS, num_read % SEQUENCE_MODULUS
    front = (MAGIC, VERSION, frame_type, segment, tag, sequence, length, num_read)
    return _HEADER.pack(*front, packed_key or _NO_KEY, offset)


def parse_header(data: bytes | bytearray | memoryview, tag: bytes, sequence: int) -> Header:
    """Check and return the header that ``data`` (``HEADER_BYTES`` bytes) holds.

    ``tag`` is this run's, ``sequence`` the number that the next frame of this direction must have.

    Raises:
        FrameError: names the first field that is wrong, its value and the right one.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, number, segment, its_tag, its_sequence, length, num_read, packed_key, offset = (
        _HEADER.unpack(data)
    )
    if magic != MAGIC:
        raise FrameError(f"frame starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"frame version {version}; this worker speaks {VERSION}")
    frame_type = _TYPES.get(number)
    if frame_type is None:
        raise FrameError(f"unknown frame type {number}")
    if its_tag != tag:
        raise FrameError(f"frame of another run ({its_tag.hex()}, ours is {tag.hex()})")
    if its_sequence != sequence % SEQUENCE_MODULUS:
        raise FrameError(f"frame {its_sequence} came where {sequence % SEQUENCE_MODULUS} was due")
    check_length(frame_type, length)
    _check_place(frame_type, segment, offset)
    key = None
    if frame_type not in KEYLESS_TYPES:
        key = ChunkKey(*_KEY.unpack(packed_key))
    elif packed_key != _NO_KEY:
        raise FrameError(f"{frame_type.name.lower().replace('_', ' ')} frame with a chunk key")
    return Header(frame_type, length, key, num_read, segment, offset)


def _check_place(frame_type: FrameType, segment: int, offset: int) -> None:
    """Raise FrameError unless a frame of this type may name this place.

    Only chunks of SHARED_TYPES lie in a segment, aligned; SEGMENT_READY names one besides.
    """
    if frame_type in SHARED_TYPES:
        is_good = offset % SEGMENT_ALIGNMENT_BYTES == 0 and (segment != 0 or offset == 0)
    else:
        is_good = offset == 0 and (segment != 0) == (frame_type is FrameType.SEGMENT_READY)
    if not is_good:
        raise FrameError(f"{frame_type.name} frame that names {offset} of segment {segment}")
