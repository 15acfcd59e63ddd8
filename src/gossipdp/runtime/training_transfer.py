"""The optimizers' state of one worker, sent to one that joins: bytes, in chunks.

A donor's main thread encodes it at a step boundary; the size is offered first, so that the joiner
can refuse what its own model cannot need before it takes memory for it.
"""

from gossipdp.protocol.messages import OfferTraining, RequestTraining
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.link import Link

CHUNK_BYTES = 1 << 20
SLOTS = 2


class TrainingSender:
    """Streams an encoded state over one link.

    Args:
        link: to the worker that asked.
        request: its request.
        data: what it asked for.
    """

    def __init__(self, link: Link, request: RequestTraining, data: bytes) -> None:
        self.link = link
        self.num_sent = 0
        self._request = (link.peer, link.peer_incarnation, request.counter)
        self._data = memoryview(data)
        self._num_chunks = -(-len(data) // CHUNK_BYTES)

    @property
    def is_finished(self) -> bool:
        """Whether every chunk was handed to the link, and by the link to the kernel."""
        return self.num_sent == self._num_chunks and self.link.queued_chunks == 0

    def pump(self) -> None:
        """Send chunks as long as few are queued."""
        while self.num_sent < self._num_chunks and self.link.queued_chunks < SLOTS:
            start = self.num_sent * CHUNK_BYTES
            key = ChunkKey(*self._request, self.num_sent)
            payload = self._data[start : start + CHUNK_BYTES]
            self.num_sent += 1
            self.link.send_chunk(FrameType.TRAINING_CHUNK, key, payload)


class TrainingReceiver:
    """Receives another worker's encoded state.

    Args:
        peer: whom we ask.
        max_bytes: more is refused.
    """

    def __init__(self, peer: int, max_bytes: int) -> None:
        self.peer = peer
        self.max_bytes = max_bytes
        self.num_received = 0
        self.counter = 0
        self._data: bytearray | None = None

    def request(self, counter: int) -> RequestTraining:
        """Ask, or ask again on a new link: from the beginning, for the state of another moment."""
        self.counter = counter
        self.num_received = 0
        self._data = None
        return RequestTraining(counter)

    def offered(self, offer: OfferTraining) -> str | None:
        """Make room for what is to come; return what is wrong with it."""
        if self._data is not None:
            return None
        if not 0 < offer.num_bytes <= self.max_bytes:
            return (
                f"its optimizers' state takes {offer.num_bytes} bytes, and this worker's model "
                f"would take {self.max_bytes} at most: the optimizers differ"
            )
        self._data = bytearray(offer.num_bytes)
        return None

    @property
    def data(self) -> bytes:
        """What was received."""
        assert self._data is not None
        return bytes(self._data)

    @property
    def is_finished(self) -> bool:
        """Whether everything is here."""
        return self._data is not None and self.num_received == -(-len(self._data) // CHUNK_BYTES)

    def landing(self, frame_type: FrameType, key: ChunkKey, length: int) -> memoryview | None:
        """Return where a chunk of our request goes, or None for any other chunk."""
        if frame_type is not FrameType.TRAINING_CHUNK or self._data is None or self.is_finished:
            return None
        if key.counter != self.counter or key.index != self.num_received:
            return None
        start = key.index * CHUNK_BYTES
        room = memoryview(self._data)[start : start + CHUNK_BYTES]
        return room if len(room) == length else None

    def landed(self) -> None:
        """Count the chunk that has just arrived."""
        self.num_received += 1
