"""A traceback that several workers write is passed on once, and nothing else is lost or moved."""

import io
import os

import pytest

from gossipdp.runtime.repeated_tracebacks import MAX_LINES, START, TracebackFolder
from gossipdp.runtime.script_worker import Outlet, Relay

TRACEBACK = [START, b'  File "train.py", line 3', b"    main()", b"ValueError: unknown graph"]
ONE_LINE = [b"the same traceback as worker 0's: ValueError: unknown graph"]


@pytest.fixture
def folders() -> list[TracebackFolder]:
    shown: dict[bytes, bytes] = {}
    return [TracebackFolder(shown) for _ in range(3)]


def test_only_the_first_worker_shows_it(folders: list[TracebackFolder]) -> None:
    assert folders[0].fold([b"step 1", *TRACEBACK, b"bye"], b"0") == [b"step 1", *TRACEBACK, b"bye"]
    assert folders[1].fold([b"step 1", *TRACEBACK, b"bye"], b"1") == [b"step 1", *ONE_LINE, b"bye"]
    with_ranks = [b"[rank2]: " + line for line in TRACEBACK]
    assert folders[2].fold(with_ranks, b"2") == ONE_LINE


def test_another_error_is_another_traceback(folders: list[TracebackFolder]) -> None:
    other = [*TRACEBACK[:-1], b"KeyError: 'x'"]
    assert folders[0].fold(TRACEBACK, b"0") == TRACEBACK
    assert folders[1].fold(other, b"1") == other
    # What one worker says again is news, such as of its next life.
    assert folders[0].fold(TRACEBACK, b"0") == TRACEBACK


def test_a_chain_is_told_link_by_link(folders: list[TracebackFolder]) -> None:
    between = [b"", b"The above exception was the direct cause of the following exception:", b""]
    last = [*TRACEBACK[:2], b"RuntimeError: no start"]
    chain = [*TRACEBACK, *between, *last]
    assert folders[0].fold(chain, b"0") == chain
    assert folders[1].fold(chain, b"1") == [
        *ONE_LINE, *between, b"the same traceback as worker 0's: RuntimeError: no start"
    ]  # fmt: skip


def test_lines_that_come_one_by_one_are_the_same(folders: list[TracebackFolder]) -> None:
    folders[0].fold(TRACEBACK, b"0")
    told = [folders[1].fold([line], b"1") for line in TRACEBACK]
    assert told == [[], [], [], ONE_LINE]


def test_a_traceback_that_is_cut_short_is_not_lost(folders: list[TracebackFolder]) -> None:
    assert folders[0].fold(TRACEBACK[:2], b"0") == []
    assert folders[0].release() == TRACEBACK[:2]
    assert folders[0].release() == []
    assert folders[1].fold([START, *TRACEBACK], b"1") == [START, *TRACEBACK]
    endless = [START, *[b"  File"] * (MAX_LINES + 5)]
    assert folders[2].fold(endless, b"2") == endless


def test_the_relay_folds_what_it_passes_on_and_remembers_all() -> None:
    stream = io.BytesIO()
    outlet = Outlet(stream, "standard error", stream)
    for rank in range(2):
        output, start = os.pipe()
        os.write(start, b"\n".join(TRACEBACK) + b"\nlast")
        os.close(start)
        relay = Relay(os.fdopen(output, "rb"), outlet, f"[{rank}] ".encode())
        assert relay.take_in()
        assert not relay.take_in()
        relay.flush()
        relay.pipe.close()
        assert list(relay.tail) == [line.decode() for line in (*TRACEBACK, b"last")]
    assert stream.getvalue().splitlines() == [
        *(b"[0] " + line for line in (*TRACEBACK, b"last")),
        b"[1] " + ONE_LINE[0],
        b"[1] last",
    ]


def test_the_relay_flushes_what_the_folder_holds() -> None:
    stream = io.BytesIO()
    outlet = Outlet(stream, "standard error", stream)
    output, start = os.pipe()
    os.write(start, START + b"\n  File")
    os.close(start)
    relay = Relay(os.fdopen(output, "rb"), outlet, b"[0] ")
    relay.take_in()
    assert stream.getvalue() == b""
    relay.flush()
    relay.pipe.close()
    assert stream.getvalue().splitlines() == [b"[0] " + START, b"[0]   File"]
