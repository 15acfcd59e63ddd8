"""The wire format of control messages: each arrives as it was sent, and nothing else does."""

import math

import msgspec
import pytest

from gossipdp.protocol.messages import ProtocolError, decode


@pytest.mark.parametrize(
    "value",
    [
        [["Nonsense"], [], []],
        [["Busy", [1, 2, -3]], [], []],
        [["Busy", [2**20, 2, 3]], [], []],
        [["Busy", [1, 2**31, 3]], [], []],
        [["Busy", [1, 2, 2**62 + 1]], [], []],
        [["NewerEpoch", [2**62 + 1, 1, 1]], [], []],
        [["NewerEpoch", [1, 1, 2**32]], [], []],
        [["Distance", [1, 1, 1], -1e-300], [], []],
        [["Distance", [1, 1, 1], 1.1e300], [], []],
        [["Distance", [1, 1, 1], math.nan], [], []],
        [["Free"], [[rank, 0, 0] for rank in range(257)], []],
        [["Free"], [], [[0, rank, 1, 1] for rank in range(257)]],
        [["Free"], [], [[0, 1, 1, 2**53 + 1]]],
        [["Free", 1], [], []],
        [["Abort", [1, 2, 3], "x" * 201], [], []],
        [["Propose", [3, 1, 12], math.nan], [], []],
        [["Propose", [3, 1, 12], 1.1e9], [], []],
        [["Propose", [3, 1, 12], 0.49], [], []],
        [["Propose", [3, 1, 12], 0.5, [1] * 65], [], []],
        [["TellAverage", [1, 1, 1], 2**15 + 1], [], []],
        [["BeginEpoch", [1, 0, 7], [], None], [], []],
        [["BeginEpoch", [1, 0, 7], [[1, 1], [0, 1]], None], [], []],
        [["BeginEpoch", [1, 0, 7], [[0, 1], [0, 1], [1, 1]], None], [], []],
        [["BeginEpoch", [1, 0, 7], [[1, 1], [2, 1]], None], [], []],
    ],
)
def test_other_types_and_values_out_of_bounds_are_refused(value):
    with pytest.raises(ProtocolError, match="malformed"):
        decode(msgspec.msgpack.encode(value))
