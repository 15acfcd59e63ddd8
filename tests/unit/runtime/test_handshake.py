"""The handshake as a pure machine: agreement, refusals, replay, reflection, garbage."""

import struct

import msgspec
import pytest

from gossipdp.runtime.handshake import (
    MAX_MESSAGE_BYTES,
    Handshake,
    HandshakeError,
    Stage,
)
from gossipdp.runtime.identity import AGREED_FIELDS, Identity, Refusal

SECRET = b"a secret"


def identity(rank: int, **changes: object) -> Identity:
    plain = Identity(
        rank=rank,
        incarnation=0,
        process_id=1000 + rank,
        run_id="run",
        model="model",
        method="a2cid2",
        graph="ring of 4",
        comm_rate="1.0",
        wire_format="float32",
        host="127.0.0.1",
        port=4000 + rank,
    )
    return msgspec.structs.replace(plain, **changes)


def feed(machine: Handshake, data: bytes) -> bytes:
    """Give ``machine`` bytes as it wants them; what it did not want comes back."""
    while data and machine.num_wanted:
        count = machine.num_wanted
        machine.receive(data[:count])
        data = data[count:]
    return data


def converse(dialler: Handshake, acceptor: Handshake, last_link: bytes = b"") -> list[bytes]:
    """Run both to the end; the acceptor welcomes whom it may. What was said, in order."""
    said = []
    while True:
        if dialler.stage is Stage.CHALLENGED:
            dialler.answer(last_link)
        if acceptor.stage is Stage.DECIDING:
            acceptor.welcome()
        outputs = [(dialler.take_output(), acceptor), (acceptor.take_output(), dialler)]
        if not any(data for data, _ in outputs):
            return said
        for data, receiver in outputs:
            if data:
                said.append(data)
                assert feed(receiver, data) == b""


def pair(
    mine: Identity | None = None,
    theirs: Identity | None = None,
    *,
    wanted: int | None = 1,
    secret: bytes = SECRET,
) -> tuple[Handshake, Handshake]:
    dialler = Handshake(mine or identity(0), secret, dialler=True, wanted_rank=wanted)
    acceptor = Handshake(theirs or identity(1), SECRET, dialler=False)
    return dialler, acceptor


@pytest.mark.parametrize("wanted", [1, None])
def test_both_learn_who_the_other_is(wanted: int | None) -> None:
    dialler, acceptor = pair(wanted=wanted)
    converse(dialler, acceptor, last_link=b"the last one")
    assert dialler.stage is acceptor.stage is Stage.DONE
    assert dialler.peer == identity(1)
    assert acceptor.peer == identity(0)
    assert acceptor.peer_last_link == b"the last one"
    assert dialler.link_id == acceptor.link_id


@pytest.mark.parametrize("field", AGREED_FIELDS)
def test_a_difference_is_named_with_both_values(field: str) -> None:
    dialler, acceptor = pair(mine=identity(0, **{field: "mine"}))
    converse(dialler, acceptor)
    theirs = getattr(identity(1), field)
    assert dialler.refusal == acceptor.refusal == Refusal(field, theirs, "mine")
    text = str(dialler.refusal)
    assert repr(theirs) in text
    assert "'mine'" in text


def test_wrong_secret_is_said_as_such_on_both_sides() -> None:
    dialler, acceptor = pair(secret=b"another")
    converse(dialler, acceptor)
    assert dialler.refusal is not None
    assert dialler.refusal == acceptor.refusal
    assert "secrets differ" in str(dialler.refusal)


def test_an_acceptor_that_only_pretends_to_know_the_secret_is_found_out() -> None:
    dialler = Handshake(identity(0), SECRET, dialler=True, wanted_rank=1)
    impostor = Handshake(identity(1), b"another", dialler=False)
    feed(impostor, dialler.take_output())
    feed(dialler, impostor.take_output())
    dialler.answer(b"")
    feed(dialler, _message([4, msgspec.to_builtins(identity(1)), b"x" * 32]))
    assert dialler.stage is Stage.REFUSED
    assert dialler.refusal == Refusal("secret", "", "")


def test_wrong_rank_at_that_address() -> None:
    dialler, acceptor = pair(wanted=2)
    converse(dialler, acceptor)
    assert str(dialler.refusal) == "the worker at that address has rank 1, not 2"


def test_dialling_oneself() -> None:
    dialler, acceptor = pair(mine=identity(1), wanted=None)
    converse(dialler, acceptor)
    assert "both workers claim rank 1" in str(dialler.refusal)


def test_the_acceptor_may_refuse_for_a_reason_of_its_own() -> None:
    dialler, acceptor = pair()
    feed(acceptor, dialler.take_output())
    feed(dialler, acceptor.take_output())
    dialler.answer(b"")
    feed(acceptor, dialler.take_output())
    acceptor.refuse(Refusal("incarnation", "3", "0"))
    feed(dialler, acceptor.take_output())
    assert "newer incarnation (3)" in str(dialler.refusal)


def test_a_forged_refusal_is_not_believed() -> None:
    dialler, acceptor = pair()
    feed(acceptor, dialler.take_output())
    feed(dialler, acceptor.take_output())
    dialler.answer(b"")
    with pytest.raises(HandshakeError, match="without proof"):
        feed(dialler, _message([5, "model", "evil", "model", b""]))


def test_replay_is_refused() -> None:
    said = converse(*pair())
    replayed_to = Handshake(identity(1), SECRET, dialler=False)
    feed(replayed_to, said[0])
    feed(replayed_to, said[2])
    assert replayed_to.refusal == Refusal("secret", "", "")


def test_reflection_is_refused() -> None:
    """A dialler's proof, sent back to that worker as if another one dialled, proves nothing."""
    dialler, _ = pair(wanted=None)
    opening = dialler.take_output()
    reflected_to = Handshake(identity(0), SECRET, dialler=False)
    feed(reflected_to, opening)
    feed(dialler, reflected_to.take_output())
    dialler.answer(b"")
    feed(reflected_to, dialler.take_output())
    # It knows the secret, of course; it is the rank that gives it away.
    assert reflected_to.refusal is not None
    assert reflected_to.refusal.field == "own_rank"
    # And an acceptor's proof made of the dialler's own does not pass for a welcome.
    dialler, acceptor = pair()
    feed(acceptor, dialler.take_output())
    feed(dialler, acceptor.take_output())
    dialler.answer(b"")
    answer = dialler.take_output()
    own_proof = msgspec.msgpack.decode(answer[7:])[4]
    feed(dialler, _message([4, msgspec.to_builtins(identity(1)), own_proof]))
    assert dialler.refusal == Refusal("secret", "", "")


def test_the_direction_is_part_of_every_proof() -> None:
    dialler, _ = pair()
    assert dialler._prove("dialler", "the same") != dialler._prove("acceptor", "the same")


def test_another_protocol_version_is_told_to_both() -> None:
    dialler, acceptor = pair()
    data = bytearray(dialler.take_output())
    data[4] = 9
    feed(acceptor, bytes(data))
    assert acceptor.refusal == Refusal("protocol_version", "1", "9")
    reply = bytearray(acceptor.take_output())
    reply[4] = 9  # as an acceptor of version 9 would answer
    feed(dialler, bytes(reply))
    assert dialler.refusal == Refusal("protocol_version", "9", "1")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        struct.pack("<4sBH", b"GDPH", 1, 0),
        struct.pack("<4sBH", b"GDPH", 1, MAX_MESSAGE_BYTES + 1),
        struct.pack("<4sBH", b"GDPH", 1, 3) + b"\xff\xff\xff",
        struct.pack("<4sBH", b"GDPH", 1, 4) + msgspec.msgpack.encode([1, 2, 3]),
    ],
)
def test_garbage_is_one_error(data: bytes) -> None:
    acceptor = Handshake(identity(1), SECRET, dialler=False)
    with pytest.raises(HandshakeError):
        feed(acceptor, data)


def test_a_message_out_of_turn() -> None:
    acceptor = Handshake(identity(1), SECRET, dialler=False)
    with pytest.raises(HandshakeError, match="Challenge came at stage"):
        feed(acceptor, _message([2, bytes(32)]))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="secret is empty"):
        Handshake(identity(0), b"", dialler=True)
    with pytest.raises(ValueError, match="longer than"):
        Identity(0, 0, 0, "r" * 201, "", "", "", "", "")
    with pytest.raises(ValueError, match="rank -1"):
        Identity(-1, 0, 0, "r", "", "", "", "", "")


def _message(content: list[object]) -> bytes:
    body = msgspec.msgpack.encode(content)
    return struct.pack("<4sBH", b"GDPH", 1, len(body)) + body
