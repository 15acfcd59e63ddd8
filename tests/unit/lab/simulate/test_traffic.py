"""The order in which things arrive on a link."""

from __future__ import annotations

from gossipdp_lab.simulate.network import Wire


def test_messages_keep_their_order() -> None:
    wire = Wire(0, 1)
    assert wire.carry_message(0, 1.0, 0.5) == 1.5
    assert wire.carry_message(0, 1.125, 0.125) == 1.5  # not before the one ahead of it
    assert wire.carry_message(0, 2.0, 0.125) == 2.125
    assert wire.carry_message(1, 1.0, 0.125) == 1.125  # the other way has an order of its own


def test_data_follow_what_was_sent_before() -> None:
    wire = Wire(0, 1)
    wire.carry_message(0, 0.0, 0.5)
    assert wire.carry_data(0, 0.1, 0.0, 0.1) == (0.1, 0.5)


def test_messages_go_between_the_chunks_of_data_and_behind_the_last() -> None:
    wire = Wire(0, 1)
    assert wire.carry_data(0, 0.0, 10.0, 1.0) == (10.0, 11.0)
    assert wire.carry_message(0, 5.0, 0.1) == 5.1
    assert wire.carry_message(0, 10.0, 0.1) == 11.0
