"""Several workers notice one event; each event is shown once."""

import pytest

from gossipdp.gossip.counters import Counters
from gossipdp.observe.events import events_of
from gossipdp.protocol.actions import Notice

LATER_S = 1.5
"""The time from a notice to its record; the witnesses' clocks differ besides."""


def record(
    by: int, at_s: float, rank: int, kind: str, silent_s: float | None = None
) -> tuple[float, Counters]:
    """Return the record in which a worker tells what it noticed at this time."""
    own_s = at_s - 10.0 * by
    notice = Notice(rank, kind, own_s, silent_s=silent_s)
    return at_s + LATER_S, Counters(rank=by, at_s=own_s + LATER_S, noticed=(notice,))


@pytest.mark.parametrize(
    ("notices", "expected"),
    [
        # On a ring a heartbeat a link: the last worker hears of it long after the first.
        ([(by, 100.0 + 0.5 * by, None) for by in range(32)], [(100.0, tuple(range(32)))]),
        # It is soon lost again.
        (
            [(0, 100.0, 0.4), (1, 100.5, 0.9), (1, 108.0, 0.5), (0, 108.2, 0.7)],
            [(100.0, (0, 1)), (108.0, (0, 1))],
        ),
        # A late notice belongs to the event with the same silence,
        ([(0, 100.0, 5.0), (1, 140.0, 45.5)], [(100.0, (0, 1))]),
        ([(0, 100.0, 5.0), (1, 140.0, 5.0)], [(100.0, (0,)), (140.0, (1,))]),
        ([(0, 100.0, 5.0), (1, 140.0, None)], [(100.0, (0,)), (140.0, (1,))]),
        # though another worker, which has no link there, knows no silence,
        (
            [(0, 87.0, 1.0), (1, 87.5, 1.6), (2, 88.0, None), (3, 97.0, 11.0)],
            [(87.0, (0, 1, 2, 3))],
        ),
        # and does not draw the next loss to the last.
        (
            [(0, 100.0, 5.0), (1, 140.0, 45.0), (0, 141.0, 0.5), (1, 141.5, 1.0)],
            [(100.0, (0, 1)), (141.0, (0, 1))],
        ),
    ],
)
def test_notices_of_one_loss_are_one_event(notices, expected):
    """Each is (witness, time, silence); the worker that was lost is number 9."""
    events = events_of(record(by, at_s, 9, "lost", silent_s) for by, at_s, silent_s in notices)
    assert [(event.at_s, event.witnesses) for event in events] == expected


def test_an_event_has_the_earliest_silence_and_the_last_notice():
    told = record(0, 101.0, 9, "silent", 7.0), record(2, 100.0, 9, "silent", 5.0)
    (event,) = events_of(told)
    assert (event.at_s, event.last_noticed_s, event.witnesses) == (100.0, 101.0, (0, 2))
    assert event.silent_s == pytest.approx(6.0)


def test_workers_and_kinds_are_told_apart_and_the_earliest_comes_first():
    told = record(0, 2.0, 9, "silent"), record(0, 2.0, 8, "silent"), record(0, 1.0, 9, "lost")
    found = [(each.rank, each.kind) for each in events_of(told)]
    assert found == [(9, "lost"), (8, "silent"), (9, "silent")]
