"""One run over links with any neighbour policy, ours or a candidate, watched as it pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple, final

from gossipdp.protocol.neighbours import NeighbourPolicy
from gossipdp.protocol.pairing import Pairing
from gossipdp.protocol.worker import Method
from gossipdp.simulate.links import TIMEOUT_STEPS, run_protocols
from gossipdp.simulate.network import make_workers
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.trace import Trace

MakePolicy = Callable[[Random], NeighbourPolicy]


class Watched(NamedTuple):
    """A run, and how it paired."""

    trace: Trace
    repeated_share: float
    """Share of exchanges with the same partner as before, over all ends but each first."""


def run_watched(scenario: Scenario, method: Method, make_policy: MakePolicy) -> Watched:
    """Simulate workers that only mix, over links: :func:`~gossipdp.simulate.links.run_links` with
    a policy of its own for each worker.

    Args:
        scenario: its objective takes no gradients; its ``neighbour_policy`` plays no part.
        method: a2cid2 or gossip.
        make_policy: makes the policy of one worker.
    """
    constants = scenario.make_constants()
    timeout_s = TIMEOUT_STEPS * scenario.compute_time.nominal_s
    workers = make_workers(constants, seed=scenario.seed, method=method, timeout_s=timeout_s)
    policies = {}
    for rank, worker in workers.items():
        policy = _WatchedPolicy(make_policy(Random(f"{scenario.seed} policy {rank}")))
        policies[rank] = policy
        worker.pairing = Pairing(
            rank=rank, incarnation=0, policy=policy, alpha_tilde=worker.alpha_tilde
        )
    trace = run_protocols(scenario, method, workers, lambda share: None)
    num_repeated = sum(policy.num_repeated for policy in policies.values())
    num_followed = sum(policy.num_followed for policy in policies.values())
    return Watched(trace, num_repeated / max(1, num_followed))


@final
class _WatchedPolicy(NeighbourPolicy):
    """Another policy, whose exchanges are counted."""

    def __init__(self, policy: NeighbourPolicy) -> None:
        self.num_repeated = 0
        self.num_followed = 0
        self._policy = policy
        self._last: int | None = None

    def draw(self, available: Mapping[int, float]) -> list[int]:
        return self._policy.draw(available)

    def exchanged(self, peer: int, *, initiated: bool) -> None:
        if self._last is not None:
            self.num_followed += 1
            self.num_repeated += peer == self._last
        self._last = peer
        self._policy.exchanged(peer, initiated=initiated)
