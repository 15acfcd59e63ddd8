"""Protocols broken on purpose: the schedules of `test_faults` catch each within 50."""

from __future__ import annotations

import pytest

from gossipdp.protocol.actions import Send
from gossipdp.protocol.membership import Membership
from gossipdp.protocol.messages import Propose
from gossipdp.protocol.pairing import Exchanging, Pairing, PairingAction
from gossipdp.simulate.fault_draws import draw_schedule
from gossipdp.simulate.fault_run import Outcome, run_schedule

MOST = 50
LARGEST = 8
"""Small ones are enough."""


def first_caught() -> Outcome:
    for seed in range(MOST):
        outcome = run_schedule(draw_schedule(seed, largest=LARGEST))
        if outcome.broken:
            return outcome
    raise AssertionError(f"{MOST} schedules found nothing")


def test_overlapping_exchanges_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that accepts a proposal while it exchanges with another."""
    on_propose = Pairing._on_propose

    def overlap(self: Pairing, peer: int, proposal: Propose) -> list[PairingAction]:
        if isinstance(self._state, Exchanging):
            return self._accept(peer, proposal)
        return on_propose(self, peer, proposal)

    monkeypatch.setattr(Pairing, "_on_propose", overlap)
    assert first_caught().broken == "one exchange at a time"


def test_a_lost_busy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that notes who has to wait, and does not say so: who asked waits for ever."""
    busy = Pairing._busy

    def silent(self: Pairing, peer: int, proposal: Propose) -> list[PairingAction]:
        return [action for action in busy(self, peer, proposal) if not isinstance(action, Send)]

    monkeypatch.setattr(Pairing, "_busy", silent)
    assert first_caught().broken == "no deadlock"


def test_the_dead_who_are_not_removed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "declare_dead", lambda self, rank: False)
    # In the first schedule somebody crashes before, or only during, consolidation.
    assert first_caught().broken in ("views converge", "consolidation ends")
