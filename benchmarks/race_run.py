"""One run of the race: real processes, the faults of a plan, and what came out of it.

Each row has the supervisor that its user would have: gossipdp the library's own, torchft one that
starts a killed replica again, the others one that ends the whole job at a death and starts it again
from its last checkpoint. All have the library's fault injector, which acts from outside, by process
id.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import torch
from support.byte_task import Task, bits_a_byte, texts
from support.conditions import SHARES
from support.hosts import Hosts, enter
from support.quality_rows import KINDS
from support.race_fleet import Fleet
from support.race_settings import RaceSettings, Values, newest_checkpoint, restarts_whole
from support.rows import Gossip

from gossipdp import WorkerFailedError
from gossipdp.launcher.faults import FaultInjector, FaultPlan
from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.processes import Ending, WorkerProcess
from gossipdp.launcher.supervisor import Supervisor, describe

NUM_MARKS, NUM_BINS = 28, 140
MAX_RESTARTS = 10_000
PATIENCE_S, GRACE_S = 15.0, 0.5
"""After the end of a run: for what a row has to do there, and for the others if one has ended."""


class Point(msgspec.Struct, frozen=True):
    """A point of a curve: seconds of the run, and the loss of the model then, in bits a byte.

    The loss is None where it is no finite number.
    """

    seconds: float
    loss: float | None


class Fault(msgspec.Struct, frozen=True):
    """A fault of the plan. at_s: seconds of the run; None if it was missed, for this reason."""

    kind: str
    rank: int
    planned_s: float
    at_s: float | None
    missed: str | None = None


class RaceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run.

    samples: that are in the final model.
    loss: of the final model on held-out text, bits a byte; None where it is no finite number.
    ended_s: seconds of the run at which the final model was there.
    start_s: from the start of a process to the end of its first step, the median of first lives.
    restarts_s: the same of each later life that made a step.
    imported_s: from there to the end of its imports, the median of first lives.
    num_lives: processes that were started.
    launcher_s: processor time of the launcher while it ran.
    steps: that each worker made in each of ``NUM_BINS`` equal parts of the run.
    """

    samples: int
    loss: float | None
    curve: list[Point]
    faults: list[Fault]
    sent_bytes: int
    ended_s: float
    start_s: float
    restarts_s: list[float]
    imported_s: float
    num_lives: int
    launcher_s: float = 0.0
    steps: list[list[int]] = []


def median(values: Sequence[float]) -> float:
    """Return the median; NaN of none."""
    return statistics.median(values or [math.nan])


def loss_of(parameters: Values, task: Task) -> float | None:
    """Return the loss on held-out text, bits a byte; None where it is no finite number."""
    net = task.make_model()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(parameters).float(), net.parameters())
    value = bits_a_byte(net, task)
    return value if math.isfinite(value) else None


def present_model(
    holds_all: bool, found: Sequence[tuple[dict[str, float], Values]]
) -> tuple[int, Values] | None:
    """Return samples and parameters of the model that these shelves hold; None of none."""
    if not found:
        return None
    if holds_all:
        header, values = max(found, key=lambda each: each[0]["samples"])
        return int(header["samples"]), values
    samples = sum(header["samples"] for header, _ in found)
    return int(samples), np.mean([values for _, values in found], axis=0)


def final_model(holds_all: bool, fleet: Fleet) -> tuple[int, Values] | None:
    """Return samples and parameters of the model at the end; None if nobody holds one.

    Where each worker holds a part, a life that did not come to the average of the end counts with
    its samples up to its last exchange that was seen.
    """
    last = fleet.held(range(len(fleet.num_lives)))
    voters = max((header["voters"] for header, _ in last), default=0)
    if holds_all or not voters:
        return present_model(holds_all, last)
    samples = 0
    for shelf in fleet.shelves.values():
        found = shelf.look()
        if found is not None:
            header = found[0]
            samples += int(header["samples" if header["voters"] == voters else "exchanged"])
    return samples, next(values for header, values in last if header["voters"] == voters)


def race(settings: RaceSettings, hosts: Hosts | None = None) -> RaceResult:
    """Train once, by the clock, and score it.

    Args:
        settings: what is trained, and what befalls it.
        hosts: where the workers run; None for this machine.

    Raises:
        WorkerFailedError: workers failed by themselves.
    """
    kind = KINDS[settings.name.kind]
    holds_all = kind.row.holds_all
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.save(folder / "text.npy", texts()[0].numpy())
        variables: Mapping[str, str] = {}
        if settings.join_ms is not None:  # before the clock starts: the launcher imports torchft
            variables = stack.enter_context(torchft_variables(settings, hosts))
        (folder / "run.json").write_bytes(msgspec.json.encode(settings))
        started_s = time.monotonic()
        fleet = Fleet(settings, folder, hosts, started_s)
        stack.callback(fleet.close)
        course = Course(settings, fleet, started_s)
        launcher_s = time.process_time()
        if kind.row is Gossip:
            supervise_gossip(course)
        else:
            supervise_job(course, variables)
        launcher_s = time.process_time() - launcher_s
        model = final_model(holds_all, fleet) or from_checkpoint(settings, folder)
        return result_of(course, model, launcher_s)


def result_of(course: Course, model: tuple[int, Values], launcher_s: float) -> RaceResult:
    """Score a run that is over. model: samples and parameters at the end."""
    fleet, settings, started_s = course.fleet, course.settings, course.started_s
    headers = {
        life: found[0]
        for life, shelf in fleet.shelves.items()
        if (found := shelf.look()) is not None
    }
    if not headers:
        raise WorkerFailedError(f"no worker has made a step\n{fleet.log_tail()}")
    samples, parameters = model
    loss = loss_of(parameters, settings.task)
    last_s = max(header["at_s"] for header in headers.values()) - started_s
    ended_s = max(last_s, settings.seconds)
    curve = [Point(at_s, loss_of(values, settings.task)) for at_s, values in course.marks]
    # 0 stands for a life that came too late to make a step.
    stepped = {life: h["first_step_s"] for life, h in headers.items() if h["first_step_s"]}
    first = [seconds for (_, life), seconds in stepped.items() if life == 0]
    imported = [header["imported_s"] for (_, life), header in headers.items() if life == 0]
    return RaceResult(
        samples=samples,
        loss=loss,
        curve=[*curve, Point(ended_s, loss)],
        faults=[
            Fault(r.kind, r.rank, r.planned_s, r.clock_s and r.clock_s - started_s, r.missed)
            for r in course.injector.records
        ],
        sent_bytes=round(sum(header["sent_bytes"] for header in headers.values())),
        ended_s=ended_s,
        start_s=median(first),
        restarts_s=[seconds for (_, life), seconds in stepped.items() if life],
        imported_s=median(imported),
        num_lives=sum(fleet.num_lives),
        launcher_s=launcher_s,
        steps=[steps_of(course, rank) for rank in range(settings.workers)],
    )


def steps_of(course: Course, rank: int) -> list[int]:
    """Return how many steps a worker made in each part of the run."""
    paths = [s.step_times for (each, _), s in course.fleet.shelves.items() if each == rank]
    ends = np.concatenate([np.fromfile(path) for path in paths if path.exists()] or [np.empty(0)])
    limits = (0, course.settings.seconds)
    counts: list[int] = np.histogram(ends - course.started_s, NUM_BINS, limits)[0].tolist()
    return counts


def from_checkpoint(settings: RaceSettings, folder: Path) -> tuple[int, Values]:
    """Return samples and parameters of the newest checkpoint, or of an untrained model."""
    torch.manual_seed(settings.seed)
    net, batches = settings.task.make_model(), 0
    if (newest := newest_checkpoint(folder)) is not None:
        found = torch.load(newest, weights_only=True)
        net.load_state_dict(found["row"]["net"])
        batches = found["batches"]
    flat = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    return batches * settings.task.batch_size, flat.double().numpy()


class Course:
    """A run under way.

    marks: seconds of the run, and the parameters of the model at that time, if there was one.
    """

    def __init__(self, settings: RaceSettings, fleet: Fleet, started_s: float) -> None:
        self.settings, self.fleet, self.started_s = settings, fleet, started_s
        self._holds_all = KINDS[settings.name.kind].row.holds_all
        self.marks: list[tuple[float, Values]] = []
        self._num_marks = 0
        self.injector = FaultInjector(
            FaultPlan.parse(settings.faults) if settings.faults else FaultPlan(),
            settings.workers,
            seed=settings.seed,
            clock=time.monotonic,
        )

    def look(self) -> float:
        """Note the model at a mark, without the workers' help; return how long ago the end was."""
        passed_s = time.monotonic() - self.started_s
        if self.fleet.quota is not None:
            is_over = passed_s >= self.settings.seconds
            turn = 0 if is_over else int(passed_s // self.settings.quota_s)
            self.fleet.quota.set(SHARES[turn % len(SHARES)])
        due_s = (self._num_marks + 1) * self.settings.seconds / NUM_MARKS
        if due_s <= passed_s and due_s < self.settings.seconds:
            self._num_marks += 1
            model = present_model(self._holds_all, self.fleet.held(self.fleet.live()))
            if model is not None:
                self.marks.append((passed_s, model[1]))
        if passed_s >= self.settings.seconds:
            self.injector.release()  # a worker that stands still goes on, in all rows
        return passed_s - self.settings.seconds


RESTART_DELAY_S = 0.1
"""From a death to the next start, as for the first restart of ``gossipdp run``."""
POLL_S = 0.05


class Job:
    """The workers of a row that brings no supervisor, as a cluster would supervise them.

    Args:
        num_workers: how many.
        start: starts the worker of a rank; the second argument counts the starts of the job, or of
            this worker if it is started again alone.
        trains: returns whether the process of a rank has made a step.
        faults: kills, stops and slows the workers.
        whole: a death ends all workers, and all start again; otherwise the dead one does.
        clock: seconds.
    """

    def __init__(
        self,
        num_workers: int,
        start: Callable[[int, int], WorkerProcess],
        trains: Callable[[int], bool],
        faults: FaultInjector,
        *,
        whole: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._trains, self._faults = start, trains, faults
        self._whole, self._clock = whole, clock
        self._due: dict[int, float] = dict.fromkeys(range(num_workers), -math.inf)
        self._starts = [0] * num_workers
        self._is_ending = False
        self.running: dict[int, WorkerProcess] = {}
        self.ended_well: set[int] = set()

    @property
    def all_train(self) -> bool:
        """Return whether every worker runs and has made a step."""
        ranks = range(len(self._starts))
        return all(self.trains(rank) for rank in ranks)

    def trains(self, rank: int) -> bool:
        """Return whether this worker runs and has made a step."""
        return rank in self.running and self._trains(rank)

    def wait_s(self) -> float:
        """Return the seconds until something is due."""
        return min(POLL_S, self._faults.wait_s())

    def step(self) -> bool:
        """Act on what has happened; return whether a worker runs or is to run."""
        for rank, process in list(self.running.items()):
            ending = process.poll()
            if ending is not None:
                self._ended(rank, ending)
        now = self._clock()
        for rank in [rank for rank, due_s in self._due.items() if now >= due_s]:
            if self.running.keys() & self._due.keys():
                break  # those of the job before are not all gone
            del self._due[rank]
            self.running[rank] = self._start(rank, self._starts[rank])
            self._starts[rank] += 1
        self._faults.step([JobWorker(self, rank) for rank in range(len(self._starts))])
        return bool(self.running or self._due)

    def end(self) -> None:
        """Kill all workers, and start no more."""
        self._is_ending = True
        self._faults.release()
        self._due.clear()
        for process in self.running.values():
            process.kill()

    def _ended(self, rank: int, ending: Ending) -> None:
        process = self.running.pop(rank)
        process.close()
        self._faults.ended(rank, ending.reason)
        if not ending.reason:
            self.ended_well.add(rank)
            return
        if rank in self._due or self.ended_well or self._is_ending:
            return  # the job was being ended for another's death, or is at its end
        due_s = self._clock() + RESTART_DELAY_S
        ranks = range(len(self._starts)) if self._whole else [rank]
        self._due.update(dict.fromkeys(ranks, due_s))
        if self._whole:
            for other in self.running.values():
                other.kill()


class JobWorker:
    """A worker of a job, for the fault injector."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank, self.runs, self.trains = rank, rank in job.running, job.trains(rank)
        self._job = job

    def send(self, number: int) -> None:
        self._job.running[self.rank].send(number)


def supervise_gossip(course: Course) -> None:
    """Run gossipdp's workers to their end, by the library's own supervisor."""
    fleet = course.fleet
    supervisor = Supervisor(
        LaunchPlan.on_hosts(course.settings.workers),
        fleet.start,
        max_restarts=MAX_RESTARTS,
        faults=course.injector,
    )

    def on_step() -> None:
        fleet.spares.follow(supervisor)
        if course.look() >= PATIENCE_S and not supervisor.ending:
            supervisor.end()

    ended_by = supervisor.run(on_step)
    if ended_by is not None:  # else a run that was cut short would be kept as a finished one
        raise SystemExit(128 + ended_by)
    if supervisor.failures and not any(shelf.look() for shelf in fleet.shelves.values()):
        raise WorkerFailedError(f"{describe(supervisor.failures)}\n{fleet.log_tail()}")


def supervise_job(course: Course, variables: Mapping[str, str]) -> None:
    """Run another row's workers to their end. variables: of every process."""
    settings, fleet = course.settings, course.fleet
    own = {"WORLD_SIZE": str(settings.workers), "MASTER_ADDR": "127.0.0.1", **variables}
    ports: dict[int, int] = {}

    def start(rank: int, number: int) -> WorkerProcess:
        if number not in ports:
            ports[number] = free_port()
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(ports[number])}
        return fleet.start({**own, **place})

    whole = restarts_whole(settings.name)
    job = Job(settings.workers, start, fleet.trains, course.injector, whole=whole)
    try:
        while job.step():
            if job.all_train:
                fleet.spares.prepare()
            since_end_s = course.look()
            # Those that still wait then wait for one that has ended.
            if since_end_s >= PATIENCE_S or (job.ended_well and since_end_s >= GRACE_S):
                break
            time.sleep(job.wait_s())
    finally:
        job.end()
        until_s = time.monotonic() + PATIENCE_S
        while job.step() and time.monotonic() < until_s:
            time.sleep(0.01)
    course.injector.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def torchft_variables(settings: RaceSettings, hosts: Hosts | None) -> Iterator[dict[str, str]]:
    """Keep a lighthouse, on the launcher's host, which nothing befalls; yield the variables."""
    os.environ.setdefault("RUST_LOG", "error")  # it logs every step
    from torchft.coordination import LighthouseServer

    def make() -> LighthouseServer:
        if hosts is not None:
            enter(hosts.names[-1])  # of this thread, and of those that the lighthouse starts
        return LighthouseServer(
            bind="0.0.0.0:0" if hosts is not None else "127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=settings.join_ms,
            heartbeat_timeout_ms=settings.heartbeat_ms,
        )

    with ThreadPoolExecutor(1) as pool:  # a thread of its own, which stays in that namespace
        lighthouse = pool.submit(make).result()
    address = lighthouse.address()
    if hosts is not None:
        address = f"http://{hosts.addresses[-1]}:{address.rpartition(':')[2]}"
    try:
        yield {
            "TORCHFT_LIGHTHOUSE": address,
            "TORCHFT_TIMEOUT_SEC": str(settings.timeout_s),
            "TORCHFT_QUORUM_TIMEOUT_SEC": str(settings.timeout_s),
        }
    finally:
        lighthouse.shutdown()
