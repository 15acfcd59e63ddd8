"""The wire format of control messages: each arrives as it was sent, and nothing else does."""

import math

import msgspec
import pytest

from gossipdp.protocol.messages import Envelope, ExchangeId, Propose, ProtocolError, decode, encode


@pytest.mark.parametrize("alpha_tilde", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_gain_must_be_a_positive_number(alpha_tilde):
    with pytest.raises(ProtocolError):
        decode(encode(Envelope(Propose(ExchangeId(3, 1, 12), alpha_tilde))))


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
        [["Abort", [1, 2, 3], "x" * 1001], [], []],
        [["Free"], [[0, 0, 0, 7, "host", 1]], []],
    ],
)
def test_other_types_are_refused(value):
    with pytest.raises(ProtocolError, match="malformed"):
        decode(msgspec.msgpack.encode(value))
