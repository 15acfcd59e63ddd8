"""Faults of ``gossipdp demo``: which are asked for, doing them, and what the workers noticed.

Times count from the first gradient step of the run, which the workers' logs tell.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gossipdp.links.clock import since_boot_s

if TYPE_CHECKING:
    from gossipdp.launcher.supervisor import Failure
    from gossipdp.observe.log import RunLog
    from gossipdp.report.live import WorkerProgress

# How long after a fault all who could notice it have.
KILL_NOTICED_S, STOP_NOTICED_S = 1.0, 6.0
# A worker that was killed is back by then, and a run goes on so long after its last fault.
BACK_S = 8.0
AFTER_S = 4.0


@dataclass(frozen=True)
class Fault:
    """One fault; a worker that is stopped goes on after ``for_s``."""

    rank: int
    kind: Literal["kill", "stop"]
    at_s: float
    for_s: float = 0.0

    def __str__(self) -> str:
        if self.kind == "kill":
            return f"kill worker {self.rank} at {self.at_s:g} s"
        return f"stop worker {self.rank} at {self.at_s:g} s for {self.for_s:g} s"


def parse_faults(kill: str | None, stop: str | None, *, num_workers: int) -> tuple[Fault, ...]:
    """The faults of ``--kill`` and ``--stop``, in order of time.

    Args:
        kill: such as ``"0@5s,3@9s"``.
        stop: such as ``"2@4s:8s"``.
        num_workers: of the run.

    Raises:
        ValueError: it cannot be read, a rank does not exist or is named twice, or all are named.

    Example:
        >>> print(*parse_faults("3@9s,0@5", "2@4s:8s", num_workers=4), sep="; ")
        stop worker 2 at 4 s for 8 s; kill worker 0 at 5 s; kill worker 3 at 9 s
    """
    number = r"(\d+(?:\.\d+)?)s?"
    faults = []
    for word in _words(kill):
        match = re.fullmatch(rf"(\d+)@{number}", word)
        if match is None:
            raise ValueError(f"--kill is {kill!r}; write RANK@TIME, such as 0@5s or 0@5s,3@9s")
        faults.append(Fault(int(match[1]), "kill", float(match[2])))
    for word in _words(stop):
        match = re.fullmatch(rf"(\d+)@{number}:{number}", word)
        if match is None:
            raise ValueError(
                f"--stop is {stop!r}; write RANK@TIME:DURATION, such as 2@4s:8s, several with "
                "commas between them"
            )
        faults.append(Fault(int(match[1]), "stop", float(match[2]), float(match[3])))
    for fault in faults:
        if fault.rank >= num_workers:
            raise ValueError(
                f"--{fault.kind}: there is no rank {fault.rank} among {num_workers} workers; "
                f"choose 0 to {num_workers - 1}"
            )
        if fault.kind == "stop" and fault.for_s == 0:
            raise ValueError(f"--stop {stop}: stop a worker for longer than 0 s")
    ranks = [fault.rank for fault in faults]
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        raise ValueError(
            f"--kill and --stop name worker {twice} twice; one fault befalls a worker at most"
        )
    if len(ranks) == num_workers:
        raise ValueError(
            f"--kill and --stop name all {num_workers} workers; spare at least one, so that "
            "somebody goes on"
        )
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.rank)))


def least_duration_s(faults: Sequence[Fault], *, restart: bool) -> float:
    """How long a run must train so that all faults happen, are noticed, and are got over."""
    after = [
        fault.at_s + fault.for_s + (BACK_S if restart and fault.kind == "kill" else AFTER_S)
        for fault in faults
    ]
    noticed = [fault.at_s + STOP_NOTICED_S + 1 for fault in faults if fault.kind == "stop"]
    return max(after + noticed, default=0.0)


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",")]


class Injection:
    """One fault on its way; ``happened_s`` by ``since_boot_s``, ``missed`` why it did not."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.process_id: int | None = None
        self.happened_s: float | None = None
        self.missed: str | None = None
        self.is_confirmed = fault.kind == "stop"
        self.goes_on_s: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether it has neither happened nor failed to."""
        return self.happened_s is None and self.missed is None


class FaultInjector:
    """Does the faults when they are due; call :meth:`poll` a few times a second.

    No fault comes before all workers train: until then a death ends the run, as it should.

    Args:
        faults: what to do.
        workers: the latest of each worker, by rank, as :class:`~gossipdp.report.live.LiveView` has.
        say: shows a line.
        send: ``os.kill``.
        clock: that of the workers' logs, the same for all processes of a machine.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        workers: Sequence[WorkerProgress],
        say: Callable[[str], None] = lambda text: None,
        *,
        send: Callable[[int, int], None] = os.kill,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        self.injections = [Injection(fault) for fault in faults]
        self._workers = workers
        self._say = say
        self._send = send
        self._clock = clock
        self._gone: set[int | None] = set()

    @property
    def first_step_s(self) -> float | None:
        """When the run made its first gradient step; None while not all workers train."""
        began = [worker.began_s for worker in self._workers if worker.began_s is not None]
        return min(began) if len(began) == len(self._workers) else None

    def poll(self) -> None:
        """Do what is due."""
        first_s = self.first_step_s
        if first_s is None:
            return
        now = self._clock()
        for injection in self.injections:
            if injection.goes_on_s is not None and now >= injection.goes_on_s:
                self._resume(injection)
                self._say(f"{now - first_s:5.1f} s  worker {injection.fault.rank} may go on")
            if injection.is_due and now >= first_s + injection.fault.at_s:
                self._inject(injection, now, now - first_s)

    def ended(self, failure: Failure) -> bool:
        """Note that a worker's process failed; whether that is the end of one that was killed."""
        self._gone.add(self._workers[failure.rank].process_id)
        for injection in self.injections:
            if (
                injection.fault.rank == failure.rank
                and injection.happened_s is not None
                and not injection.is_confirmed
                and "SIGKILL" in failure.ending.reason
            ):
                injection.is_confirmed = True
                return True
        return False

    def close(self) -> None:
        """Let those who are stopped go on, and settle which faults happened."""
        for injection in self.injections:
            if injection.goes_on_s is not None:
                self._resume(injection)
                injection.missed = "the run ended while the worker was stopped"
            elif injection.is_due:
                injection.missed = "the run had ended by then"
            elif injection.happened_s is not None and not injection.is_confirmed:
                injection.missed = "the worker had ended by then"

    def _inject(self, injection: Injection, now: float, since_s: float) -> None:
        fault = injection.fault
        worker = self._workers[fault.rank]
        assert worker.process_id is not None
        if worker.ended:
            injection.missed = "the worker had ended by then"
        elif worker.process_id in self._gone:
            injection.missed = "the worker had died by then"
        else:
            try:
                self._send(
                    worker.process_id, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
                )
            except ProcessLookupError:
                injection.missed = "the worker had ended by then"
        if injection.missed is not None:
            return
        injection.happened_s = now
        injection.process_id = worker.process_id
        if fault.kind == "stop":
            injection.goes_on_s = now + fault.for_s
        did = "killed" if fault.kind == "kill" else f"stopped for {fault.for_s:g} s"
        self._say(f"{since_s:5.1f} s  worker {fault.rank} {did}")

    def _resume(self, injection: Injection) -> None:
        injection.goes_on_s = None
        assert injection.process_id is not None
        try:
            self._send(injection.process_id, signal.SIGCONT)
        except ProcessLookupError:
            pass


def fault_results(injections: Sequence[Injection], run_log: RunLog) -> list[dict[str, Any]]:
    """What ``--json`` says of each fault.

    at_s: seconds from the first gradient step, as it happened; as planned where it did not.
    detected_s: by each worker that lived and ran meanwhile, seconds from the fault to its notice;
        None where it noticed nothing.
    rejoined_s: seconds from the fault to when the first of the others noticed that the worker takes
        part again.
    """
    first_s = min(
        (life.at_s for worker in run_log.workers.values() for life in worker.lives), default=0.0
    )
    results: list[dict[str, Any]] = []
    for injection in injections:
        fault, happened_s = injection.fault, injection.happened_s
        if happened_s is None or not injection.is_confirmed:
            results.append(
                {
                    "rank": fault.rank,
                    "kind": fault.kind,
                    "at_s": fault.at_s,
                    "detected_s": {},
                    "rejoined_s": None,
                    "missed": injection.missed,
                }
            )
            continue
        kinds = ("dead",) if fault.kind == "kill" else ("stopped", "dead")
        witnesses = _witnesses(injection, injections, run_log)
        detected = _noticed_by(
            run_log, fault.rank, kinds, dict.fromkeys(run_log.workers, happened_s)
        )
        # Only from who saw it go: one that came back meanwhile sees all others for the first time.
        back = _noticed_by(run_log, fault.rank, ("rejoined",), detected)
        result: dict[str, Any] = {
            "rank": fault.rank,
            "kind": fault.kind,
            "at_s": round(happened_s - first_s, 3),
            "detected_s": {
                str(rank): round(detected[rank] - happened_s, 3) if rank in detected else None
                for rank in witnesses
            },
            "rejoined_s": round(min(back.values()) - happened_s, 3) if back else None,
        }
        if injection.missed is not None:
            result["missed"] = injection.missed
        results.append(result)
    return results


def _noticed_by(
    run_log: RunLog, rank: int, kinds: Collection[str], since_s: Mapping[int, float]
) -> dict[int, float]:
    """When each worker of ``since_s`` first noticed this of ``rank``, from its time on."""
    found: dict[int, float] = {}
    for witness, from_s in since_s.items():
        for notice in run_log.workers[witness].notices:
            if notice.rank == rank and notice.what in kinds and notice.at_s >= from_s:
                found.setdefault(witness, notice.at_s)
    return found


def _witnesses(injection: Injection, injections: Sequence[Injection], run_log: RunLog) -> list[int]:
    """The workers that ran from a fault until they could have noticed it."""
    fault, from_s = injection.fault, injection.happened_s
    assert from_s is not None
    to_s = from_s + (KILL_NOTICED_S if fault.kind == "kill" else STOP_NOTICED_S)
    away = {fault.rank}
    for other in injections:
        if other is injection or other.happened_s is None:
            continue
        until_s = other.happened_s + other.fault.for_s
        if other.fault.kind == "kill":
            lives = run_log.workers[other.fault.rank].lives
            until_s = min(
                (life.at_s for life in lives if life.at_s > other.happened_s), default=float("inf")
            )
        if other.happened_s <= to_s and until_s >= from_s:
            away.add(other.fault.rank)
    return [rank for rank in run_log.workers if rank not in away]
