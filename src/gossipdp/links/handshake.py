"""The identity of a worker, and the handshake that opens a link: a pure machine of bytes.

    dialler                                        acceptor
      Hello(identity, wanted rank, nonce)  →                 the run id is ours?
                                           ←       Challenge(nonce)               (plain links only)
      Proof(hmac)                          →                                      (plain links only)
                                           ←       Welcome(identity, hmac)   or
                                           ←       Refused(field, ours, theirs, hmac)

On a plain link the run's secret is a membership cookie: each end shows once that it knows it, by an
HMAC-SHA256 over the direction, the run id, both nonces and both ranks. So a recorded handshake
opens no second link (other nonces), and neither side's proof can be turned back at it (other
direction). Nothing else is authenticated: not the rest of the identities, and no frame that
follows. Before it has seen the proof, the acceptor says only its run id. Inside TLS (:mod:`.tls`)
the hello is plain data: holding the run's key is membership.

Messages are msgpack behind a prefix (magic, version of gossipdp, length) and at most
``MAX_MESSAGE_BYTES`` long. The prefix is the same in all versions. Two versions that differ in the
first two numbers may differ in anything else: they see that here, and refuse each other. A caller
reads ``num_wanted`` bytes at a time, so it never reads into the frames that follow.
"""

import dataclasses
import hmac
import secrets
import struct
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar, final

import msgspec

import gossipdp
from gossipdp.logs import printable
from gossipdp.protocol.members import MAX_INCARNATION, MAX_RANK

MAGIC = b"GDPH"
VERSION = tuple(map(int, gossipdp.__version__.split(".")[:2]))
NONCE_BYTES = 32
MAX_MESSAGE_BYTES = 4096
# Fields that must agree, in the order in which a difference is reported.
AGREED_FIELDS = ("run_id", "model", "method", "graph", "comm_rate", "wire_format", "timeout")
MAX_TEXT = 200
# Ranks of visitors: processes that only ask who takes part, before they join. They draw one at
# random, and may not know the graph yet.
FIRST_VISITOR_RANK, LAST_VISITOR_RANK = 2**30, 2**31 - 1

_PREFIX = struct.Struct("<4sBBH")
# An acceptor that does not show the run's secret may refuse only for these. A worker may end for
# others (a newer process of its rank, another model), for which only a member can have a reason.
_UNPROVED_FIELDS = ("run_id", "secret", "tls", "gossipdp_version")
# The start of a TLS connection: a handshake record of version 3.x.
_TLS_HELLO = b"\x16\x03"


class Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A worker's hello: its identity, its numeric address, and the settings of its run.

    The settings are short strings that a refusal can show: ``model`` the fingerprint of names,
    shapes and order, ``graph`` a digest.

    ``incarnation`` is the one with which the process began: it orders the processes of one rank. It
    stays when the process goes on as a new life after it was taken for dead. Links carry the
    membership that decides which life counts; if the hello changed with the life, the process that
    must give way would be shut out before it heard of that.
    """

    rank: int
    incarnation: int
    process_id: int
    run_id: str
    model: str
    method: str
    graph: str
    comm_rate: str
    wire_format: str
    host: str = ""
    port: int = 0
    timeout: str = ""

    def __post_init__(self) -> None:
        for name, bound in (
            ("rank", LAST_VISITOR_RANK if self.is_visitor else MAX_RANK),
            ("incarnation", MAX_INCARNATION),
            ("process_id", 2**63 - 1),
            ("port", 2**16 - 1),
        ):
            value = getattr(self, name)
            if not 0 <= value <= bound:
                raise ValueError(f"{name} {value} is not in 0..{bound}")
        for name in (*AGREED_FIELDS, "host"):
            text = getattr(self, name)
            if len(text) > MAX_TEXT:
                raise ValueError(f"{name} is longer than {MAX_TEXT} characters")
            if not text.isprintable():
                raise ValueError(f"{name} {printable(text)!r} holds control characters")

    @property
    def is_visitor(self) -> bool:
        """True if this process only asks who takes part."""
        return self.rank >= FIRST_VISITOR_RANK

    def disagreement(self, other: "Identity") -> "Refusal | None":
        """Return the first field in which the two workers' runs differ, seen from ``self``."""
        for name in AGREED_FIELDS:
            if name == "graph" and (self.is_visitor or other.is_visitor):
                continue
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return Refusal(name, ours, theirs)
        return None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The reason to turn a worker away: ``field`` differs; ``ours`` is the refuser's value.

    ``str()`` of it is the text of :class:`.RefusedError`.
    """

    field: str
    ours: str = ""
    theirs: str = ""

    def __str__(self) -> str:
        label, ours, theirs = self.field.replace("_", " "), self.ours, self.theirs
        if self.field in _SENTENCES:
            return _SENTENCES[self.field].format(ours=ours, theirs=theirs)
        if self.field == "model":
            label, ours, theirs = _differing_parts(ours, theirs)
            if label == "model (base)":
                return f"the frozen bases differ: {UNLIKE_BASES}"
        return f"{label} differs: the other worker has {ours!r}, this one {theirs!r}"


UNLIKE_BASES = (
    "frozen parameters of more than twice the trained size are neither sent nor saved, so all "
    "workers must hold the same. Load the same weights on each, or call torch.manual_seed() with "
    "one seed before you build the model, or wrap with exchange=Exchange(frozen=True), which sends "
    "them"
)
_SENTENCES = {
    "secret": "the secrets differ; give all workers of a run the same --secret-file. A run that "
    "was started without one made a secret of its own, and no other worker can join it",
    "tls": "TLS is {ours} at the other worker and {theirs} here; give all workers the same "
    "TLS directory, or none",
    "gossipdp_version": "the other worker runs gossipdp {ours}, and this one {theirs}; install the "
    "same version for all workers of a run",
    "timeout": "timeout differs: the other worker has {ours!r}, this one {theirs!r}; give all "
    "workers the same Network(timeout_s=)",
    "rank": "the worker at that address has rank {ours}, not {theirs}",
    "own_rank": "both workers claim rank {ours}; every worker needs its own RANK",
    "incarnation": "a newer incarnation ({ours}) of this worker is connected; this one is {theirs}",
}


def _differing_parts(ours: str, theirs: str) -> tuple[str, str, str]:
    """Compare fingerprints such as ``"names=1f shapes=9c"``: return what differs, both values."""
    here, there = (dict(word.partition("=")[::2] for word in t.split()) for t in (ours, theirs))
    if here.keys() != there.keys():
        return "model", ours, theirs
    odd = [name for name in here if here[name] != there[name]]
    ours, theirs = (" ".join(part[name] for name in odd) for part in (here, there))
    return f"model ({', '.join(odd)})", ours, theirs


class HandshakeError(ValueError):
    """The bytes that arrived are not the next message of a handshake."""


class _Hello(msgspec.Struct, tag=1, array_like=True, frozen=True, forbid_unknown_fields=True):
    identity: Identity
    wanted_rank: int | None
    nonce: bytes


class _Challenge(msgspec.Struct, tag=2, array_like=True, frozen=True, forbid_unknown_fields=True):
    nonce: bytes


class _Proof(msgspec.Struct, tag=3, array_like=True, frozen=True, forbid_unknown_fields=True):
    proof: bytes


class _Welcome(msgspec.Struct, tag=4, array_like=True, frozen=True, forbid_unknown_fields=True):
    identity: Identity
    proof: bytes


class _Refused(msgspec.Struct, tag=5, array_like=True, frozen=True, forbid_unknown_fields=True):
    field: str
    ours: str
    theirs: str
    proof: bytes


_Message = _Hello | _Challenge | _Proof | _Welcome | _Refused
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Message)


_Kind = TypeVar("_Kind", bound=_Message)
_Steps: TypeAlias = Generator[None, _Message, None]


def _next(kind: type[_Kind]) -> Generator[None, _Message, _Kind]:
    message = yield
    if not isinstance(message, kind):
        came, due = (each.__name__.strip("_") for each in (type(message), kind))
        raise HandshakeError(f"{came} came where {due} was due")
    return message


@final
class Handshake:
    """One side of one handshake.

    Args:
        secret: shared by all workers of the run, not empty; None inside TLS.
        wanted_rank: the rank that the dialler wants to reach; None: any, or this is an acceptor.
        admit: returns an acceptor's reason against a member whose run agrees; None: there is none.
        nonce: 32 fresh random bytes; only tests give it.

    Attributes:
        peer: the other side's hello, once it is known to be a member.
        knows_run: True once a dialler has named this run's id.
        is_over: True if no message is awaited any more.
        refusal: the reason for the end, if it made no link.
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes | None,
        *,
        dialler: bool,
        wanted_rank: int | None = None,
        admit: Callable[[Identity], Refusal | None] = lambda peer: None,
        nonce: bytes | None = None,
    ) -> None:
        if secret is not None and not secret:
            raise ValueError("the secret is empty; give every worker of the run the same one")
        self.dialler, self.wanted_rank = dialler, wanted_rank
        self.peer: Identity | None = None
        self.knows_run = self.is_over = False
        self.refusal: Refusal | None = None
        self._identity, self._secret, self._admit = identity, secret, admit
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._hello = _Hello(identity, wanted_rank, self._nonce)  # an acceptor's is the dialler's
        self._body_bytes: int | None = None
        self._buffer, self._output = bytearray(), bytearray()
        self._steps = self._dial() if dialler else self._accept()
        next(self._steps)  # to the first message awaited

    @property
    def num_wanted(self) -> int:
        """The number of bytes to read next; 0 when this side awaits nothing."""
        if self.is_over:
            return 0
        size = _PREFIX.size if self._body_bytes is None else self._body_bytes
        return size - len(self._buffer)

    def take_output(self) -> bytes:
        """Return the bytes to send next, each once."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def receive(self, data: bytes) -> None:
        """Take up to ``num_wanted`` bytes; raise HandshakeError if they must not come next."""
        assert len(data) <= self.num_wanted
        self._buffer += data
        if self.num_wanted:
            return
        whole, self._buffer = self._buffer, bytearray()
        if self._body_bytes is None:
            self._take_prefix(whole)
            return
        self._body_bytes = None
        try:
            message = _decoder.decode(whole)
        except (msgspec.MsgspecError, ValueError) as error:
            # ValueError: msgspec lets the UnicodeDecodeError of a text that is not UTF-8 through.
            raise HandshakeError(f"malformed handshake message: {error}") from None
        if self.dialler and isinstance(message, _Refused):
            self._take_refused(message)
            return
        try:
            self._steps.send(message)
        except StopIteration:
            self.is_over = True

    def refuse(self, refusal: Refusal) -> None:
        """End without a link; an acceptor says why, with a proof if the dialler is a member."""
        self.is_over, self.refusal = True, refusal
        self._output.clear()
        if not self.dialler:
            proof = self._prove("refusal", self._hello.wanted_rank) if self.peer else b""
            self._send(_Refused(refusal.field, refusal.ours, refusal.theirs, proof))

    def _take_prefix(self, data: bytearray) -> None:
        magic, *version, length = _PREFIX.unpack(data)
        if magic.startswith(_TLS_HELLO) and not (self.dialler or self.knows_run):
            self.refuse(Refusal("tls", "off", "on"))
        elif magic != MAGIC:
            raise HandshakeError(f"connection starts with {bytes(magic)!r}, not {MAGIC!r}")
        elif tuple(version) != VERSION:
            # An acceptor answers in its own version, so the dialler finds the difference here.
            here, there = (".".join(map(str, each)) for each in (VERSION, version))
            ours, theirs = (there, here) if self.dialler else (here, there)
            self.refuse(Refusal("gossipdp_version", ours, theirs))
        elif not 0 < length <= MAX_MESSAGE_BYTES:
            raise HandshakeError(f"handshake message of {length} bytes")
        else:
            self._body_bytes = length

    def _dial(self) -> _Steps:
        self._send(self._hello)
        if self._secret is not None:  # in TLS it need not prove itself
            challenge = yield from _next(_Challenge)
            self._take_nonce(challenge.nonce)
            self._send(_Proof(self._prove("dialler", self.wanted_rank)))
        welcome = yield from _next(_Welcome)
        peer = welcome.identity
        if not self._is_proof(welcome.proof, "acceptor", peer.rank):
            self.refuse(Refusal("secret"))
        elif self.wanted_rank not in (None, peer.rank):
            raise HandshakeError(f"rank {peer.rank} answered where {self.wanted_rank} was wanted")
        else:
            self.peer = peer

    def _accept(self) -> _Steps:
        self._hello = hello = yield from _next(_Hello)
        self._take_nonce(hello.nonce)
        mine, peer, wanted = self._identity, hello.identity, hello.wanted_rank
        if mine.run_id != peer.run_id:
            self.refuse(Refusal("run_id", mine.run_id, peer.run_id))
            return
        self.knows_run = True
        if self._secret is not None:
            self._send(_Challenge(self._nonce))
            proof = yield from _next(_Proof)
            if not self._is_proof(proof.proof, "dialler", wanted):
                self.refuse(Refusal("secret"))
                return
        self.peer = peer
        refusal = mine.disagreement(peer)
        if refusal is None and wanted not in (None, mine.rank):
            refusal = Refusal("rank", str(mine.rank), str(wanted))
        if refusal is None and peer.rank == mine.rank:
            refusal = Refusal("own_rank", str(mine.rank), str(peer.rank))
        refusal = refusal or self._admit(peer)
        if refusal is not None:
            self.refuse(refusal)
        else:
            self._send(_Welcome(mine, self._prove("acceptor", mine.rank)))

    def _take_nonce(self, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise HandshakeError(f"nonce of {len(nonce)} bytes, not {NONCE_BYTES}")
        self._peer_nonce = nonce

    def _take_refused(self, said: _Refused) -> None:
        texts = [printable(text, MAX_TEXT) for text in (said.field, said.ours, said.theirs)]
        is_proved = self._is_proof(said.proof, "refusal", self.wanted_rank)
        if said.field not in _UNPROVED_FIELDS and not is_proved:
            raise HandshakeError(f"refused for {texts[0]!r} without proof of the secret")
        self.refuse(Refusal(*texts))

    def _is_proof(self, proof: bytes, direction: str, acceptor_rank: int | None) -> bool:
        return hmac.compare_digest(self._prove(direction, acceptor_rank), proof)

    def _prove(self, direction: str, acceptor_rank: int | None) -> bytes:
        """Return the HMAC over direction, run id, both nonces and both ranks; empty inside TLS.

        The dialler names the rank that it wants, perhaps None; the acceptor names its own.
        """
        if self._secret is None:
            return b""
        nonces = (self._nonce, self._peer_nonce)
        if not self.dialler:
            nonces = nonces[::-1]
        ranks = (self._hello.identity.rank, acceptor_rank)
        # msgpack of a tuple is unambiguous: no two statements have the same bytes.
        statement = (f"gossipdp {direction}", self._identity.run_id, *nonces, *ranks)
        return hmac.digest(self._secret, _encode(statement), "sha256")

    def _send(self, message: _Message) -> None:
        body = _encode(message)
        self._output += _PREFIX.pack(MAGIC, *VERSION, len(body)) + body
