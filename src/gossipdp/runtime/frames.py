"""Frames: what travels on an established link.

A frame is a fixed header of 44 bytes, little-endian, followed by ``length`` bytes of payload::

    magic 4s   version u8   type u8   flags u16   run tag 8s   sequence u32   length u32
    chunk key: initiator u32   incarnation u32   counter u64   index u32

The chunk key names the exchange (or the epoch of a consolidation) that a chunk belongs to and its
place in it; in control frames it is zero. The sequence counts the frames of one direction of one
link from 0, modulo 2**32, so that a lost, repeated or reordered frame cannot pass.

:func:`parse_header` checks all of it, with the bound on ``length``, before the caller allocates
or reads anything else.
"""

import dataclasses
import enum
import hashlib
import struct
from typing import NamedTuple

MAGIC = b"GDP1"
VERSION = 1
RUN_TAG_BYTES = 8
MAX_CONTROL_BYTES = 1 << 20
# A bound, not a size: chunks are about 1 MB, and the receiver checks each against its own layout.
MAX_CHUNK_BYTES = 64 << 20
SEQUENCE_MODULUS = 1 << 32

_PREFIX = struct.Struct("<4sBBH8sII")
_KEY = struct.Struct("<IIQI")
HEADER_BYTES = _PREFIX.size + _KEY.size


class FrameError(ValueError):
    """What arrived is not the frame that had to come next on this link."""


class FrameType(enum.IntEnum):
    """What a frame carries."""

    CONTROL = 1
    EXCHANGE_CHUNK = 2
    PARTIAL_CHUNK = 3
    RESULT_CHUNK = 4
    STATE_CHUNK = 5
    TRAINING_CHUNK = 6


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkKey:
    """Which exchange (``initiator``, ``incarnation``, ``counter``), and which chunk of it.

    ``counter`` fits 64 bits, the others 32.
    """

    initiator: int
    incarnation: int
    counter: int
    index: int

    @property
    def id(self) -> tuple[int, int, int]:
        """The exchange that the chunk belongs to."""
        return self.initiator, self.incarnation, self.counter


class Header(NamedTuple):
    """A checked frame header. ``key`` is None exactly for control frames."""

    frame_type: FrameType
    sequence: int
    length: int
    key: ChunkKey | None


_TYPES = {int(frame_type): frame_type for frame_type in FrameType}
_NO_KEY = bytes(_KEY.size)


def run_tag(run_id: str) -> bytes:
    """Eight bytes that stand for ``run_id`` in every frame."""
    return hashlib.sha256(run_id.encode()).digest()[:RUN_TAG_BYTES]


def check_length(frame_type: FrameType, length: int) -> None:
    """Raise :class:`FrameError` unless a frame of this type may carry ``length`` bytes."""
    bound = MAX_CONTROL_BYTES if frame_type is FrameType.CONTROL else MAX_CHUNK_BYTES
    if not 0 < length <= bound:
        raise FrameError(f"{frame_type.name} frame of {length} bytes; 1 to {bound} are allowed")


def pack_key(key: ChunkKey) -> bytes:
    """The key as it stands in a header; raises FrameError where a number does not fit."""
    try:
        return _KEY.pack(*key.id, key.index)
    except struct.error as error:
        raise FrameError(f"{key} does not fit a frame header: {error}") from None


def pack_header(
    tag: bytes, frame_type: FrameType, sequence: int, length: int, packed_key: bytes | None = None
) -> bytes:
    """A header of ``HEADER_BYTES`` bytes.

    ``tag`` from :func:`run_tag`; ``packed_key`` from :func:`pack_key`, None exactly for control
    frames.
    """
    assert len(tag) == RUN_TAG_BYTES
    assert (frame_type is FrameType.CONTROL) == (packed_key is None)
    check_length(frame_type, length)
    prefix = _PREFIX.pack(MAGIC, VERSION, frame_type, 0, tag, sequence % SEQUENCE_MODULUS, length)
    return prefix + (packed_key or _NO_KEY)


def parse_header(data: bytes | bytearray | memoryview, tag: bytes, sequence: int) -> Header:
    """Check the header that ``data`` (``HEADER_BYTES`` bytes) holds.

    ``tag`` is this run's, ``sequence`` the number that the next frame of this direction must have.

    Raises:
        FrameError: Naming the first field that is wrong, what it is and what it should be.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, number, flags, its_tag, its_sequence, length = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"frame starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"frame version {version}; this worker speaks {VERSION}")
    frame_type = _TYPES.get(number)
    if frame_type is None:
        raise FrameError(f"unknown frame type {number}")
    if flags != 0:
        raise FrameError(f"unknown frame flags {flags:#06x}")
    if its_tag != tag:
        raise FrameError(f"frame of another run ({its_tag.hex()}, ours is {tag.hex()})")
    if its_sequence != sequence % SEQUENCE_MODULUS:
        raise FrameError(f"frame {its_sequence} came where {sequence % SEQUENCE_MODULUS} was due")
    check_length(frame_type, length)
    if frame_type is not FrameType.CONTROL:
        return Header(
            frame_type, its_sequence, length, ChunkKey(*_KEY.unpack_from(data, _PREFIX.size))
        )
    if bytes(data[_PREFIX.size :]) != _NO_KEY:
        raise FrameError("control frame with a chunk key")
    return Header(frame_type, its_sequence, length, None)
