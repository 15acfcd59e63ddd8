"""The wire format of control messages: each arrives as it was sent, and nothing else does."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.protocol.members import Member, ProgressEntry, Status
from gossipdp.protocol.messages import (
    Abort,
    Accept,
    AskLife,
    AskMembers,
    Busy,
    Cancel,
    Envelope,
    Epoch,
    ExchangeId,
    Free,
    Heartbeat,
    Members,
    Message,
    NewerEpoch,
    OfferTraining,
    Pass,
    Propose,
    ProtocolError,
    RequestState,
    RequestTraining,
    StateRefused,
    TellLife,
    decode,
    encode,
)

ID = ExchangeId(3, 1, 12)
MESSAGES: list[Message] = [
    Propose(ID, 0.75),
    Accept(ID, 0.75),
    Busy(ID),
    Free(),
    Pass(),
    Cancel(ID),
    Abort(ID, "NaN"),
    Heartbeat(),
    RequestState(1, 0),
    StateRefused(1, "poisoned"),
    NewerEpoch(Epoch(1, 1, 1)),
    RequestTraining(3),
    OfferTraining(3, 2**40),
    AskLife(3, 7),
    TellLife(3, 7, is_heard=True),
    AskMembers(2),
    Members(
        2,
        4,
        is_ending=False,
        members=(Member(4, 0, 9, Status.JOINING, "10.0.0.2", 4001),),
        progress=(ProgressEntry(0, 2**62, 64, 2),),
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip_with_news(message):
    envelope = Envelope(
        message,
        (Member(0, 2, 2**62, Status.DONE, "10.0.0.1", 4000, "10.0.0.9", 9400),),
        (ProgressEntry(0, 2**62, 64, 2),),
    )
    assert decode(encode(envelope)) == envelope


@pytest.mark.parametrize("alpha_tilde", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_gain_must_be_a_positive_number(alpha_tilde):
    with pytest.raises(ProtocolError):
        decode(encode(Envelope(Propose(ID, alpha_tilde))))


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


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_protocol_error(data):
    try:
        decode(data)
    except ProtocolError:
        pass


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_decode_or_raise_protocol_error(message, data):
    encoded = bytearray(encode(Envelope(message)))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    try:
        decode(encoded[:cut])
    except ProtocolError:
        pass
