"""The exchanges of the others while one worker misbehaves, on the simulated network.

:func:`watch` runs the real protocol over one event twice: with the worker to which it happens, and
with the others alone, on the graph over them (``removed``). It counts the exchanges of each of the
others in every window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias, get_args

from simulated_faults.network import FaultyNetwork

from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.worker import Action, WorkerProtocol
from gossipdp_lab.simulate.network import Conditions, make_workers

What: TypeAlias = Literal[
    "stop", "slow 4", "slow 16", "held", "poisoned", "bad link", "first step", "kill"
]
WHATS: tuple[What, ...] = get_args(What)
SLOW: tuple[What, ...] = ("slow 4", "slow 16")

STEP_S = 0.05
TRANSFER_S = 0.003
LATENCY_S = 0.0005
WINDOW_S = 0.5
TIMEOUT_S = 5.0
BAD_TRANSFER_S = 1.0
"""An exchange over a bad link takes this long."""


@dataclass(frozen=True)
class Event:
    """Something that happens to the worker ``rank``, the last one of a graph.

    Attributes:
        what: ``stop``: its process stands still; ``slow 4``: its steps take 4 times as long, from
            the beginning; ``held``: it answers BUSY and asks nobody; ``bad link``: an exchange with
            it takes a second; ``first step``: it makes no step, but answers; ``kill``: it dies,
            and comes back as another process.
        begins_s, lasts_s: when it happens, and when it is over; poison stays.
    """

    what: What
    rank: int
    begins_s: float = 6.0
    lasts_s: float = 8.0


@dataclass(frozen=True)
class Course:
    """The exchanges of each of the others, by window.

    Attributes:
        others: their ranks.
        seen, removed: for each of them, how many exchanges it completed in each window; with the
            worker, and without it.
    """

    event: Event
    others: list[int]
    seen: dict[int, list[int]]
    removed: dict[int, list[int]]

    def share(self, begins_s: float, ends_s: float) -> float:
        """Return how much of what they make without the worker all the others make."""
        seen, removed = zip(*self._sums(begins_s, ends_s), strict=True)
        return sum(seen) / max(1, sum(removed))

    def least_share(self, begins_s: float, ends_s: float) -> float:
        """Return the share of the one that fares worst."""
        return min(seen / max(1, removed) for seen, removed in self._sums(begins_s, ends_s))

    def _sums(self, begins_s: float, ends_s: float) -> list[tuple[int, int]]:
        """Return the exchanges of each of the others, with the worker and without it."""
        windows = slice(round(begins_s / WINDOW_S), round(ends_s / WINDOW_S))
        both = ((self.seen[rank], self.removed[rank]) for rank in self.others)
        return [(sum(seen[windows]), sum(removed[windows])) for seen, removed in both]


def watch(
    graph: str,
    num_workers: int,
    event: Event,
    *,
    comm_rate: float | None = 1.0,
    seed: int = 0,
    after_s: float = 4.0,
) -> Course:
    """Run an event; ``comm_rate`` None: the workers choose it."""
    live_graph = LiveGraph(Constants.of(build_graph(graph, num_workers), comm_rate or 1.0))
    bad, what, others = event.rank, event.what, list(range(num_workers - 1))
    ends_s = event.begins_s + event.lasts_s

    def run(constants: Constants) -> dict[int, list[int]]:
        workers = make_workers(
            constants, seed=seed, timeout_s=TIMEOUT_S, sets_own_rate=comm_rate is None
        )
        random = Random(f"{seed} steps")
        has_begun = set[int]()

        def step_s(rank: int) -> float:
            is_first = rank not in has_begun
            has_begun.add(rank)
            factor = float(what.removeprefix("slow ")) if rank == bad and what in SLOW else 1.0
            seconds = random.uniform(0.9, 1.1) * factor * STEP_S
            return ends_s if rank == bad and is_first and what == "first step" else seconds

        def transfer_s(first: int, second: int) -> float:
            is_on = event.begins_s <= network.engine.now < ends_s
            is_bad = bad in (first, second) and what == "bad link" and is_on
            return BAD_TRANSFER_S if is_bad else TRANSFER_S

        network = FaultyNetwork(
            workers, constants.edges, Conditions(lambda *_: LATENCY_S, transfer_s, step_s)
        )

        def tell(change: Callable[[WorkerProtocol, float], list[Action]]) -> None:
            network.perform(bad, change(workers[bad], network.engine.now))

        def come_back() -> None:
            network.join(network.new_process(bad, 1000 + seed, others[0]))

        changes: list[tuple[What, float, Callable[[], None]]] = [
            ("stop", event.begins_s, lambda: network.stall(bad, event.lasts_s)),
            ("kill", event.begins_s, lambda: network.crash(bad)),
            ("kill", ends_s, come_back),
            ("held", event.begins_s, lambda: tell(WorkerProtocol.hold)),
            ("held", ends_s, lambda: tell(WorkerProtocol.release)),
            ("poisoned", event.begins_s, lambda: tell(WorkerProtocol.poisoned)),
        ]
        for kind, at_s, change in changes:
            if bad in workers and kind == what:
                network.engine.at(at_s, change)
        counts: dict[int, list[int]] = {rank: [] for rank in others}
        for window in range(1, round((ends_s + after_s) / WINDOW_S) + 1):
            network.engine.run(until=window * WINDOW_S)
            for rank, windows in counts.items():
                worker = network.workers[rank]
                now = worker.exchanges_initiated + worker.exchanges_answered
                windows.append(now - sum(windows))
        return counts

    return Course(event, others, run(live_graph.original), run(live_graph.constants(others)))
