"""Replicas of several processes, each to its supervisor one worker: they live and end together.

The processes of a replica meet at a store of their own, made anew with each life of the replica: no
process group survives the death of a member. Those that hold the same shard in different replicas
meet as the workers of a run do, so each process reports the addresses of its own shard's network,
and a replica that is started again joins one network for each of its processes.
"""

import dataclasses
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import final

import msgspec

from gossipdp.launcher.environment import identity_variables, join_variables, replica_variables
from gossipdp.launcher.store import HostedStore
from gossipdp.launcher.supervisor import Ending, WorkerProcess
from gossipdp.launcher.team import Report


@dataclasses.dataclass
class Network:
    """What the processes of one shard have told: by which addresses, id and secret it is joined."""

    addresses: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    run_id: str | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)

    def take(self, report: Report) -> None:
        """Note what a process says; the latest addresses come last."""
        for replica, address in (report.addresses or {}).items():
            self.addresses.pop(replica, None)
            self.addresses[replica] = address
        self.run_id = report.run_id or self.run_id
        self.secret = report.secret or self.secret

    def join_variables(self, replica: int, num_restarts: int) -> dict[str, str]:
        """The variables by which a process of that replica joins this network."""
        others = [self.addresses[each] for each in reversed(self.addresses) if each != replica]
        joins = join_variables(others, num_restarts)
        return identity_variables(self.run_id, self.secret) | joins


class Replicas:
    """Starts replicas of ``num_shards`` processes each.

    Args:
        num_shards: processes of a replica.
        start_process: starts one, with these variables and a label for its output.
    """

    def __init__(
        self, num_shards: int, start_process: Callable[[Mapping[str, str], str], WorkerProcess]
    ) -> None:
        self._start_process = start_process
        self._networks = [Network() for _ in range(num_shards)]

    def start(self, own: Mapping[str, str]) -> "ReplicaProcess":
        """Start the replica whose variables, as for a worker of one process, are ``own``."""
        store = HostedStore()
        num_shards, processes = len(self._networks), list[WorkerProcess]()
        with ExitStack() as started:
            started.callback(store.close)
            for shard, network in enumerate(self._networks):
                variables = replica_variables(own, shard, num_shards, (store.host, store.port))
                if own.get("GOSSIPDP_JOIN"):
                    num_restarts = int(own["GOSSIPDP_RESTARTS"])
                    variables |= network.join_variables(int(own["RANK"]), num_restarts)
                process = self._start_process(variables, f"{own['RANK']}.{shard}")
                started.callback(process.close)
                started.callback(process.kill_group)
                processes.append(process)
            store.open_in_background("", num_shards)  # the processes import torch meanwhile
            started.pop_all()
        return ReplicaProcess(processes, self._networks, store)


@final
class ReplicaProcess(WorkerProcess):
    """The processes of one replica; when one of them fails, the others are killed.

    They could not go on: FSDP's collectives wait for all of them. Once a signal was passed on, all
    of them end by themselves, and the first that has is no reason to kill another that may still be
    writing its checkpoint: the supervisor's patience ends that. ``processes`` are by shard.
    """

    def __init__(
        self, processes: Sequence[WorkerProcess], networks: Sequence[Network], store: HostedStore
    ) -> None:
        self.pid = processes[0].pid
        self._running = dict(enumerate(processes))
        self.processes, self._networks, self._store = processes, networks, store
        self._failure: Ending | None = None
        self._is_ending = False
        self._begun: set[int] = set()

    def waits_for(self) -> list[object]:
        return [thing for each in self._running.values() for thing in each.waits_for()]

    def take_reports(self) -> list[Report]:
        """What the first process says of its network; that it begins, once all of them do."""
        passed_on = []
        for shard, process in enumerate(self.processes):
            for report in process.take_reports():
                self._networks[shard].take(report)
                if report.begins:
                    self._begun.add(shard)
                if shard == 0:
                    passed_on.append(msgspec.structs.replace(report, begins=None))
        if len(self._begun) == len(self.processes):
            self._begun.clear()
            passed_on.append(Report(begins=True))
        return passed_on

    def poll(self) -> Ending | None:
        for shard, process in list(self._running.items()):
            ending = process.poll()
            if ending is None:
                continue
            del self._running[shard]
            if ending.reason and self._failure is None:
                reason = f"lost its process {shard}, which {ending.reason}"
                self._failure = dataclasses.replace(ending, reason=reason)
                if not self._is_ending:
                    self._kill_others()
        return None if self._running else self._failure or Ending()

    def _kill_others(self) -> None:
        for process in self._running.values():
            process.kill_group()
            process.send(signal.SIGKILL)  # it may not yet have made its group

    def send(self, number: int) -> None:
        self._is_ending = True
        for process in self._running.values():
            process.send(number)

    def kill_group(self) -> None:
        for process in self.processes:
            process.kill_group()

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self._store.close()
