"""The handshake as a pure machine: agreement, refusals, replay, reflection, garbage."""

import struct
from collections.abc import Callable

import msgspec
import pytest
from links import feed, identity

from gossipdp.links import handshake
from gossipdp.links.handshake import MAX_TEXT, VERSION, Handshake, HandshakeError, Identity, Refusal

SECRET = b"a secret"
FIELDS = ("run_id", "model", "method", "graph", "comm_rate", "wire_format", "timeout")


def prefix(length: int) -> bytes:
    return struct.pack("<4sBBH", b"GDPH", *VERSION, length)


def message_of(content: list[object]) -> bytes:
    body = msgspec.msgpack.encode(content)
    return prefix(len(body)) + body


def converse(dialler: Handshake, acceptor: Handshake) -> list[bytes]:
    """Run both to the end; return what was said, in order."""
    said = []
    for speaker, listener in 3 * [(dialler, acceptor), (acceptor, dialler)]:
        if data := speaker.take_output():
            said.append(data)
            assert feed(listener, data) == b""
    return said


def pair(
    mine: Identity | None = None,
    theirs: Identity | None = None,
    *,
    wanted: int | None = 1,
    secrets: tuple[bytes | None, bytes | None] = (SECRET, SECRET),
    admit: Callable[[Identity], Refusal | None] = lambda peer: None,
) -> tuple[Handshake, Handshake]:
    dialler = Handshake(mine or identity(0), secrets[0], dialler=True, wanted_rank=wanted)
    acceptor = Handshake(theirs or identity(1), secrets[1], dialler=False, admit=admit)
    return dialler, acceptor


def test_inside_tls_the_hello_is_plain_data_and_nothing_else_is_taken_for_it():
    """A worker that wants proofs and one that needs none make no link, either way round."""
    for secrets in ((SECRET, None), (None, SECRET)):
        dialler, acceptor = pair(secrets=secrets)
        with pytest.raises(HandshakeError, match="came where"):
            converse(dialler, acceptor)


@pytest.mark.parametrize("rank", [0, 2**30], ids=["worker", "visitor"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("secrets", [(SECRET, SECRET), (None, None)], ids=["plain", "in TLS"])
def test_the_first_difference_is_named_with_both_values(field, secrets, rank):
    """A visitor may not know the graph yet: the next difference is its first."""
    mine = identity(rank, **dict.fromkeys(FIELDS[FIELDS.index(field) :], "mine"))
    dialler, acceptor = pair(mine=mine, secrets=secrets)
    converse(dialler, acceptor)
    field = "comm_rate" if rank and field == "graph" else field
    theirs = getattr(identity(1), field)
    assert dialler.refusal == acceptor.refusal == Refusal(field, theirs, "mine")
    assert mine.disagreement(identity(1)) == Refusal(field, "mine", theirs), "seen from there"
    text = str(dialler.refusal)
    assert f"differs: the other worker has {theirs!r}, this one 'mine'" in text
    assert ("Network(timeout_s=)" in text) == (field == "timeout")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"secrets": (b"another", SECRET)}, "the secrets differ; give all workers"),
        ({"wanted": 2}, "the worker at that address has rank 1, not 2"),
        ({"mine": identity(1), "wanted": None}, "both workers claim rank 1; every worker"),
        (
            {
                "mine": identity(0, model="names=11 shapes=22 dtypes=33 optimizers=44"),
                "theirs": identity(1, model="names=11 shapes=99 dtypes=33 optimizers=88"),
            },
            "model (shapes, optimizers) differs: the other worker has '99 88', this one '22 44'",
        ),
        (
            {"mine": identity(0, model="base=3"), "theirs": identity(1, model="base=2")},
            "the frozen bases differ",
        ),
        (
            {"admit": lambda peer: Refusal("incarnation", "3", "0")},
            "a newer incarnation (3) of this worker is connected; this one is 0",
        ),
    ],
)
def test_what_does_not_fit_is_said_alike_on_both_sides(options, text):
    dialler, acceptor = pair(**options)
    converse(dialler, acceptor)
    assert dialler.refusal == acceptor.refusal
    assert str(dialler.refusal).startswith(text)


def test_an_acceptor_says_nothing_of_itself_before_the_proof():
    dialler, acceptor = pair(theirs=identity(1, host="127.0.0.1"))
    feed(acceptor, dialler.take_output())
    said = acceptor.take_output()
    assert not any(own.encode() in said for own in ("model", "ring of 4", "float32", "127.0.0.1"))
    with pytest.raises(HandshakeError, match="starts with"):
        feed(acceptor, b"\x16\x03" + bytes(6))  # TLS comes first or not at all


@pytest.mark.parametrize("field", ["incarnation", "own_rank", "model"])
def test_a_stranger_at_a_worker_s_address_cannot_say_that_another_has_its_place(field):
    """It took the port of a dead worker; on such a refusal a worker may end, or wait."""
    for has_proved in (False, True):
        dialler, acceptor = pair()
        feed(acceptor, dialler.take_output())
        if has_proved:
            feed(dialler, acceptor.take_output())
        with pytest.raises(HandshakeError, match="without proof of the secret"):
            feed(dialler, message_of([5, field, "9", "0", b"x" * 32]))
        assert dialler.refusal is None


def test_what_a_refusal_says_reaches_no_terminal_raw():
    dialler, _ = pair()
    feed(dialler, message_of([5, "run_id", "\x07" + "x" * 3000, "a\nb\x1b[2J", b""]))
    assert dialler.refusal == Refusal("run_id", "?" + "x" * (MAX_TEXT - 1), "a?b?[2J")
    assert str(dialler.refusal).isprintable()


def test_replay_is_refused():
    """Neither end's recorded words serve again: the other end has drawn another nonce."""
    said = converse(*pair())
    dialler, acceptor = pair()
    for machine, words in ((acceptor, said[0] + said[2]), (dialler, said[1] + said[3])):
        feed(machine, words)
        assert machine.refusal == Refusal("secret", "", "")


def test_reflection_is_refused():
    """A dialler's proof, sent back to that worker as if another one dialled, proves nothing."""
    dialler, _ = pair(wanted=None)
    reflected_to = Handshake(identity(0), SECRET, dialler=False)
    feed(reflected_to, dialler.take_output())
    feed(dialler, reflected_to.take_output())
    feed(reflected_to, dialler.take_output())
    assert reflected_to.refusal.field == "own_rank", "its rank gives it away"
    # And an acceptor's proof made of the dialler's own does not pass for a welcome.
    dialler, acceptor = pair()
    feed(acceptor, dialler.take_output())
    feed(dialler, acceptor.take_output())
    own_proof = msgspec.msgpack.decode(dialler.take_output()[8:])[1]
    feed(dialler, message_of([4, msgspec.to_builtins(identity(1)), own_proof]))
    assert dialler.refusal == Refusal("secret", "", "")


@pytest.mark.parametrize("place", [4, 5])
def test_another_version_of_gossipdp_is_told_to_both(place):
    other = [*VERSION[: place - 4], 9, *VERSION[place - 3 :]]
    ours, theirs = (".".join(map(str, version)) for version in (VERSION, other))
    dialler, acceptor = pair()
    data = bytearray(dialler.take_output())
    data[place] = 9
    feed(acceptor, bytes(data))
    assert acceptor.refusal == Refusal("gossipdp_version", ours, theirs)
    reply = bytearray(acceptor.take_output())
    reply[place] = 9  # as an acceptor of that version would answer
    feed(dialler, bytes(reply))
    assert dialler.refusal == Refusal("gossipdp_version", theirs, ours)
    assert str(dialler.refusal).startswith(f"the other worker runs gossipdp {theirs}, and this one")


@pytest.mark.parametrize(
    ("end", "data", "fault"),
    [
        (0, b"\x16\x03" + bytes(6), r"starts with b'\\x16"),  # a dialler hears TLS
        (1, b"GET / HTTP/1.1\r\n", "starts with b'GET '"),
        (1, prefix(0), "of 0 bytes"),
        (1, prefix(handshake.MAX_MESSAGE_BYTES + 1), "of 4097 bytes"),
        (1, prefix(1) + b"\xff", "malformed"),
        (1, prefix(handshake.MAX_MESSAGE_BYTES) + b"\x93\x01\x02" + bytes(4093), "malformed"),
        (1, message_of([1, msgspec.to_builtins(identity(0)), None, b"short"]), "nonce of 5 bytes"),
    ],
)
def test_garbage_is_one_error(end, data, fault):
    with pytest.raises(HandshakeError, match=fault):
        feed(pair()[end], data)


def test_an_empty_secret_is_refused():
    with pytest.raises(ValueError, match="secret is empty"):
        Handshake(identity(0), b"", dialler=True)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("rank", 2**20 - 1, -1),
        ("rank", 2**30, 2**20),  # a visitor's; and neither a worker's nor a visitor's
        ("rank", 2**31 - 1, 2**31),
        ("incarnation", 2**31 - 1, 2**31),
        ("process_id", 2**63 - 1, 2**63),
        ("port", 65535, 65536),
        ("model", "x" * MAX_TEXT, "x" * (MAX_TEXT + 1)),
        ("run_id", "an id", "\x1b[2J"),
        ("host", "::1", "a\nb"),
    ],
)
def test_a_hello_keeps_to_the_bounds_of_membership(field, good, bad):
    said = [*msgspec.to_builtins(identity(0))]
    for value in (good, bad):
        said[Identity.__struct_fields__.index(field)] = value
        acceptor, hello = pair(secrets=(None, None))[1], message_of([1, said, None, bytes(32)])
        if value is good:
            feed(acceptor, hello)
            assert acceptor.is_over
        else:
            with pytest.raises(HandshakeError, match="malformed") as raised:
                feed(acceptor, hello)
            assert str(raised.value).isprintable()
