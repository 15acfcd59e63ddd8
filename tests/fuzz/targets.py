"""The targets of fuzzing: every parser that meets bytes of the network.

A target takes any bytes and returns, or raises where the library does wrong: an exception that
callers do not expect, a value out of bounds, a message that does not survive being written again.
``SEEDS[name]()`` are real inputs of each target, from which the fuzzer starts. Used by
``make fuzz`` and, with hypothesis, by ``tests/property/test_link_parsers.py``.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import networkx
import torch
from driven_worker import protocol_of
from links import LoneOwner, Recorder, feed, identity

from gossipdp.graph.constants import Constants
from gossipdp.links.frames import (
    BARE_TYPES,
    HEADER_BYTES,
    KEYLESS_TYPES,
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    SEGMENT_OFFER_BYTES,
    ChunkKey,
    FrameError,
    FrameType,
    pack_header,
    pack_key,
    parse_header,
    run_tag,
)
from gossipdp.links.handshake import MAX_MESSAGE_BYTES, Handshake, HandshakeError
from gossipdp.links.link import Link
from gossipdp.links.sockets import Stream
from gossipdp.links.tcp_link import TcpLink
from gossipdp.parallel import packing
from gossipdp.parallel.training_state import Arriving
from gossipdp.protocol import messages as say
from gossipdp.protocol.actions import Send
from gossipdp.protocol.members import Member, ProgressEntry, Status
from gossipdp.protocol.messages import Envelope, ProtocolError, decode, encode
from gossipdp.protocol.worker import Action

TAG = run_tag("run")
SECRET = b"secret"
NONCES = (b"d" * 32, b"a" * 32)
BIGGEST_BUFFER = 1 << 16


# Frame headers.


def frame_header(data: bytes) -> None:
    """Check that a header is refused, or in bounds and the same when written again."""
    try:
        header = parse_header(data[:HEADER_BYTES], TAG, 0)
    except FrameError:
        return
    bound = MAX_CONTROL_BYTES if header.key is None else MAX_CHUNK_BYTES
    assert (header.frame_type not in BARE_TYPES) <= header.length <= bound
    key = None if header.key is None else pack_key(header.key)
    again = pack_header(
        TAG,
        header.frame_type,
        0,
        header.length,
        key,
        num_read=header.num_read,
        segment=header.segment,
        offset=header.offset,
    )
    assert again == data[:HEADER_BYTES]


def frame_header_seeds() -> list[bytes]:
    """One of each type."""
    key = pack_key(ChunkKey(1, 2, 3, 4))
    return [
        pack_header(TAG, FrameType.SEGMENT_READY, 0, 0, segment=3),
        pack_header(TAG, FrameType.ACKNOWLEDGEMENT, 0, 0, num_read=7),
        pack_header(TAG, FrameType.SEGMENT_OFFER, 0, SEGMENT_OFFER_BYTES),
        pack_header(TAG, FrameType.EXCHANGE_CHUNK, 0, 1000, key, segment=3, offset=1024),
        *(
            pack_header(TAG, kind, 0, 1000, None if kind in KEYLESS_TYPES else key)
            for kind in FrameType
            if kind not in (*BARE_TYPES, FrameType.SEGMENT_OFFER)
        ),
    ]


# Handshakes.


def _is_done(machine: Handshake, data: bytes) -> bool:
    """Feed a machine as a connection does; return whether that opens a link."""
    while True:
        wanted = machine.num_wanted
        assert 0 <= wanted <= MAX_MESSAGE_BYTES
        assert len(machine.take_output()) <= 2 * MAX_MESSAGE_BYTES
        if machine.refusal is not None:
            assert str(machine.refusal).isprintable()
        if not data or not wanted:
            return machine.is_over and machine.refusal is None
        try:
            machine.receive(data[:wanted])
        except HandshakeError:
            return False
        data = data[wanted:]


def handshake_acceptor(data: bytes) -> None:
    """No bytes without the proof of one that has the secret bring the acceptor to DONE."""
    machine = Handshake(identity(1), SECRET, dialler=False, nonce=NONCES[1])
    if _is_done(machine, data):
        assert _conversation()[0][1] in data
        assert machine.peer is not None
        assert (machine.peer.rank, machine.peer.run_id) == (0, "run")


def handshake_dialler(data: bytes) -> None:
    """Do the same for the dialler."""
    machine = Handshake(identity(0), SECRET, dialler=True, wanted_rank=1, nonce=NONCES[0])
    if _is_done(machine, data):
        assert _conversation()[1][1][-32:] in data  # its HMAC
        assert machine.peer is not None
        assert machine.peer.rank == 1


def handshake_in_tls(data: bytes) -> None:
    """Without proofs: a link is of this run, between two ranks. The first byte says which end."""
    dialler = bool(data[:1] and data[0] % 2)
    machine = Handshake(identity(0), None, dialler=dialler, wanted_rank=1 if dialler else None)
    if _is_done(machine, data[1:]):
        assert machine.peer is not None
        assert machine.peer.rank == 1 if dialler else machine.peer.rank != 0
        assert dialler or machine.peer.run_id == "run"


def handshake_in_tls_seeds() -> list[bytes]:
    """Return a hello, a welcome, and refusals."""
    hello = Handshake(identity(1), None, dialler=True).take_output()
    acceptor = Handshake(identity(1), None, dialler=False)
    feed(acceptor, Handshake(identity(0), None, dialler=True).take_output())
    return [b"\0" + hello, b"\1" + acceptor.take_output(), *(b"\1" + r for r in _refusals(None))]


@functools.cache
def _conversation() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return the messages of a dialler and an acceptor with these nonces, in turn."""
    dialler = Handshake(identity(0), SECRET, dialler=True, wanted_rank=1, nonce=NONCES[0])
    acceptor = Handshake(identity(1), SECRET, dialler=False, nonce=NONCES[1])
    said: tuple[list[bytes], list[bytes]] = ([], [])
    for _ in range(2):
        for machine, other, words in ((dialler, acceptor, said[0]), (acceptor, dialler, said[1])):
            words.append(machine.take_output())
            feed(other, words[-1])
    assert dialler.is_over is acceptor.is_over is True
    assert dialler.refusal is acceptor.refusal is None
    return tuple(said[0]), tuple(said[1])


def _refusals(secret: bytes | None = SECRET) -> list[bytes]:
    words = []
    for field in ("run_id", "model"):
        dialler = Handshake(identity(0), secret, dialler=True, wanted_rank=1, nonce=NONCES[0])
        odd = msgspec.structs.replace(identity(1), **{field: "other"})
        acceptor = Handshake(odd, secret, dialler=False, nonce=NONCES[1])
        feed(acceptor, dialler.take_output())
        words.append(acceptor.take_output())
    return words


def handshake_acceptor_seeds() -> list[bytes]:
    """Return the dialler's words, whole and begun; a TLS hello; a browser's."""
    words = _conversation()[0]
    return [b"".join(words), *words, b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n"]


def handshake_dialler_seeds() -> list[bytes]:
    """Return the acceptor's words, and refusals."""
    words = _conversation()[1]
    return [b"".join(words), *words, *_refusals()]


# Control messages.


def control_message(data: bytes) -> None:
    """Check that a message is refused, or the same when written again."""
    try:
        envelope = decode(data)
    except ProtocolError:
        return
    again = encode(envelope)
    # Compared as bytes: a NaN in it equals no other.
    assert encode(decode(again)) == again


def control_message_seeds() -> list[bytes]:
    """One of each kind, with news and without."""
    id, epoch = say.ExchangeId(1, 0, 12), say.Epoch(1, 0, 77)
    average = say.Average(epoch, 3, 1e-3)
    messages: list[Any] = [
        say.Propose(id, 0.75),
        say.Accept(id, 0.75),
        say.Busy(id),
        say.Free(),
        say.Pass(),
        say.Cancel(id),
        say.Abort(id, "NaN"),
        say.Heartbeat(),
        say.RequestState(1, 0, True),
        say.OfferState(1, 1 << 20),
        say.StateRefused(2, "poisoned", is_early=False),
        say.AskAverage(epoch, (0, 1, 2)),
        say.TellAverage(epoch, 2, (2,)),
        say.Progressed(epoch, 3),
        say.Stalled(epoch, 2, True, "nothing of it came"),
        say.AskLife(2, 1),
        say.TellLife(2, 1, True),
        say.AskMembers(),
        say.Members(4, False, *_news()),
        say.BeginEpoch(epoch, ((0, 100), (1, 101), (2, 102)), None),
        say.BeginEpoch(epoch, ((0, 100), (2, 102)), average),
        say.NewerEpoch(epoch),
        say.Held(epoch, average),
        say.PullPartials(epoch, 0, 2),
        say.PullResults(epoch, epoch, 0, 4),
        say.Distance(epoch, 0.5),
        say.CommitEpoch(epoch, 0.5),
        say.Committed(epoch),
        say.Release(epoch),
    ]
    return [encode(Envelope(message, *news)) for message in messages for news in ((), _news())]


def _news() -> tuple[tuple[Member, ...], tuple[ProgressEntry, ...]]:
    return (
        (
            Member(1, 2, 101, Status.DONE, "10.0.0.1", 4000, "10.0.0.9", 9401),
            Member(2, 0, 102, Status.LEFT, "::1", 1),
        ),
        (ProgressEntry(1, 101, 64, 2), ProgressEntry(0, 99, 9, 9)),
    )


# A whole worker's protocol behind the decoder: what an authenticated peer may say.


def protocol_worker(data: bytes) -> None:
    """Any sequence of messages that decode leaves the protocol able to go on, and to be heard.

    The first byte of each record is its length and the second names its sender, so that the fuzzer
    may cut and join real messages.
    """
    worker = protocol_of(0, process_id=100, constants=_ring(), num_chunks=2, num_copied_chunks=1)
    now = 0.0
    for peer in (1, 2, 3):
        _say(worker.link_up(peer, now))
    _say(worker.release(now))
    while len(data) >= 2:
        length, choice = data[0], data[1]
        record, data = data[2 : 2 + length], data[2 + length :]
        now += 0.25 * (choice >> 4)
        peer = 1 + choice % 3
        match (choice >> 2) % 4:
            case 1:
                _say(worker.step(8, now))
            case 2:
                _say(worker.done(now))
            case 3:
                _say(worker.link_down(peer, now))
                _say(worker.link_up(peer, now))
        try:
            envelope = decode(record)
        except ProtocolError:
            continue
        _say(worker.receive(peer, envelope, now))
        _say(worker.poll(now))
        worker.next_deadline()


def _say(actions: Sequence[Action]) -> None:
    for action in actions:
        if isinstance(action, Send):
            assert decode(encode(action.message)) == action.message


@functools.cache
def _ring() -> Constants:
    return Constants.of(networkx.cycle_graph(4))


def protocol_worker_seeds() -> list[bytes]:
    """Single messages, and short conversations."""
    messages = [message for message in control_message_seeds() if len(message) < 256]
    records = [bytes([len(message), 0]) + message for message in messages]
    order = random.Random(0)
    talks = [b"".join(order.sample(records, 6)) for _ in range(20)]
    ended = [bytes([0, 8]) + b"".join(order.sample(records, 6)) for _ in range(20)]
    return [*records, *talks, *ended]


# A link: frames cut in any pieces, with a handler that answers.


class _Bytes(Stream):
    """Bytes that come in pieces whose sizes they name themselves."""

    connection: Any = None

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def has_more(self) -> bool:
        return not self._data

    def receive_into(self, rooms: Sequence[memoryview]) -> int:
        piece = 1 + 17 * (self._data[0] if self._data else 0)
        total = 0
        for room in rooms:
            part = self._data[: min(len(room), piece - total)]
            room[: len(part)] = part
            self._data = self._data[len(part) :]
            total += len(part)
        return total

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        return sum(map(len, parts))


class _Handler(Recorder):
    """Takes chunks with an even index and drops the others; checks each call."""

    due: tuple[FrameType, ChunkKey, int] | None = None

    def control(self, link: Link, data: bytes) -> None:
        assert not link.closed
        assert 0 < len(data) <= MAX_CONTROL_BYTES
        control_message(data)

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        assert not link.closed
        assert self.due is None
        assert 0 < length <= MAX_CHUNK_BYTES
        self.due = (frame_type, key, length)
        return memoryview(bytearray(min(length, BIGGEST_BUFFER))) if key.index % 2 == 0 else None

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        assert not link.closed
        assert self.due is not None
        assert self.due[:2] == (frame_type, key)
        assert payload is None or payload.nbytes == self.due[2]
        self.due = None


def link_stream(data: bytes) -> None:
    """Check that a link ends exactly once, and tells its handler only what is allowed."""
    owner = LoneOwner(_Handler())
    link = TcpLink(owner, _Bytes(data), identity(1), dialler=0)
    link._peer_memory.take(1, memoryview(bytes(4096)))
    while not link.closed:
        link.can_read = True
        link.read_some()
    assert len(owner.ended) == 1
    assert link.bytes_received <= len(data)


def link_stream_seeds() -> list[bytes]:
    """Return controls and chunks, in order."""
    frames = []
    for number, message in enumerate(control_message_seeds()[:6]):
        frames.append(pack_header(TAG, FrameType.CONTROL, number, len(message)) + message)
    for number in range(6, 10):
        key = pack_key(ChunkKey(1, 0, 12, number))
        payload = bytes([number]) * (100 * number)
        frames.append(
            pack_header(TAG, FrameType.EXCHANGE_CHUNK, number, len(payload), key) + payload
        )
    frames += [
        pack_header(TAG, FrameType.EXCHANGE_CHUNK, 10, 900, key, segment=1, offset=64),
        pack_header(TAG, FrameType.ACKNOWLEDGEMENT, 11, 0),
        pack_header(TAG, FrameType.SEGMENT_OFFER, 12, SEGMENT_OFFER_BYTES) + bytes(32),
        pack_header(TAG, FrameType.EXCHANGE_CHUNK, 13, 901, key, segment=1, offset=4032),
    ]
    return [b"".join(frames[:count]) for count in range(1, len(frames) + 1)]


# What describes another worker's optimizers' state.


def layout_of_state(data: bytes) -> None:
    """Check that a layout is refused, or stands for a state that can be described again."""
    arriving = Arriving(1 << 20)
    try:
        for room in arriving.unfold(data):
            room.zero_()
        state = arriving.state()
    except ValueError:
        return
    layout, tensors = packing.pack(state)
    rest = iter(tensors)
    again, _ = packing.pack(packing.unpack(layout, lambda _: next(rest)))
    assert again == layout


def layout_of_state_seeds() -> list[bytes]:
    """Return an optimizer's, its small tensors in the layout and others beside it; odd values."""
    weights = [torch.nn.Parameter(torch.ones(size, 2)) for size in (3, 99)]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    odd = {1: (None, [2.5, float("nan")], Counter(a=1)), "t": torch.ones(2, 3, 4).permute(2, 0, 1)}
    odd["u"] = torch.ones(4, 5, 6).permute(2, 0, 1)
    return [packing.pack(state)[0] for state in (optimizer.state_dict(), odd)]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    name.removesuffix("_seeds"): seeds for name, seeds in globals().items() if name[-6:] == "_seeds"
}
TARGETS: dict[str, Callable[[bytes], None]] = {name: globals()[name] for name in SEEDS}
