"""A simulated network that loses links and workers as a schedule says, and is watched."""

import hashlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from random import Random
from typing import final

from gossipdp.graph.constants import LiveGraph
from gossipdp.protocol.actions import Begin, Finished, Send
from gossipdp.protocol.messages import ConsolidationMessage, ReductionMessage
from gossipdp.protocol.worker import Action, WorkerProtocol
from gossipdp_lab.simulate.network import Conditions, Wire
from simulated_faults.averaged_rows import AveragedRows, Frame
from simulated_faults.invariants import Invariants
from simulated_faults.ledger import Ledger
from simulated_faults.network import FaultyNetwork
from simulated_faults.schedule import FaultSchedule

LEAVES_AFTER_S = 0.25
"""A worker that has left ends its process once what it said has arrived."""


@final
class WatchedNetwork(FaultyNetwork):
    """The network of one run under faults.

    Args:
        schedule: what is lost when a message is sent or an exchange begins, and how long
            everything takes.
        workers, edges: as of any network.
        ledger: the rows.
        averaged: what consolidation averages.
        live_graph: for the invariants.
        log: told what happens.
    """

    def __init__(
        self,
        schedule: FaultSchedule,
        workers: Mapping[int, WorkerProtocol],
        edges: Collection[tuple[int, int]],
        *,
        ledger: Ledger,
        averaged: AveragedRows,
        live_graph: LiveGraph,
        log: Callable[[str], None] | None,
    ) -> None:
        longest_s = _longest_hunger_s(schedule)
        self.invariants = Invariants(
            self, ledger, live_graph, step_s=schedule.step_s, longest_hunger_s=longest_s
        )
        self._digest = hashlib.blake2b(digest_size=8)
        self._log = log
        self._delays_s = {broken.begin: broken.delay_s for broken in schedule.broken_exchanges}
        self._ending = {fault.frame: fault.kind for fault in schedule.ending}
        self._is_ending = False
        self._num_begins = 0
        self._num_frames = 0
        everybody = [worker.membership.own for worker in workers.values()]
        for worker in workers.values():
            worker.membership.merge_all(everybody)
        random, jitter_s = Random(f"{schedule.seed} network"), schedule.latency_jitter_s

        def latency_s(sender: int, receiver: int) -> float:
            return schedule.latency_s + jitter_s * random.random()

        super().__init__(
            workers,
            edges,
            Conditions(
                latency_s=latency_s,
                transfer_s=lambda *_: schedule.transfer_s * random.uniform(0.5, 1.5),
                step_s=lambda rank: schedule.step_s * random.uniform(0.5, 1.5),
            ),
            ledger,
            averaged=averaged,
            lost_at_messages=set(schedule.lost_at_messages),
            detection_s=latency_s,
        )

    def before(self, rank: int, actions: Sequence[Action]) -> None:
        now = self.engine.now
        self._digest.update(struct.pack("<dii", now, rank, len(actions)))
        if self._log is not None:
            for action in actions:
                self._log(f"{now:.6f} {rank:2}: {action}")
        self.invariants.before(rank, actions)

    def after(self, rank: int, actions: Sequence[Action]) -> None:
        self.invariants.after(rank)
        for action in actions:
            if isinstance(action, Begin):
                self._lose_exchange(rank, action)
            elif self._is_ending:
                self._lose_frame(rank, action)

    def poll(self, rank: int) -> None:
        super().poll(rank)
        if rank not in self.crashed and rank not in self._stalled_until:
            self.invariants.polled(rank)

    def stop_losses(self) -> None:
        """From now on no message and no exchange loses its link."""
        self._delays_s.clear()
        self._lost_at_messages = ()

    def begin_ending(self) -> None:
        """Workers are done from now on."""
        self._is_ending = True

    def digest(self, rows: bytes) -> str:
        """Return a digest of every input so far, its number of actions, and ``rows``."""
        digest = self._digest.copy()
        digest.update(rows)
        digest.update(repr(sorted(self.num_messages.items())).encode())
        return digest.hexdigest()

    def _lose_exchange(self, rank: int, begin: Begin) -> None:
        delay_s = self._delays_s.pop(self._num_begins, None)
        self._num_begins += 1
        if delay_s is not None:
            self.engine.at(self.engine.now + delay_s, partial(self.cut, rank, begin.peer))

    def _lose_frame(self, rank: int, action: Action) -> None:
        match action:
            case Finished():
                leave = partial(self._leave, self.workers[rank])
                self.engine.at(self.engine.now + LEAVES_AFTER_S, leave)
            case Send(peer=peer, message=envelope):
                if isinstance(envelope.message, ConsolidationMessage | ReductionMessage):
                    self._count_frame(rank, peer)

    def send_chunk(self, wire: Wire, rank: int, peer: int, frame: Frame) -> None:
        super().send_chunk(wire, rank, peer, frame)
        if self._is_ending:
            self._count_frame(rank, peer)

    def _count_frame(self, rank: int, peer: int) -> None:
        kind = self._ending.get(self._num_frames)
        self._num_frames += 1
        if kind is None:
            return
        if self._log is not None:
            self._log(f"{self.engine.now:.6f} FAULT {kind} with a frame of {rank} to {peer}")
        # Not at once: whoever performs actions just now must be left to do so.
        if kind == "cut":
            self.engine.at(self.engine.now, partial(self.cut, rank, peer), priority=-1)
        else:
            victim = rank if kind == "sender crashes" else peer
            self.engine.at(self.engine.now, partial(self._die, self.workers[victim]), priority=-1)

    def _die(self, worker: WorkerProtocol) -> None:
        """Unless it would be the last one."""
        others = [rank for rank in self.invariants.live() if rank != worker.rank]
        if self.lives(worker) and any(rank not in self.left for rank in others):
            self.crash(worker.rank)

    def _leave(self, worker: WorkerProtocol) -> None:
        if self.lives(worker):
            self.crash(worker.rank)


def _longest_hunger_s(schedule: FaultSchedule) -> float:
    """Return how long a demand may wait, for silence to be noticed and for a busy hub's turn.

    A saturated hub of policy ``available`` draws whom it serves, so that a leaf may be passed over
    for several rounds of all.
    """
    turn_s = schedule.transfer_s + 3.0 * (schedule.latency_s + schedule.latency_jitter_s)
    rounds_s = 8.0 * schedule.num_workers * turn_s
    return 4.0 * schedule.timeout_s + 16.0 * schedule.step_s + rounds_s
