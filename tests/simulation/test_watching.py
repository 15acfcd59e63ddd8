"""The ledger and the checks of a protocol notice what they are there to notice."""

from functools import partial

import pytest
import torch
from driven_worker import make_worker
from simulated_faults.invariants import ProtocolChecks
from simulated_faults.ledger import InvariantBroken, Ledger

from gossipdp.dynamics.phase import Phase
from gossipdp.protocol.actions import Begin
from gossipdp.protocol.exchange_rate import ExchangeRate
from gossipdp.protocol.messages import ExchangeId
from gossipdp_lab.simulate.population import Population, Training

ID = ExchangeId(0, 0, 1)


def make_ledger() -> Ledger:
    start = torch.tensor([[1.0, 2.0], [5.0, -2.0], [0.0, 3.0]], dtype=torch.float64)
    population = Population(start, 2, momentum=True)
    training = Training(None, partial(torch.optim.SGD, lr=0.1), population)
    return Ledger(training, {rank: Phase(0.5, 1.0) for rank in range(3)})


def test_a_second_exchange_and_two_gains_in_one_are_noticed():
    ledger = make_ledger()
    first, second = (
        ledger.exchange_began(rank, Begin(1 - rank, ID, alpha_tilde), 1.0)
        for rank, alpha_tilde in enumerate((0.8, 0.7))
    )
    with pytest.raises(InvariantBroken, match="one exchange at a time"):
        ledger.exchange_began(0, Begin(2, ExchangeId(2, 0, 1), 0.8), 1.1)
    ledger.data_arrived(0, ID, second, 1.1)
    with pytest.raises(InvariantBroken, match=r"an exchange conserves x \+ c/2"):
        ledger.data_arrived(1, ID, first, 1.2)


def test_a_row_that_changes_by_itself_is_noticed():
    ledger = make_ledger()
    ledger.population.x[2, 0] += 1e-6
    with pytest.raises(InvariantBroken, match=r"the mean of x \+ c/2 is conserved"):
        ledger.check_sum(1.0)


@pytest.mark.parametrize(
    ("spoil", "invariant"),
    [
        (lambda worker: worker.pairing._parked.update({5: None}), "waits only go up"),
        (lambda worker: worker.pairing._refused.update({2: None}), "forgets no waiter"),
        (lambda worker: worker.pairing.available.update({3: 1.0}), "of a lost link"),
        (lambda worker: setattr(worker, "exchanges_failed", -1), "counts never fall"),
        (lambda worker: setattr(worker.pairing, "backlog", 5), "demands are bounded"),
        (lambda worker: worker.pairing.tick(), "an answer is timed"),
        (lambda worker: setattr(worker.clock, "_rate", 9.0), "ticks as its worker wants"),
        (lambda worker: setattr(worker.exchange_rate, "_step_s", 9.0), "follows the steps"),
        (lambda worker: worker.exchange_rate.__dict__.update(_tokens=5.0), "tokens are bounded"),
    ],
)
def test_a_spoilt_protocol_is_noticed(spoil, invariant):
    checks, worker = ProtocolChecks(), make_worker(0, 2, exchange_rate=ExchangeRate())
    checks.check(worker)
    spoil(worker)
    with pytest.raises(InvariantBroken, match=invariant):
        checks.check(worker)
