"""One training of ``gossipdp demo``: its workers and its results.

A worker writes all its measurements to its log, so that those of a killed worker are known too.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from gossipdp import logs
from gossipdp.gossip.counters import Counters
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.log import FILE_PATTERN, worker_file, write_process_end
from gossipdp.rules import shown_rate
from gossipdp_lab.console import say
from gossipdp_lab.demo import DemoArguments
from gossipdp_lab.demo.watch import LiveView, fault_results
from gossipdp_lab.report.run_log import RunLog

if TYPE_CHECKING:
    from gossipdp.launcher.faults import FaultRecord
    from gossipdp.launcher.supervisor import Failure

METRIC, DIGEST = "metric_before_average", "average_digest"
"""Logged by each worker that comes to the end."""

MAX_RESTARTS = 100
"""More than the kills of a demo; a worker that always dies by itself is given up in the end."""

AVERAGE_FILE, REPORT_FILE = "averaged_model.pt", "report.html"


@dataclass(frozen=True)
class Training:
    """A training that is over.

    metric_name: the metric of the workload; a key of ``summary``.
    summary: the content of ``--json``.
    problems: unexpected events, a line each.
    """

    metric_name: str
    run_log: RunLog
    summary: dict[str, Any]
    problems: list[str]


def train(arguments: DemoArguments, console: Console) -> Training:
    """Train with new workers, show their progress, and keep the averaged model.

    Raises:
        WorkerFailedError: a worker failed, and not by one of the faults.
    """
    from gossipdp.launcher.local import start_fork_server

    # The server imports torch and this module while this process does, so that workers need not.
    start_fork_server(also=[__name__, "sklearn.datasets"])
    import torch

    from gossipdp_lab.tasks import make_workload

    workload = make_workload(arguments.task)
    configuration = configuration_of(arguments, workload.batch_size)
    directory = arguments.directory
    _clear(directory)
    records, surprises = _run_workers(arguments, configuration, console)
    run_log = RunLog.read(directory)
    averaged = averaged_together(run_log)
    own_average_file(directory, averaged[0]).replace(directory / AVERAGE_FILE)
    for other in directory.glob("averaged_model-*.pt"):
        other.unlink()
    net = workload.make_model()
    net.load_state_dict(torch.load(directory / AVERAGE_FILE, weights_only=True))
    metric = {workload.metric_name: workload.evaluate(net)}
    summary = summarize(metric, run_log, configuration)
    results_of_faults = fault_results(records, run_log)
    if arguments.faults is not None:
        summary["faults"] = results_of_faults
    problems = []
    # Faults that repeat may be missed in part, and the worker killed last may not be back yet.
    if not any(clause.every for clause in arguments.fault_plan.clauses):
        problems += [str(each).strip() for each in records if each.missed]
        problems += not_back(results_of_faults) if arguments.restart else []
    problems += [
        f"worker {rank} came too late for the average and holds another one"
        for rank in average_digests(run_log)
        if rank not in averaged
    ]
    problems += [f"worker {each.rank} {each.ending.reason}, by itself" for each in surprises]
    return Training(workload.metric_name, run_log, summary, problems)


def _run_workers(
    arguments: DemoArguments, configuration: dict[str, Any], console: Console
) -> tuple[list[FaultRecord], list[Failure]]:
    """Return the faults as they happened, and the failures that no fault caused."""
    from gossipdp.launcher.faults import FaultInjector
    from gossipdp.launcher.local import launch

    say(console, _opening(arguments), markup=True)
    with LiveView(arguments.directory, num_workers=arguments.workers, console=console) as view:
        injector = None
        if arguments.faults is not None:
            injector = FaultInjector(
                arguments.fault_plan,
                arguments.workers,
                seed=arguments.seed,
                say=partial(say, console, markup=True),
            )
        surprises: list[Failure] = []

        def note_failure(failure: Failure) -> None:
            path = worker_file(arguments.directory, failure.rank)
            write_process_end(path, failure.process_id, failure.ending.reason)
            if not failure.is_injected:
                surprises.append(failure)

        # This process decides these two: a worker may have another working directory.
        task = replace(arguments, output=arguments.directory, samples=arguments.num_samples)
        launch(
            train_worker,
            world_size=arguments.workers,
            args=(task, arguments.least_s, configuration),
            on_poll=view.poll,
            max_restarts=MAX_RESTARTS if arguments.restart else 0,
            on_failure=note_failure,
            faults=injector,
        )
    return injector.records if injector is not None else [], surprises


def configuration_of(arguments: DemoArguments, batch_size: int) -> dict[str, Any]:
    """Return the options, as ``--json`` and the logs have them."""
    asked = asdict(arguments)
    for name in ("json", "output", "compare"):
        del asked[name]
    asked.update(workload=arguments.task, samples=arguments.num_samples, batch_size=batch_size)
    for name in ("faults", "restart", "learning_rate", "samples", "seconds"):
        if not asked[name]:
            del asked[name]
    return {**asked, "least_seconds": arguments.least_s} if arguments.least_s else asked


def _opening(arguments: DemoArguments) -> str:
    workers = "1 worker" if arguments.workers == 1 else f"{arguments.workers} workers"
    text = f"{arguments.task}: {workers}, graph {arguments.graph}, method {arguments.method}"
    if arguments.method in ("a2cid2", "gossip"):
        text += f", comm rate {shown_rate(arguments.comm_rate)}"
    if arguments.seconds:
        text += f", {arguments.seconds:g} s"
    else:
        text += f", {arguments.num_samples:,} samples"
        text += f" and at least {arguments.least_s:g} s" if arguments.least_s else ""
    text += f", {arguments.fault_plan}" if arguments.faults is not None else ""
    return f"{text}, start them again" if arguments.restart else text


def _clear(directory: Path) -> None:
    """Remove the files of a former run, so that none passes for one of this run."""
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in (FILE_PATTERN, "averaged_model-*.pt"):
        for path in directory.glob(pattern):
            path.unlink()


# In a worker.


def train_worker(arguments: DemoArguments, least_s: float, configuration: dict[str, Any]) -> None:
    """Train in this process together with the other workers, then average.

    Training goes on until ``least_s`` is over and, unless that alone decides, the workers together
    have used up the samples.
    """
    import torch

    from gossipdp.parallel.schedule import ProgressLR
    from gossipdp_lab.tasks import make_workload
    from gossipdp_lab.tasks.command import wrap

    logs.configure()
    rank = int(os.environ["RANK"])
    # Seeds differ on purpose: the wrapper gives every worker rank 0's initial parameters.
    torch.manual_seed(arguments.seed * 1_000_003 + rank)
    workload = make_workload(arguments.task)
    net = workload.make_model()
    optimizer = workload.make_optimizer(net)
    for group in optimizer.param_groups:
        group["lr"] = arguments.learning_rate or group["lr"]
    loader = workload.train_loader(rank, arguments.workers, arguments.seed)
    model = wrap(
        net,
        optimizer,
        arguments,
        batch_size=workload.batch_size,
        budget_samples=arguments.num_samples,
        least_s=least_s,
        log_dir=arguments.directory,
    )
    model.log(**configuration)
    began_s = since_boot_s()
    if int(os.environ.get("GOSSIPDP_RESTARTS") or 0) > 0:
        lives = RunLog.read(arguments.directory).workers[rank].lives
        began_s = lives[0].at_s if lives else began_s
    # Under all-reduce the model itself looks at the time, since all must end with the same step.
    is_timed = least_s > 0 and arguments.method != "allreduce"

    def progress() -> float:
        passed = (since_boot_s() - began_s) / least_s if is_timed else 1.0
        return min(1.0, passed) if arguments.seconds and is_timed else min(model.progress(), passed)

    batches = _until(lambda: progress() >= 1, loader) if is_timed else model.batches(loader)
    schedule = ProgressLR(
        optimizer, progress, lambda at: workload.rate_factor(at, model.world_size)
    )
    for batch in batches:
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.log(loss=loss)
    # The worker's own model, without the changes by exchanges since its last step.
    model.log(metric_before_average=workload.evaluate(net))
    model.consolidate()
    torch.save(net.state_dict(), own_average_file(arguments.directory, rank))
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    model.log(average_digest=digest.hexdigest())


def _until(is_over: Callable[[], bool], loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches, epoch after epoch."""
    while not is_over():
        for batch in loader:
            yield batch
            if is_over():
                return


def own_average_file(directory: Path, rank: int) -> Path:
    """Return the file of one worker's model after averaging; the parent keeps one of them."""
    return directory / f"averaged_model-{rank}.pt"


# The results.


def average_digests(run_log: RunLog) -> dict[int, str]:
    """Return the digest of the bits of the average, by rank, of the workers that hold one."""
    return {
        rank: str(worker.last_values()[DIGEST])
        for rank, worker in run_log.workers.items()
        if worker.end and DIGEST in worker.last_values()
    }


def averaged_together(run_log: RunLog) -> list[int]:
    """Return the workers that hold the average: all that finished, unless one came too late."""
    digests = average_digests(run_log)
    if not digests:
        raise ValueError("no worker came to the end of the run; read their messages above")
    ((common, _),) = Counter(digests.values()).most_common(1)
    return [rank for rank, digest in digests.items() if digest == common]


def summarize(
    metric: dict[str, float], run_log: RunLog, configuration: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of ``--json``, except the faults; ``metric`` is the averaged model's.

    achieved_comm_rate is that of the whole network: 2 * exchanges / all gradient steps. A killed
    worker has no metric_before_average.
    """
    workers = run_log.workers
    counts = {
        rank: each.counts[-1] if each.counts else Counters() for rank, each in workers.items()
    }
    end = workers[averaged_together(run_log)[0]].end
    exchanges = sum(each.exchanges_initiated for each in counts.values())
    return {
        **metric,
        "train_seconds": max(worker.trained_s for worker in workers.values()),
        "samples": sum(each.samples for each in counts.values()),
        "achieved_comm_rate": 2 * exchanges / sum(each.gradient_steps for each in counts.values()),
        "consensus_distance": end.consensus_distance if end else None,
        "workers": [
            {
                "rank": rank,
                "metric_before_average": worker.last_values().get(METRIC) if worker.end else None,
                "gradient_steps": counts[rank].gradient_steps,
                "exchanges": counts[rank].exchanges,
                "waited_seconds": counts[rank].waited_seconds,
                "samples_per_second": (
                    counts[rank].samples / worker.trained_s if worker.trained_s else 0.0
                ),
            }
            for rank, worker in workers.items()
        ],
        "configuration": configuration,
    }


def not_back(faults: Sequence[dict[str, Any]]) -> list[str]:
    """Name the workers that should have been started again, and did not take part again."""
    return [
        f"worker {fault['rank']}, killed at {fault['at_s']:.1f} s, did not come back"
        for fault in faults
        if fault["kind"] == "kill" and "missed" not in fault and fault["rejoined_s"] is None
    ]


def write_reports(arguments: DemoArguments, run_log: RunLog) -> list[str]:
    """Write the page of the run; return lines that name the files."""
    from gossipdp_lab.report.command import render

    directory = arguments.directory
    (directory / REPORT_FILE).write_text(render(run_log, directory.name), "utf-8")
    return [
        f"report: {escape(str(shown(directory / REPORT_FILE)))}",
        f"logs: {escape(str(shown(directory / FILE_PATTERN)))}",
        f"averaged model: {escape(str(shown(directory / AVERAGE_FILE)))}",
    ]


def shown(path: Path) -> Path:
    """Return a path relative to the working directory, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
