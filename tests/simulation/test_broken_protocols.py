"""Protocols broken on purpose: the schedules of `test_faults` catch each within 50."""

from __future__ import annotations

import pytest
from simulated_faults.draws import draw_schedule
from simulated_faults.run import Outcome, run_schedule

from gossipdp.protocol.actions import Send
from gossipdp.protocol.members import Membership
from gossipdp.protocol.messages import Propose
from gossipdp.protocol.pairing import Exchanging, Pairing, PairingAction
from gossipdp.protocol.worker import WorkerProtocol

MOST = 50
LARGEST = 8
"""Small ones are enough."""


def first_caught(worker_type: type[WorkerProtocol]) -> Outcome:
    for seed in range(MOST):
        outcome = run_schedule(draw_schedule(seed, largest=LARGEST), worker_type=worker_type)
        if outcome.broken:
            return outcome
    raise AssertionError(f"{MOST} schedules found nothing")


class Overlapping(WorkerProtocol):
    """Accepts a proposal while it exchanges with another."""

    class pairing_type(Pairing):
        def asked(self, peer: int, proposal: Propose) -> list[PairingAction]:
            if isinstance(self.state, Exchanging):
                return self.accept(peer, proposal)
            return super().asked(peer, proposal)


class LosingBusy(WorkerProtocol):
    """Notes who has to wait, and does not say so: who asked waits for ever."""

    class pairing_type(Pairing):
        def refuse(self, peer: int, proposal: Propose) -> list[PairingAction]:
            actions = super().refuse(peer, proposal)
            return [action for action in actions if not isinstance(action, Send)]


class BuryingNobody(WorkerProtocol):
    """Declares nobody dead."""

    class membership_type(Membership):
        def declare_dead(self, rank: int) -> bool:
            return False


def test_overlapping_exchanges_are_caught() -> None:
    assert first_caught(Overlapping).broken == "one exchange at a time"


def test_a_lost_busy_is_caught() -> None:
    assert first_caught(LosingBusy).broken == "no deadlock"


def test_the_dead_who_are_not_removed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Those who wait for the dead send much: a consolidation without end is cut off early.
    monkeypatch.setattr("simulated_faults.run.ENDED_WITHIN_S", 10.0)
    outcome = first_caught(BuryingNobody)
    # In the first schedule somebody crashes before, or only during, consolidation.
    assert outcome.broken in ("views converge", "consolidation ends")
    assert not run_schedule(draw_schedule(outcome.seed, largest=LARGEST)).broken
