"""The wire format of control messages: each arrives as it was sent, and nothing else does."""

import math

import msgspec
import pytest

from gossipdp.protocol.messages import ProtocolError, decode


@pytest.mark.parametrize(
    "value",
    [
        None,
        [["Nonsense"], [], []],
        [["Busy"], [], []],
        [["Busy", [1, 2, -3]], [], []],
        [["Busy", [2**20, 2, 3]], [], []],
        [["Busy", [1, 2**31, 3]], [], []],
        [["Busy", [1, 2, 2**62 + 1]], [], []],
        [["NewerEpoch", [2**62 + 1, 1, 1]], [], []],
        [["Distance", [1, 1, 1], math.inf], [], []],
        [["Distance", [1, 1, 1], math.nan], [], []],
        [["Free"], [[rank, 0, 0] for rank in range(257)], []],
        [["Free"], [], [[0, rank, 1, 1] for rank in range(257)]],
        [["Free", 1], [], []],
        [["Abort", [1, 2, 3], "x" * 201], [], []],
        [["Free"], [[0, 0, 0, 7, "host", 1]], []],
        [["Propose", [3, 1, 12], math.nan], [], []],
        [["Propose", [3, 1, 12], math.inf], [], []],
        [["Propose", [3, 1, 12], -math.inf], [], []],
        [["Propose", [3, 1, 12], 0.0], [], []],
        [["Propose", [3, 1, 12], -1.0], [], []],
        [["BeginEpoch", [1, 0, 7], [], None], [], []],
        [["BeginEpoch", [1, 0, 7], [[1, 1], [0, 1]], None], [], []],
        [["BeginEpoch", [1, 0, 7], [[0, 1], [0, 1], [1, 1]], None], [], []],
        [["BeginEpoch", [1, 0, 7], [[1, 1], [2, 1]], None], [], []],
    ],
)
def test_other_types_and_values_out_of_bounds_are_refused(value):
    with pytest.raises(ProtocolError, match="malformed"):
        decode(msgspec.msgpack.encode(value))
