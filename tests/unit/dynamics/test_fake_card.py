"""A device's tensors and chunks in all forms in which they travel; the host reads few numbers."""

from collections.abc import Callable

import pytest
import torch
from fake_card import CARD

from gossipdp.dynamics.chunks import Moment, Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.gossip.codec import FORMATS, Codec
from gossipdp.parallel.flat_parameters import chunk_bytes_for

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def state_of(dtype: torch.dtype) -> State:
    x = torch.zeros(40, dtype=dtype, device=CARD)
    moment = Moment("exp_avg_sq", 1, 0.5, steps=1)
    return State(
        [
            Segment(x, Role.TRAINED, chunk_bytes=64),
            Segment(torch.zeros(5, dtype=dtype, device=CARD), Role.BUFFER),
            Segment(torch.zeros(5, dtype=dtype, device=CARD), Role.UNOPTIMIZED),
            Segment(torch.arange(3, device=CARD), Role.COPIED),
        ],
        moments=[Segment(x.clone(), Role.MOMENT, momentum=False, moment=moment)],
    )


@DTYPES
@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.usefixtures("card")
def test_each_form_in_which_chunks_travel(dtype, wire_format):
    state = state_of(dtype)
    codec = Codec(wire_format, state)
    decoded = []
    for _ in range(2):  # the first shows a code the distance
        chunks = state.carried([1])
        if preface := codec.start(chunks, 0.0, 1.5, is_coded=True in codec.forms):
            codec.agree(memoryview(bytearray(preface)))
        for chunk in chunks:
            codec.encode(chunk)
            payload = memoryview(bytearray(codec.room(chunk)))
            if codec.is_certain(chunk):
                codec.exchange(chunk, payload)
                continue
            decoded.append(codec.decode(chunk, payload))
            if decoded[-1]:
                codec.exchange(chunk, payload)
            else:
                repeat = memoryview(bytearray(codec.repeat(chunk)))
                codec.exchange(chunk, repeat, is_repeat=True)
    assert set(decoded) == ({False, True} if wire_format == "lattice8" else set())


@DTYPES
def test_the_host_reads_few_numbers(card, dtype):
    state = state_of(dtype)

    def reads(use: Callable[..., object], *args: object) -> int:
        before = len(card.reads)
        use(*args)
        return len(card.reads) - before

    for chunk in state.carried([1]):
        is_trained = chunk.role is Role.TRAINED
        mine, peers = torch.zeros(2, chunk.num_elements, dtype=dtype)
        # A trained chunk's check for NaN arrives with the snapshot.
        assert reads(chunk.snapshot, 0.1, mine) == (0 if is_trained else 1)
        assert reads(chunk.exchange, 0.1, mine, peers, 1.5) == 1
        assert reads(chunk.boundary, 0.2) == 0
        assert reads(chunk.read_z, mine) == 0


def test_the_launches_and_waits_of_a_model_of_a_billion_parameters(card):
    """Each chunk costs the same, so three of them show it."""
    num_values = 1_000_000_000
    chunk_bytes = chunk_bytes_for(4 * num_values, is_on_accelerator=True)
    num_chunks = -(-4 * num_values // chunk_bytes)
    x = torch.zeros(3 * chunk_bytes // 4, device=CARD)
    state = State([Segment(x, Role.TRAINED, chunk_bytes=chunk_bytes)])
    mine, peers = torch.zeros(2, chunk_bytes // 4)

    def exchange(theta: float) -> None:
        for chunk in state.chunks:
            chunk.snapshot(theta, mine)
            chunk.exchange(theta, mine, peers, 1.5)

    def cost(use: Callable[[], object]) -> tuple[int, ...]:
        """Return the launches of all chunks of the model, the host's waits, and the events."""
        card.num_launches = card.num_waits = card.num_events = card.num_rooms = 0
        use()
        assert card.num_rooms == 0
        numbers = card.num_launches, card.num_waits, card.num_events
        return tuple(n if n < 4 else n // 3 * num_chunks for n in numbers)

    exchange(0.1)  # makes scratch and slots
    assert num_chunks == 120
    # Launches: x and the inbox, in one run. The host waits for the boundary before alone. Events:
    # the gossip thread's and the wait for it, and the boundary's own.
    assert cost(lambda: state.boundary(0.2)) == (2, 1, 3)
    assert cost(lambda: state.boundary(0.2)) == (0, 0, 0)
    # Launches: three for the snapshot, its sum, their ways out; the peer's way in, the difference
    # and its norm, the flow, pending, two for c. Waits: for the snapshot's arrival, for
    # the norm, and for a slot, which has long been free. Events: of both holders of the lock, the
    # wait for the one before and its own; of the snapshot; and of the slot.
    assert cost(lambda: exchange(0.3)) == (13 * num_chunks, 3 * num_chunks, 6 * num_chunks)
    # No time has passed: neither the snapshot nor pending flows.
    assert cost(lambda: exchange(0.3)) == (11 * num_chunks, 3 * num_chunks, 6 * num_chunks)
    # If a holder of a lock is thrown out before it leaves the mark, the next one waits for all.
    order = state.device.order()
    order.__enter__()
    assert cost(order.__enter__) == (0, 1, 1)
    # The gossip thread waits for all its work before it ends: rule 4.
    card.finishes.clear()
    with state.device.gossip_thread():
        assert not card.finishes
    assert card.finishes == ["gossip_thread"]
