"""Replicas of several processes, each one worker to its supervisor: they live and end together.

The processes of a replica meet at a store of their own. Each life of the replica makes a new one,
because no process group survives the death of a member. Processes of one shard in different
replicas meet as the workers of a run do. So each process reports the addresses of its own shard's
network, and a replica that is started again joins one network for each of its processes.

A new replica that joins a run (``gossipdp run --join``) does the same, with an address of each
network that its user gives. Its rank must be the same in all networks: the first process asks for
one in its own, as any joining worker does, and tells the others once it has it.
"""

import dataclasses
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import final

import msgspec

from gossipdp.launcher.environment import UNKNOWN_RANK, replica_variables
from gossipdp.launcher.joining import JoinInfo
from gossipdp.launcher.reports import Report
from gossipdp.launcher.store import HostedStore
from gossipdp.launcher.supervisor import Ending, WorkerProcess


def start_worker(
    join_infos: Sequence[JoinInfo],
    start_process: Callable[[Mapping[str, str]], WorkerProcess],
    own: Mapping[str, str],
) -> WorkerProcess:
    """Start a worker: a process, or a replica of one process for each of several shards.

    Args:
        join_infos: of the run, by shard.
        start_process: starts one process with these variables.
        own: variables of the worker, as for a worker of one process.
    """
    if len(join_infos) == 1:
        return start_process(own)
    store = HostedStore()
    num_shards, processes = len(join_infos), list[WorkerProcess]()
    with ExitStack() as started:
        started.callback(store.close)
        for shard, join_info in enumerate(join_infos):
            variables = replica_variables(own, shard, num_shards, (store.host, store.port))
            if own.get("GOSSIPDP_JOIN"):
                rank, num_restarts = own.get("RANK", UNKNOWN_RANK), own["GOSSIPDP_RESTARTS"]
                variables |= join_info.join_variables(int(rank), int(num_restarts))
            process = start_process(variables)
            started.callback(process.close)
            started.callback(process.kill_group)
            processes.append(process)
        store.open_in_background("", num_shards)  # the processes import torch meanwhile
        started.pop_all()
    return ReplicaProcess(processes, join_infos, store)


@final
class ReplicaProcess(WorkerProcess):
    """The processes of one replica; when one of them fails, the others are killed.

    They could not go on: FSDP's collectives wait for all of them. After a signal was passed on, all
    end by themselves. The end of the first is then no reason to kill another, which may still be
    writing its checkpoint; the supervisor's patience ends that. ``processes`` are by shard.
    """

    def __init__(
        self, processes: Sequence[WorkerProcess], join_infos: Sequence[JoinInfo], store: HostedStore
    ) -> None:
        self.pid = processes[0].pid
        self._running = dict(enumerate(processes))
        self.processes, self._join_infos, self._store = processes, join_infos, store
        self._failure: Ending | None = None
        self._is_ending = False
        self._begun: set[int] = set()

    def waits_for(self) -> list[object]:
        return [thing for each in self._running.values() for thing in each.waits_for()]

    def take_reports(self) -> list[Report]:
        """Return the reports of the first process, and that it begins once all of them do."""
        passed_on = []
        for shard, process in enumerate(self.processes):
            for report in process.take_reports():
                if report.begins:
                    self._begun.add(shard)
                if shard == 0:  # the supervisor takes note of its network
                    passed_on.append(msgspec.structs.replace(report, begins=None))
                else:
                    self._join_infos[shard].take(report)
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
