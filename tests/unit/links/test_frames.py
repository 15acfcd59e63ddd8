"""Frame headers: each wrong field is named. See tests/property/test_link_parsers.py too."""

import pytest

from gossipdp.links.frames import (
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    ChunkKey,
    FrameError,
    FrameType,
    pack_header,
    pack_key,
    parse_header,
    run_tag,
)

TAG = run_tag("a run")


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"HTTP", "starts with"),
        (4, b"\x01", "version 1"),
        (5, b"\x00", "unknown frame type 0"),
        (5, b"\x1f", "unknown frame type 31"),
        (6, b"\x01", "CONTROL frame that names 0 of segment 1"),
        (48, b"\x40", "CONTROL frame that names 64 of segment 0"),
        (8, b"\xff", "another run"),
        (16, b"\x06", "frame 6 came where 5 was due"),
        (20, b"\x00", "of 0 bytes"),
        (23, b"\xff", "are allowed"),
        (28, b"\x01", "control frame with a chunk key"),
        (56, b"more", "a header has 56 bytes, not 60"),
    ],
)
def test_each_wrong_field_is_named(offset, replacement, message):
    data = bytearray(pack_header(TAG, FrameType.CONTROL, 5, 100))
    data[offset : offset + len(replacement)] = replacement
    if message == "of 0 bytes":
        data[20:24] = bytes(4)
    with pytest.raises(FrameError, match=message):
        parse_header(data, TAG, 5)


def test_lengths_are_bounded_per_type():
    with pytest.raises(FrameError, match="CONTROL"):
        pack_header(TAG, FrameType.CONTROL, 0, MAX_CONTROL_BYTES + 1)
    with pytest.raises(FrameError, match="STATE_CHUNK"):
        pack_header(
            TAG, FrameType.STATE_CHUNK, 0, MAX_CHUNK_BYTES + 1, pack_key(ChunkKey(0, 0, 0, 0))
        )
    with pytest.raises(FrameError, match="does not fit"):
        pack_key(ChunkKey(2**32, 0, 0, 0))
