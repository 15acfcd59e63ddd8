"""Frame headers: each wrong field is named. See tests/property/test_link_parsers.py too."""

import pytest

from gossipdp.links import frames

TAG = frames.run_tag("a run")


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"HTTP", "starts with b'HTTP', not b'GDP1'"),
        (4, b"\x01", "frame version 1; this worker speaks 3"),
        (5, b"\x00", "unknown frame type 0"),
        (5, b"\x40", "SEGMENT_READY frame of 100 bytes; 0 to 0 are"),
        (5, b"\x42", "SEGMENT_OFFER frame of 100 bytes; 32 to 32 are"),
        (6, b"\x01", "CONTROL frame that names 0 of segment 1"),
        (48, b"\x40", "CONTROL frame that names 64 of segment 0"),
        (8, b"\xff", "another run"),
        (16, b"\x06", "frame 6 came where 5 was due"),
        (20, bytes(4), "of 0 bytes"),
        (23, b"\xff", "are allowed"),
        (28, b"\x01", "control frame with a chunk key"),
        (56, b"more", "a header has 56 bytes, not 60"),
    ],
)
def test_each_wrong_field_is_named(offset, replacement, message):
    data = bytearray(frames.pack_header(TAG, frames.FrameType.CONTROL, 5, 100))
    data[offset : offset + len(replacement)] = replacement
    with pytest.raises(frames.FrameError, match=message):
        frames.parse_header(data, TAG, 5)


def test_lengths_are_bounded_per_type():
    key = frames.pack_key(frames.ChunkKey(0, 0, 0, 0))
    chunks = [(number, 64 << 20, key) for number in (2, 3, 4, 5, 7, 8, 9)]
    for number, most, packed in ((1, 1 << 20, None), *chunks):
        kind = frames.FrameType(number)  # peers read the number
        frames.pack_header(TAG, kind, 0, most, packed)
        with pytest.raises(frames.FrameError, match=kind.name):
            frames.pack_header(TAG, kind, 0, most + 1, packed)
    with pytest.raises(frames.FrameError, match="does not fit"):
        frames.pack_key(frames.ChunkKey(2**32, 0, 0, 0))
