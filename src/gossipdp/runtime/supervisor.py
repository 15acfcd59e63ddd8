"""``Supervisor``: run a script on local workers, each in an interpreter of its own.

torchrun kills all workers when one dies; here they are watched one by one. Everything happens in
the calling thread, which sleeps in one selector over the workers' output and the signals; only
``torch`` is imported beside it, for the store, and another host's store is watched.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from gossipdp.runtime.crew import Crew, Failure, describe, shown_rank
from gossipdp.runtime.environment import check_platform, identity_variables, join_variables
from gossipdp.runtime.keeper import Keeper
from gossipdp.runtime.launcher import available_cores
from gossipdp.runtime.restarts import Restarts
from gossipdp.runtime.script_worker import Outlet, Relay, ScriptWorker
from gossipdp.runtime.team import HostingTeam, Team
from gossipdp.runtime.warm_spare import WarmSpare, reap, script_words

POLL_S = 0.1
# Of another launcher's that started us: they would tell a worker things that are not so.
NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GOSSIPDP_JOIN",
    "GOSSIPDP_RELAYED",
    "GOSSIPDP_RESTARTS",
    "GOSSIPDP_REPORT",
    "GOSSIPDP_RUN_ID",
    "GOSSIPDP_SECRET",
)


def check_num_workers(num_workers: int) -> int:
    """``num_workers``; raises ValueError where it is less than one."""
    if num_workers < 1:
        raise ValueError(f"-n is {num_workers}; start at least one worker")
    return num_workers


class Supervisor:
    """Starts ``num_workers`` times ``command``, passes output and signals on, watches each worker.

    Args:
        command: a program and its arguments, such as ``[sys.executable, "-u", "train.py"]``.
        num_workers: how many on this machine.
        team: the run they belong to; by default one of their own, on loopback.
        max_restarts: how often workers that died, all together, are started again. Where
            ``command`` is ``python -u`` and a script, a spare with ``torch`` imported waits.
        modules: what that spare imports besides ``torch``.
        host: the address on which the workers listen; by default that of the interface that leads
            to the store.
        variables: environment of the workers; by default this process's.
        output: takes the workers' standard output, each line after "[rank] ".
        errors: takes their standard error.
        on_failure: called once a failure, with whether the others go on.
        on_addresses: called with the workers' addresses when they are known.

    Raises:
        ValueError: fewer than one worker, or fewer than no restarts.
        RendezvousError: the port is in use.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        team: Team | None = None,
        max_restarts: int = 0,
        modules: Sequence[str] = (),
        host: str | None = None,
        variables: Mapping[str, str] | None = None,
        output: BinaryIO | None = None,
        errors: BinaryIO | None = None,
        on_failure: Callable[[Failure, bool], None] = lambda failure, others_go_on: None,
        on_addresses: Callable[[Mapping[int, tuple[str, int]]], None] = lambda addresses: None,
    ) -> None:
        check_platform()
        check_num_workers(num_workers)
        self._restarts = Restarts(max_restarts)
        self._command = list(command)
        self._num_workers = num_workers
        self._modules = modules
        self._team = team or HostingTeam(num_workers, "127.0.0.1", 0, None)
        self._variables = self._common_variables(
            host, os.environ if variables is None else variables
        )
        output, errors = output or sys.stdout.buffer, errors or sys.stderr.buffer
        self._output = Outlet(output, "standard output", errors)
        self._errors = Outlet(errors, "standard error", output)
        self._on_addresses = on_addresses
        self._selector = selectors.DefaultSelector()
        # Crew and these dicts know a worker by its rank, or, if it is yet to get one, by a negative
        # stand-in (see _key).
        self._workers: dict[int, ScriptWorker] = {}
        self._begun: set[int] = set()
        self._given_ranks: dict[int, int] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._run_id, self._secret = self._team.run_id, self._team.secret
        self._ended_elsewhere: str | None = None
        self._keeper: Keeper | None = None
        self._spare: WarmSpare | None = None
        self._orphaned_groups: set[int] = set()
        self._crew = Crew(
            self._has_begun,
            on_failure=lambda failure, go_on: self._failed(failure, go_on, on_failure),
            restarts=self._restarts,
            start_again=self._start_again,
            others_elsewhere=self._team.others_elsewhere,
        )

    def run(self) -> int:
        """Run to the end of all workers; the exit code.

        Returns:
            0 if all succeeded, the last time each was started; 1 if any failed; 128 + the signal
            that ended the run (130 on Ctrl+C).
        """
        crew, team = self._crew, self._team
        with self._selector, _caught_signals(self._selector) as caught:
            try:
                for local_rank in range(self._num_workers):
                    crew.add(self._start(local_rank, team.variables(local_rank)))
                self._watch_out(caught)
            finally:
                crew.kill()
                while crew.watch():
                    self._relay(0.01)
                self._relay(0)
                self._close()
        if caught:
            return 128 + caught[0]
        return 1 if crew.failures or self._ended_elsewhere else 0

    def report(self) -> str:
        """Who failed, and the end of what it wrote to standard error; empty if nobody did."""
        report = describe([self._shown(failure) for failure in self._crew.failures])
        if self._ended_elsewhere and not report:
            return f"the run ended before it had begun: {self._ended_elsewhere}"
        return report

    def _watch_out(self, caught: _Caught) -> None:
        """From the start of the workers to their end, or to an error of ours."""
        crew, team = self._crew, self._team
        self._keeper = Keeper()
        for worker in self._workers.values():
            self._keeper.add(worker.pid)
        if self._restarts.max_restarts and script_words(self._command) is not None:
            self._spare = WarmSpare(self._command, self._variables, self._modules)
            self._keeper.add(self._spare.pid)
        # After the workers, so that they import torch meanwhile.
        team.open()
        while crew.watch():
            due_in_s = crew.next_restart_in_s()
            self._relay(POLL_S if due_in_s is None else min(POLL_S, due_in_s))
            self._take_reports()
            if self._spare is not None:
                before = self._spare.pid
                if self._spare.keep_alive():
                    self._keeper.remove(before)
                    self._keeper.add(self._spare.pid)
            self._orphaned_groups = {group for group in self._orphaned_groups if reap(group)}
            elsewhere = team.check()
            if elsewhere is not None and not crew.ending and not crew.begun:
                self._ended_elsewhere = elsewhere
                crew.end(signal.SIGTERM)
            while len(caught) > caught.handled:
                crew.end(caught[caught.handled])
                caught.handled += 1
                # Without those of our workers who have begun: a team may await the others for them.
                if not (crew.begun or team.has_begun(set())):
                    team.tell_failed("another host's launcher was interrupted")

    def _close(self) -> None:
        """End what is not a worker, and let go of the workers."""
        if self._spare is not None:
            self._spare.close()
        for worker in self._workers.values():
            worker.close()
            self._release(worker.pid)
        if self._keeper is not None:
            if self._spare is not None:
                self._release(self._spare.pid)
            self._keeper.close()
        self._team.close()

    def _release(self, group: int) -> None:
        if self._keeper is not None:
            self._keeper.remove(group)

    def _common_variables(self, host: str | None, given: Mapping[str, str]) -> dict[str, str]:
        """What is the same for all workers here, those to come included."""
        threads = max(1, len(available_cores()) // self._num_workers)
        variables = {"OMP_NUM_THREADS": str(threads), **given}
        for name in NOT_INHERITED:
            variables.pop(name, None)
        variables["LOCAL_WORLD_SIZE"] = str(self._num_workers)
        if host is not None:
            variables["GOSSIPDP_HOST"] = host
        return variables

    def _start(self, local_rank: int, own: Mapping[str, str]) -> ScriptWorker:
        key = self._key(local_rank)
        worker = ScriptWorker(
            key,
            self._command,
            {**self._variables, **own},
            self._output,
            self._errors,
            label=shown_rank(self._given_ranks.get(key, key)),
            spare=self._spare,
        )
        self._workers[key] = worker
        if self._keeper is not None:
            self._keeper.add(worker.pid)
        for stream in (worker.standard_output, worker.standard_error):
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream)
        return worker

    def _start_again(self, key: int, anew: bool) -> ScriptWorker:
        """The next life of a worker: it joins the others, or all meet once more."""
        team, local_rank = self._team, self._local_rank(key)
        self._retire(self._workers[key])
        if anew:
            if not self._crew.running:  # the first of them
                self._begun.clear()
                self._addresses.clear()
                team.begin_anew()
            own = {
                **team.variables(local_rank),
                "GOSSIPDP_RESTARTS": str(self._restarts.count(key)),
            }
            return self._start(local_rank, own)
        rank = self._given_ranks.get(key, key if key >= 0 else None)
        addresses = team.published_addresses() | self._addresses
        others = [addresses[other] for other in reversed(addresses) if other != rank]
        own = {
            **team.rejoin_variables(local_rank, rank),
            **identity_variables(self._run_id, self._secret),
            **join_variables(others, self._restarts.count(key)),
        }
        return self._start(local_rank, own)

    def _retire(self, worker: ScriptWorker) -> None:
        """Forget a life that has ended; something that it started may still hold its output."""
        self._release(worker.pid)
        for stream in (worker.standard_output, worker.standard_error):
            # Closed already where the life after this one could not be started.
            if not stream.pipe.closed and stream.pipe.fileno() in self._selector.get_map():
                self._selector.unregister(stream.pipe)
        worker.close()

    def _has_begun(self) -> bool:
        self._take_reports()
        return self._crew.begun or self._team.has_begun(self._begun)

    def _failed(
        self, failure: Failure, others_go_on: bool, tell: Callable[[Failure, bool], None]
    ) -> None:
        group = self._workers[failure.rank].pid
        self._release(group)
        if self._spare is not None and reap(group):
            self._orphaned_groups.add(group)
        shown = self._shown(failure)
        if not others_go_on:
            who = f"on another host worker {shown_rank(shown.rank)}"
            self._team.tell_failed(f"{who} {failure.ending.reason}")
        tell(shown, others_go_on)

    def _shown(self, failure: Failure) -> Failure:
        """With the rank that a joining worker was given meanwhile."""
        rank = self._given_ranks.get(failure.rank, failure.rank)
        return dataclasses.replace(failure, rank=rank)

    def _take_reports(self) -> None:
        """Note what the workers say: who trains, where all are, which rank a joiner was given."""
        for key, worker in self._workers.items():
            for report in worker.reports.take():
                if report.begins:
                    self._begun.add(key)
                if report.rank is not None:
                    self._given_ranks[key] = report.rank
                    worker.relabel(str(report.rank))
                if report.run_id is not None:
                    self._run_id = report.run_id
                    self._secret = report.secret or self._secret
                if report.addresses is not None:
                    for rank, address in report.addresses.items():
                        self._addresses.pop(rank, None)  # the latest come last
                        self._addresses[rank] = address
                    self._on_addresses(dict(self._addresses))

    def _key(self, local_rank: int) -> int:
        rank = self._team.rank(local_rank)
        return -1 - local_rank if rank is None else rank

    def _local_rank(self, key: int) -> int:
        return -1 - key if key < 0 else key - self._key(0)

    def _relay(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Relay) and not key.data.take_in():
                self._selector.unregister(key.fileobj)
            elif key.data is None:
                key.fileobj.recv(4096)  # type: ignore[union-attr]


class _Caught(list[int]):
    """Signals received so far; ``handled`` of them have been passed on."""

    handled = 0


@contextmanager
def _caught_signals(selector: selectors.BaseSelector) -> Iterator[_Caught]:
    """Collect SIGINT and SIGTERM instead of acting on them; each wakes the selector."""
    caught = _Caught()
    woken, waker = socket.socketpair()
    with woken, waker:
        waker.setblocking(False)
        selector.register(woken, selectors.EVENT_READ)
        previous_waker = signal.set_wakeup_fd(waker.fileno())
        previous = {
            number: signal.signal(number, lambda received, frame: caught.append(received))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield caught
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_waker)
