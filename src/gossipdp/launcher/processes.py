"""A worker of this machine over all its lives: a process, or a replica of several.

The processes of a replica meet at a store of their own. Each life makes a new one, because no
process group survives the death of a member.
"""

import abc
import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import final

from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.reports import ReportChannel
from gossipdp.launcher.store import HostedStore


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a worker's process; ``reason`` is empty if it ended well.

    ``reason`` completes "worker 3 ..." and "workers 3, 4 ..." alike.
    """

    reason: str = ""
    details: str = ""


def exit_reason(code: int) -> str:
    """Return an exit code in words, none for 0; a negative code is minus the signal."""
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    names = {each.value: each.name for each in signal.Signals}
    return f"died of signal {-code} ({names.get(-code, 'unknown')})"


class WorkerProcess(abc.ABC):
    """A process that leads its own group, so that what it started ends with it."""

    pid: int

    def __init__(self) -> None:
        self.reports = ReportChannel()

    def waits_for(self) -> Sequence[object]:
        """Return descriptors and the like; when something happens, one becomes readable."""
        return [self.reports.receiver]

    @abc.abstractmethod
    def poll(self) -> Ending | None:
        """Take in what has arrived, and return how it ended; None while it runs. Never block."""

    def close(self) -> None:
        """Let go of a process that has ended; a second call does nothing."""
        self.reports.close()
        # Process 1 of a container inherits what it left behind, and alone can reap that.
        with suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass

    def send(self, number: int) -> None:
        """Send the process a signal; valid until :meth:`poll` has returned its ending."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Send SIGKILL to everything in its process group, even after its own end."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill a process that runs, and what it started."""
        self.kill_group()
        self.send(signal.SIGKILL)  # it may not yet have made its group


StartProcess = Callable[[Mapping[str, str]], WorkerProcess]


@final
class SupervisedWorker:
    """One worker over all its lives.

    When one process of a replica fails, the others are killed. They could not go on: FSDP's
    collectives wait for all of them. After SIGTERM has been passed on, all end by themselves, and
    the end of one kills no other: that one may still be writing its checkpoint. If this takes too
    long, the supervisor kills all.

    Attributes:
        rank: -1, -2, ... for the first, second, ... joining worker that has no rank yet.
        processes: of the present or last life, by shard.
        begun: the shards of those that have met the others and train.
        trains: this life has made a gradient step.
        consolidated: it holds the average at the end of the run.
        saves: it takes a last checkpoint when it is ended, as it said last at ``saves_s``.
        missed_end: the run became complete without this worker.
        delay_s: from its latest failure to its next life.
        endings: of its former lives, and of this one once it has failed.
    """

    def __init__(self, local_rank: int, rank: int) -> None:
        self.local_rank, self.rank = local_rank, rank
        self.processes: list[WorkerProcess] = []
        self.begun: set[int] = set()
        self.trains = self.consolidated = self.saves = self.missed_end = False
        self.saves_s = self.delay_s = 0.0
        self.endings: tuple[Ending, ...] = ()
        self._running: dict[int, WorkerProcess] = {}
        self._store: HostedStore | None = None
        self._failure: Ending | None = None
        self._is_ending = False

    @property
    def runs(self) -> bool:
        """Return whether a process runs, as last seen by :meth:`poll`."""
        return bool(self._running)

    @property
    def takes_part(self) -> bool:
        """Return whether all processes of this life have begun."""
        return bool(self.processes) and len(self.begun) == len(self.processes)

    def start(self, plan: LaunchPlan, start_process: StartProcess, *, rejoins: bool) -> None:
        """Start its next life, which meets the others, or ``rejoins`` those that go on.

        ``start_process`` starts a process with these variables; what it raises leaves none.
        """
        self.close()
        self.trains = self.consolidated = self.saves = False
        num_shards, processes = len(plan.join_infos), list[WorkerProcess]()
        lives = (self.rank, len(self.endings)) if rejoins else None
        with ExitStack() as started:
            store = HostedStore() if num_shards > 1 else None
            if store is not None:
                started.callback(store.close)
            for shard in range(num_shards):
                there = None if store is None else store.address
                own = plan.worker_variables(self.local_rank, shard, there, rejoins=lives)
                processes.append(start_process(own))
                started.callback(processes[-1].close)
                started.callback(processes[-1].kill_group)
            if store is not None:
                store.open_in_background("", num_shards)  # the processes import torch meanwhile
            started.pop_all()
        self.processes, self._store, self._running = processes, store, dict(enumerate(processes))
        self.begun, self._failure, self._is_ending = set(), None, False

    def waits_for(self) -> list[object]:
        return [thing for each in self._running.values() for thing in each.waits_for()]

    def poll(self) -> Ending | None:
        """Return how this life ended; None while a process runs. Never block."""
        for shard, process in list(self._running.items()):
            ending = process.poll()
            if ending is None:
                continue
            del self._running[shard]
            if ending.reason and self._failure is None:
                if len(self.processes) > 1:
                    reason = f"lost its process {shard}, which {ending.reason}"
                    ending = dataclasses.replace(ending, reason=reason)
                self._failure = ending
                if not self._is_ending:
                    self.kill()
        return None if self._running else self._failure or Ending()

    def send(self, number: int) -> None:
        self._is_ending |= number in (signal.SIGINT, signal.SIGTERM)
        for process in self._running.values():
            process.send(number)

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()

    def kill_group(self) -> None:
        """Kill what the processes started and left behind, such as loader processes."""
        for process in self.processes:
            process.kill_group()

    def close(self) -> None:
        """Let go of the processes, which have ended or hang in the kernel."""
        self._running.clear()
        for process in self.processes:
            process.close()
        if self._store is not None:
            self._store.close()
