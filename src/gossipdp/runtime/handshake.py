"""The mutual handshake that opens a link: a pure state machine, bytes in and bytes out.

    dialler                                   acceptor
      Open(run id, nonce_d)             →                       run id is ours?
                                        ←       Challenge(nonce_a)
      Answer(identity, wanted rank,     →                       HMAC? then: what we run agrees?
             last link, hmac)                                   rank is ours? link wanted?
                                        ←       Welcome(identity, hmac)   or
                                        ←       Refused(field, ours, theirs, hmac)

Each HMAC-SHA256 is keyed by the run's secret and covers the direction, the run id, both nonces and
everything said so far that matters, both ranks among it. So a recorded handshake does not open a
second link (other nonces), and neither side's proof can be turned back at it (other direction).
The acceptor says nothing about itself before the dialler has proved that it knows the secret.
What a wrong secret or another run gets told is not authenticated, since it cannot be.
Inside TLS the HMACs also cover both ends' certificates, so that the holder of a third certificate
cannot stand in between and pass both proofs on.

Messages are msgpack behind a prefix (magic, version, length) and at most ``MAX_MESSAGE_BYTES``
long. A caller reads ``num_wanted`` bytes at a time, so it never reads into the frames that follow.
"""

import enum
import hashlib
import hmac
import secrets
import struct
from typing import final

import msgspec

from gossipdp.runtime.identity import MAX_TEXT, Identity, Refusal

MAGIC = b"GDPH"
VERSION = 1
NONCE_BYTES = 32
MAX_MESSAGE_BYTES = 4096

_PREFIX = struct.Struct("<4sBH")
# The only fields that an acceptor may refuse without proof that it knows the secret.
_UNPROVED_FIELDS = ("run_id", "secret", "tls")
# How a TLS connection begins: a handshake record of version 3.x.
_TLS_HELLO = b"\x16\x03"


class HandshakeError(ValueError):
    """What arrived is not the next message of a handshake."""


class _Open(msgspec.Struct, tag=1, array_like=True, frozen=True, forbid_unknown_fields=True):
    run_id: str
    nonce: bytes


class _Challenge(msgspec.Struct, tag=2, array_like=True, frozen=True, forbid_unknown_fields=True):
    nonce: bytes


class _Answer(msgspec.Struct, tag=3, array_like=True, frozen=True, forbid_unknown_fields=True):
    identity: Identity
    wanted_rank: int | None
    last_link: bytes
    proof: bytes


class _Welcome(msgspec.Struct, tag=4, array_like=True, frozen=True, forbid_unknown_fields=True):
    identity: Identity
    proof: bytes


class _Refused(msgspec.Struct, tag=5, array_like=True, frozen=True, forbid_unknown_fields=True):
    field: str
    ours: str
    theirs: str
    proof: bytes


_Message = _Open | _Challenge | _Answer | _Welcome | _Refused
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Message)


class Stage(enum.Enum):
    """How far a handshake is."""

    OPENING = "opening"  # acceptor: the dialler's Open is due
    OPENED = "opened"  # dialler: the acceptor's Challenge is due
    CHALLENGED = "challenged"  # dialler: call answer() next
    ANSWER_DUE = "answer due"  # acceptor: the dialler's Answer is due
    ANSWERED = "answered"  # dialler: Welcome or Refused is due
    DECIDING = "deciding"  # acceptor: call welcome() or refuse() next
    DONE = "done"
    REFUSED = "refused"


@final
class Handshake:
    """One side of one handshake.

    Args:
        identity: what this worker says of itself.
        secret: shared by all workers of the run; not empty.
        dialler: whether this side dialled.
        wanted_rank: whom the dialler wants to reach; None: whoever is there.
        nonce: 32 fresh random bytes; given by tests alone.

    Attributes:
        dialler, wanted_rank: as given.
        stage: how far it is.
        peer: the other side's proved identity, from DECIDING (acceptor) or DONE (dialler) on.
        peer_last_link: the link that the dialler says it had with this worker and let go.
        refusal: why it ended, at stage REFUSED.
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        *,
        dialler: bool,
        wanted_rank: int | None = None,
        nonce: bytes | None = None,
    ) -> None:
        if not secret:
            raise ValueError("the secret is empty; give every worker of the run the same one")
        self.dialler = dialler
        self.peer: Identity | None = None
        self.peer_last_link = b""
        self.refusal: Refusal | None = None
        self._identity = identity
        self._secret = secret
        self.wanted_rank = wanted_rank
        self._nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        self._peer_nonce = b""
        self._answer_proof = b""
        self._certificates = (b"", b"")
        self._body_bytes: int | None = None
        self._buffer = bytearray()
        self._output = bytearray()
        if dialler:
            self.stage = Stage.OPENED
            self._send(_Open(identity.run_id, self._nonce))
        else:
            self.stage = Stage.OPENING

    @property
    def num_wanted(self) -> int:
        """How many bytes to read next; 0 when this side awaits nothing."""
        if self.stage in (Stage.CHALLENGED, Stage.DECIDING, Stage.DONE, Stage.REFUSED):
            return 0
        size = _PREFIX.size if self._body_bytes is None else self._body_bytes
        return size - len(self._buffer)

    @property
    def link_id(self) -> bytes:
        """Names the link that this handshake opens; both sides compute the same."""
        assert self._peer_nonce
        return hashlib.sha256(b"".join(self._nonces())).digest()[:16]

    def bind(self, ours: bytes, theirs: bytes) -> None:
        """Name the certificates under which this handshake is held; before any byte comes in."""
        self._certificates = (ours, theirs) if self.dialler else (theirs, ours)

    def take_output(self) -> bytes:
        """The bytes to send next; each is given out once."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def receive(self, data: bytes) -> None:
        """Take up to ``num_wanted`` bytes from the other side.

        Raises:
            HandshakeError: They are not what must come next. The connection is to be closed.
        """
        assert len(data) <= self.num_wanted
        self._buffer += data
        if self.num_wanted:
            return
        if self._body_bytes is None:
            self._take_prefix()
            return
        try:
            message = _decoder.decode(self._buffer)
        except (msgspec.MsgspecError, ValueError) as error:
            # ValueError: msgspec lets the UnicodeDecodeError of a text that is not UTF-8 through.
            raise HandshakeError(f"malformed handshake message: {error}") from None
        if _encode(message) != self._buffer:
            # What is proved is what a message means; so that it is also the bytes that came.
            raise HandshakeError(f"{type(message).__name__.strip('_')} is not in its one form")
        self._buffer.clear()
        self._body_bytes = None
        self._take_message(message)

    def answer(self, last_link: bytes) -> None:
        """Dialler at CHALLENGED: prove the secret and introduce this worker.

        ``last_link`` is the id of the last link this worker had with the one it dials and no
        longer holds; empty: there is none.
        """
        assert self.stage is Stage.CHALLENGED
        proof = self._prove("dialler", self._identity, self.wanted_rank, last_link)
        self._answer_proof = proof
        self.stage = Stage.ANSWERED
        self._send(_Answer(self._identity, self.wanted_rank, last_link, proof))

    def welcome(self) -> None:
        """Acceptor at DECIDING: the link is made."""
        assert self.stage is Stage.DECIDING
        self.stage = Stage.DONE
        self._send(_Welcome(self._identity, self._prove("acceptor", self._identity)))

    def refuse(self, refusal: Refusal) -> None:
        """Acceptor: the link is not made, and the dialler is told why."""
        assert not self.dialler
        field, ours, theirs = (
            text[:MAX_TEXT] for text in (refusal.field, refusal.ours, refusal.theirs)
        )
        proof = b""
        if self.stage is Stage.DECIDING:
            proof = self._prove("refusal", field, ours, theirs)
        self.stage = Stage.REFUSED
        self.refusal = refusal
        self._send(_Refused(field, ours, theirs, proof))

    def turn_away(self, refusal: Refusal) -> None:
        """Dialler: the link is not made, as the acceptor said or this side found."""
        self.refusal = refusal
        self.stage = Stage.REFUSED

    def _take_prefix(self) -> None:
        magic, version, length = _PREFIX.unpack(self._buffer)
        self._buffer.clear()
        if magic.startswith(_TLS_HELLO) and self.stage is Stage.OPENING:
            self.refuse(Refusal("tls", "off", "on"))
            return
        if magic != MAGIC:
            raise HandshakeError(f"connection starts with {bytes(magic)!r}, not {MAGIC!r}")
        if version != VERSION:
            # An acceptor answers in its own version, so the dialler finds the difference here.
            if self.dialler:
                self.turn_away(Refusal("protocol_version", str(version), str(VERSION)))
            else:
                self.refuse(Refusal("protocol_version", str(VERSION), str(version)))
            return
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise HandshakeError(f"handshake message of {length} bytes")
        self._body_bytes = length

    def _take_message(self, message: _Message) -> None:
        match self.stage, message:
            case Stage.OPENING, _Open():
                self._take_nonce(message.nonce)
                if message.run_id != self._identity.run_id:
                    self.refuse(Refusal("run_id", self._identity.run_id, message.run_id))
                    return
                self.stage = Stage.ANSWER_DUE
                self._send(_Challenge(self._nonce))
            case Stage.OPENED, _Challenge():
                self._take_nonce(message.nonce)
                self.stage = Stage.CHALLENGED
            case Stage.ANSWER_DUE, _Answer():
                self._take_answer(message)
            case Stage.ANSWERED, _Welcome():
                self._take_welcome(message)
            case ((Stage.OPENED | Stage.ANSWERED), _Refused()):
                self._take_refused(message)
            case _:
                raise HandshakeError(
                    f"{type(message).__name__.strip('_')} came at stage {self.stage.value!r}"
                )

    def _take_nonce(self, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise HandshakeError(f"nonce of {len(nonce)} bytes, not {NONCE_BYTES}")
        self._peer_nonce = nonce

    def _take_answer(self, answer: _Answer) -> None:
        peer = answer.identity
        due = self._prove("dialler", peer, answer.wanted_rank, answer.last_link)
        if not hmac.compare_digest(due, answer.proof):
            self.refuse(Refusal("secret", "", ""))
            return
        self.peer = peer
        self.peer_last_link = answer.last_link
        self._answer_proof = answer.proof
        self.stage = Stage.DECIDING
        mine = self._identity
        refusal = mine.disagreement(peer)
        if refusal is None and answer.wanted_rank not in (None, mine.rank):
            refusal = Refusal("rank", str(mine.rank), str(answer.wanted_rank))
        if refusal is None and peer.rank == mine.rank:
            refusal = Refusal("own_rank", str(mine.rank), str(peer.rank))
        if refusal is not None:
            self.refuse(refusal)

    def _take_welcome(self, welcome: _Welcome) -> None:
        peer = welcome.identity
        if not hmac.compare_digest(self._prove("acceptor", peer), welcome.proof):
            self.turn_away(Refusal("secret", "", ""))
            return
        if self.wanted_rank not in (None, peer.rank):
            raise HandshakeError(f"rank {peer.rank} answered where {self.wanted_rank} was wanted")
        self.peer = peer
        self.stage = Stage.DONE

    def _take_refused(self, refused: _Refused) -> None:
        if max(len(refused.field), len(refused.ours), len(refused.theirs)) > MAX_TEXT:
            raise HandshakeError("refusal with an overlong text")
        if refused.field not in _UNPROVED_FIELDS:
            due = self._prove("refusal", refused.field, refused.ours, refused.theirs)
            if self.stage is not Stage.ANSWERED or not hmac.compare_digest(due, refused.proof):
                raise HandshakeError(f"refused for {refused.field!r} without proof of the secret")
        self.turn_away(Refusal(refused.field, refused.ours, refused.theirs))

    def _nonces(self) -> tuple[bytes, bytes]:
        if self.dialler:
            return self._nonce, self._peer_nonce
        return self._peer_nonce, self._nonce

    def _prove(self, direction: str, *said: object) -> bytes:
        """The HMAC over direction, run id, nonces, certificates, the dialler's proof and ``said``.

        msgpack of a tuple is unambiguous, so no two different statements have the same bytes. The
        dialler's proof, empty in itself, ties the acceptor's words to the dialler's identity.
        """
        statement = (f"gossipdp {direction}", self._identity.run_id, *self._nonces())
        data = _encode((*statement, *self._certificates, self._answer_proof, *said))
        return hmac.digest(self._secret, data, "sha256")

    def _send(self, message: _Message) -> None:
        body = _encode(message)
        self._output += _PREFIX.pack(MAGIC, VERSION, len(body)) + body
