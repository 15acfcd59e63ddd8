"""The account of chunks that are read in place: what has left, in which order, and what is owed."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.links.frames import ChunkKey, FrameError, FrameType, Header
from gossipdp.links.shared_memory import SharedChunks


def chunk_at(segment: int, offset: int, length: int) -> Header:
    key = ChunkKey(0, 0, 0, 0)
    return Header(FrameType.EXCHANGE_CHUNK, 0, length, key, segment=segment, offset=offset)


@given(st.lists(st.sampled_from(["shared", "bytes", "read"]), max_size=60))
def test_chunks_leave_in_order(events: list[str]) -> None:
    """Against a model: a chunk has left when it and all before it are read, or sent as bytes."""
    account = SharedChunks()
    model: deque[bool] = deque()  # of each chunk sent: whether the peer can still read it
    num_read = num_shared = 0
    for event in events:
        if event == "shared":
            account.sent()
            model.append(True)
            num_shared += 1
        elif event == "bytes":
            account.sent_as_bytes()
            model.append(False)
        elif num_read < num_shared:
            num_read += 1
            model[model.index(True)] = False
            assert account.confirm(num_read)
        while model and not model[0]:
            model.popleft()
        assert account.num_unread == len(model)
        assert account.is_in_doubt == bool(model)
    assert not account.confirm(num_read)


def test_more_than_was_sent_is_not_confirmed() -> None:
    account = SharedChunks()
    account.sent()
    for num_read in (2, 2**32 - 1):
        with pytest.raises(FrameError, match="acknowledged"):
            account.confirm(num_read)


def test_a_segment_is_confirmed_once_and_only_if_it_was_offered() -> None:
    account = SharedChunks()
    account.offered = 3
    account.confirm_segment(2)
    for number in (0, 1, 2, 4):
        with pytest.raises(FrameError, match="last offered is 3"):
            account.confirm_segment(number)
    account.confirm_segment(3)
    assert account.ready == 3


def test_a_place_lies_inside_a_segment_that_was_offered() -> None:
    account = SharedChunks()
    memory = bytes(range(200))
    assert account.map(1, memoryview(memory))
    assert account.find(chunk_at(1, 64, 136)) == memory[64:200]
    for header in (chunk_at(1, 64, 137), chunk_at(1, 2**63, 1), chunk_at(2, 0, 1)):
        with pytest.raises(FrameError, match="of segment"):
            account.find(header)


def test_an_older_segment_goes_when_a_chunk_names_a_newer() -> None:
    account = SharedChunks()
    for number in (1, 2):
        assert account.map(number, memoryview(bytes([number]) * 64))
    assert not account.map(1, memoryview(bytes(64)))
    assert account.find(chunk_at(1, 0, 1)) == b"\x01"  # on its way when the second was offered
    assert account.find(chunk_at(2, 0, 1)) == b"\x02"
    with pytest.raises(FrameError):
        account.find(chunk_at(1, 0, 1))


def test_what_is_owed_is_said_once() -> None:
    account = SharedChunks()
    assert not account.owes
    account.read()
    account.read()
    assert account.owes
    assert account.say() == 2
    assert not account.owes
