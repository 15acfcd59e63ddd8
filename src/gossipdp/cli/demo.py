"""``gossipdp demo``: real workers train a small model on real data, in about half a minute."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from gossipdp.cli.demo_faults import least_duration_s, parse_faults
from gossipdp.cli.option_checks import check_output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gossipdp.cli.demo_faults import Fault, Injection
    from gossipdp.cli.demo_worker import DemoTask, WorkerResult
    from gossipdp.launcher.supervisor import Failure
    from gossipdp.tasks.workload import Workload

WorkloadName = Literal["digits", "pystdlib"]
MethodName = Literal["a2cid2", "gossip", "allreduce", "none"]
DEFAULT_SAMPLES = {"digits": 128_000, "pystdlib": 6_000}
"""Over all workers: about half a minute of training on two cores."""


@dataclass(frozen=True)
class DemoArguments:
    """Train a small model with several worker processes here, and show what happens."""

    workload: WorkloadName = "digits"
    """digits: handwritten digits, a small convolutional network; pystdlib: the source text of
    Python's standard library, a small byte-level transformer."""

    workers: int = 4
    """Worker processes."""

    graph: str = "ring"
    """ring, path, star, complete, exponential, hypercube, torus, random-regular or erdos-renyi."""

    method: MethodName = "a2cid2"
    """a2cid2: accelerated gossip; gossip: plain pairwise averaging; allreduce: synchronous;
    none: the workers train apart and are averaged at the end only."""

    comm_rate: float = 1.0
    """Exchanges per worker per gradient step."""

    slow_worker: str | None = None
    """RANK:FACTOR, such as 2:4: make one worker so many times slower; it waits after each
    backward pass."""

    kill: str | None = None
    """RANK@TIME, several with commas between them, such as 0@5s,3@9s: kill -9 those workers.
    Times count from the first gradient step of the run."""

    stop: str | None = None
    """RANK@TIME:DURATION, several with commas between them, such as 2@4s:8s: SIGSTOP, and SIGCONT
    after that time."""

    restart: bool = False
    """Start workers that were killed again; they rejoin the run."""

    samples: int | None = None
    """Samples to train on, all workers together; by default what takes about half a minute, and
    longer where faults want it."""

    seed: int = 0
    """Of data order and exchange timing. The initial model is that of rank 0."""

    pin: bool = False
    """Give each worker its own share of the cores."""

    disjoint: bool = False
    """No two workers see the same training data; for pystdlib whole packages go to one worker."""

    json: Path | None = None
    """Also write the results to this file."""

    output: Path | None = None
    """Directory for logs, figure and model; by default under runs/, replaced by the next run."""


def run(arguments: DemoArguments) -> int:
    """Train, show the results and write the files; returns the exit status.

    Raises ValueError for bad input, before any process starts.
    """
    check(arguments)

    from gossipdp.launcher.local import launch, start_fork_server

    start_fork_server()  # it imports torch while this process does so too
    from rich.console import Console

    from gossipdp.cli.demo_faults import FaultInjector, fault_results
    from gossipdp.cli.demo_worker import read_results, train_worker
    from gossipdp.errors import WorkerFailedError
    from gossipdp.observe.log import RunLog
    from gossipdp.report.live import LiveView

    workload, task = prepare(arguments)
    faults = _faults(arguments)
    console = Console()
    _clear(task.directory)
    console.print(_opening(arguments, task), highlight=False)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    with LiveView(
        task.directory,
        num_workers=arguments.workers,
        budget_samples=task.samples,
        console=console,
        least_s=task.least_s,
    ) as view:
        injector = FaultInjector(faults, view.workers, say)
        surprises: list[Failure] = []

        def poll() -> None:
            view.poll()
            injector.poll()

        def note_failure(failure: Failure) -> None:
            if not injector.ended(failure):
                surprises.append(failure)

        try:
            launch(
                train_worker,
                world_size=arguments.workers,
                args=(task,),
                pin=arguments.pin,
                on_poll=poll,
                max_restarts=len(faults) if arguments.restart else 0,
                on_failure=note_failure,
            )
        except WorkerFailedError:
            # What was killed on purpose is no failure of the run.
            if surprises:
                raise
        finally:
            injector.close()
    run_log = RunLog.read(task.directory)
    results = read_results(run_log)
    averaged = averaged_together(results)
    metric = _evaluate(workload, task, averaged)
    summary = summarize(workload, task, results, metric)
    if faults:
        summary["faults"] = fault_results(injector.injections, run_log)
    console.print(_table(workload, results))
    for line in _lines(workload, task, summary):
        console.print(line, highlight=False, soft_wrap=True)
    _write_reports(console, arguments, task)
    problems = _problems(injector.injections, results, averaged)
    problems += _crashes(surprises)
    if arguments.restart:
        problems += _not_back(summary.get("faults", ()))
    for problem in problems:
        console.print(f"[bold red]{problem}[/bold red]", highlight=False, soft_wrap=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
        console.print(f"results: {arguments.json}", highlight=False, soft_wrap=True, markup=False)
    return 1 if problems else 0


def check(arguments: DemoArguments) -> None:
    """Raise ValueError for what cannot be meant; quick, without torch."""
    for name, value, known in (
        ("workload", arguments.workload, get_args(WorkloadName)),
        ("method", arguments.method, get_args(MethodName)),
    ):
        if value not in known:
            raise ValueError(f"there is no {name} {value!r}; choose one of {', '.join(known)}")
    for option, number, least in (
        ("--workers", arguments.workers, 1),
        ("--samples", arguments.samples, 1),
        ("--seed", arguments.seed, 0),
    ):
        if number is not None and number < least:
            raise ValueError(f"{option} is {number}; it must be at least {least}")
    if not (math.isfinite(arguments.comm_rate) and arguments.comm_rate > 0):
        raise ValueError(f"--comm-rate is {arguments.comm_rate}; it must be a positive number")
    parse_slow_worker(arguments.slow_worker, arguments.workers)
    faults = _faults(arguments)
    if faults and arguments.method == "allreduce":
        raise ValueError(
            "--kill and --stop with --method allreduce: there a death ends the run and a stop "
            "stops all; choose a2cid2, gossip or none"
        )
    if arguments.restart and arguments.kill is None:
        raise ValueError("--restart starts again who was killed; say who with --kill RANK@TIME")
    check_output("--json", arguments.json)

    from gossipdp.graph import build_graph

    build_graph(arguments.graph, arguments.workers, seed=arguments.seed)


def prepare(arguments: DemoArguments) -> tuple[Workload[Any], DemoTask]:
    """The workload, and the task of every worker, from arguments that were checked."""
    from gossipdp.cli.demo_worker import DemoTask
    from gossipdp.tasks import make_workload

    workload = make_workload(arguments.workload, disjoint=arguments.disjoint)
    if arguments.disjoint:
        # Raises where a share of the data would be too small, before a worker does.
        workload.train_loader(0, arguments.workers, arguments.seed)
    samples = arguments.samples or DEFAULT_SAMPLES[arguments.workload]
    faults = _faults(arguments)
    least_s = 0.0
    if arguments.samples is None:
        least_s = least_duration_s(faults, restart=arguments.restart)
    return workload, DemoTask(
        workload=arguments.workload,
        graph=arguments.graph,
        method=arguments.method,
        comm_rate=arguments.comm_rate,
        samples=samples,
        seed=arguments.seed,
        disjoint=arguments.disjoint,
        slow_worker=parse_slow_worker(arguments.slow_worker, arguments.workers),
        directory=(arguments.output or _default_output(arguments)).absolute(),
        configuration={
            "workload": arguments.workload,
            "workers": arguments.workers,
            "graph": arguments.graph,
            "method": arguments.method,
            "comm_rate": arguments.comm_rate,
            "samples": samples,
            "batch_size": workload.batch_size,
            "seed": arguments.seed,
            "pin": arguments.pin,
            "disjoint": arguments.disjoint,
            **({"kill": arguments.kill} if arguments.kill else {}),
            **({"stop": arguments.stop} if arguments.stop else {}),
            **({"restart": True} if arguments.restart else {}),
            **({"least_seconds": least_s} if least_s else {}),
        },
        least_s=least_s,
    )


def _faults(arguments: DemoArguments) -> tuple[Fault, ...]:
    return parse_faults(arguments.kill, arguments.stop, num_workers=arguments.workers)


def parse_slow_worker(text: str | None, num_workers: int) -> tuple[int, float] | None:
    """``"2:4"`` to (2, 4.0).

    >>> parse_slow_worker("2:4", num_workers=4)
    (2, 4.0)
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d*)?)", text)
    if match is None:
        raise ValueError(f"--slow-worker is {text!r}; write RANK:FACTOR, such as 2:4")
    rank, factor = int(match[1]), float(match[2])
    if rank >= num_workers:
        raise ValueError(
            f"--slow-worker {text}: there is no rank {rank} among {num_workers} workers; "
            f"choose 0 to {num_workers - 1}"
        )
    if factor < 1:
        raise ValueError(f"--slow-worker {text}: the factor must be at least 1, to slow it down")
    return rank, factor


def averaged_together(results: list[WorkerResult]) -> list[WorkerResult]:
    """The workers that hold the average: all that came to the end, unless one came too late.

    Raises ValueError where no worker came to the end.
    """
    groups: dict[str, list[WorkerResult]] = {}
    for result in results:
        if result.average_digest is not None:
            groups.setdefault(result.average_digest, []).append(result)
    if not groups:
        raise ValueError("no worker came to the end of the run; see what they wrote above")
    return max(groups.values(), key=len)


def summarize(
    workload: Workload[Any], task: DemoTask, results: list[WorkerResult], metric: float
) -> dict[str, Any]:
    """What ``--json`` writes but for the faults; ``metric`` is the averaged model's.

    achieved_comm_rate: over the whole network, 2 * exchanges / all gradient steps.
    """
    exchanges = sum(result.exchanges_initiated for result in results)
    gradient_steps = sum(result.gradient_steps for result in results)
    summary: dict[str, Any] = {
        workload.metric_name: metric,
        "train_seconds": max(result.train_seconds for result in results),
        "samples": sum(result.samples for result in results),
        "achieved_comm_rate": 2 * exchanges / gradient_steps,
        "consensus_distance": averaged_together(results)[0].consensus_distance,
        "workers": [
            {
                "rank": result.rank,
                "metric_before_average": result.metric_before_average,
                "gradient_steps": result.gradient_steps,
                "exchanges": result.exchanges_initiated + result.exchanges_answered,
                "waited_seconds": result.waited_seconds,
                "samples_per_second": result.samples_per_second,
            }
            for result in results
        ],
        "configuration": task.configuration,
    }
    if task.slow_worker is not None:
        rank, factor = task.slow_worker
        summary["slow_worker"] = {"rank": rank, "factor": factor, "by": "waiting"}
    return summary


def _default_output(arguments: DemoArguments) -> Path:
    name = f"{arguments.workload}-{arguments.method}-{arguments.graph}-{arguments.workers}"
    return Path("runs", name)


def _clear(directory: Path) -> None:
    """Remove what a former run left here, so that no worker of it is taken for one of this."""
    from gossipdp.observe.log import FILE_PATTERN

    directory.mkdir(parents=True, exist_ok=True)
    for pattern in (
        FILE_PATTERN,
        "averaged_model-*.pt",
        "tensorboard/worker-*/events.out.tfevents.*",
    ):
        for path in directory.glob(pattern):
            path.unlink()


def _opening(arguments: DemoArguments, task: DemoTask) -> str:
    workers = "1 worker" if arguments.workers == 1 else f"{arguments.workers} workers"
    text = f"{task.workload}: {workers}, graph {task.graph}, method {task.method}"
    if task.method in ("a2cid2", "gossip"):
        text += f", comm rate {task.comm_rate:g}"
    if task.slow_worker is not None:
        rank, factor = task.slow_worker
        text += f", worker {rank} {factor:g} times slower (by waiting)"
    text += f", {task.samples:,} samples"
    if task.least_s:
        text += f" and at least {task.least_s:g} s"
    for fault in _faults(arguments):
        text += f", {fault}"
    return f"{text}, start them again" if arguments.restart else text


def _evaluate(workload: Workload[Any], task: DemoTask, averaged: list[WorkerResult]) -> float:
    """The metric of the averaged model, of which one worker's file is kept."""
    import torch

    from gossipdp.cli.demo_worker import average_file, own_average_file

    path = average_file(task.directory)
    own_average_file(task.directory, averaged[0].rank).replace(path)
    for other in task.directory.glob("averaged_model-*.pt"):
        other.unlink()
    net = workload.make_model()
    net.load_state_dict(torch.load(path, weights_only=True))
    return workload.evaluate(net)


def _problems(
    injections: list[Injection], results: list[WorkerResult], averaged: list[WorkerResult]
) -> list[str]:
    """What did not come about as it was asked for."""
    problems = [
        f"did not {injection.fault}: {injection.missed}"
        for injection in injections
        if injection.missed is not None
    ]
    ranks = {result.rank for result in averaged}
    apart = [str(result.rank) for result in results if result.ended and result.rank not in ranks]
    if apart:
        problems.append(
            f"worker {', '.join(apart)} came too late for the average and holds another one"
        )
    return problems


def _crashes(failures: Sequence[Failure]) -> list[str]:
    """Workers that died though nobody killed them, and perhaps came back."""
    return [f"worker {failure.rank} {failure.ending.reason}, by itself" for failure in failures]


def _not_back(faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """Workers that were to be started again, and did not take part again."""
    return [
        f"worker {fault['rank']}, killed at {fault['at_s']:.1f} s, did not come back"
        for fault in faults
        if fault["kind"] == "kill" and "missed" not in fault and fault["rejoined_s"] is None
    ]


def _table(workload: Workload[Any], results: list[WorkerResult]) -> Table:
    from rich.table import Table

    table = Table()
    for heading in (
        "worker",
        "gradient steps",
        "samples/s",
        "exchanges",
        "waited (s)",
        f"{_words(workload.metric_name)} before averaging",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            str(result.rank),
            f"{result.gradient_steps:,}",
            f"{result.samples_per_second:,.0f}",
            f"{result.exchanges_initiated + result.exchanges_answered:,}",
            f"{result.waited_seconds:.2f}",
            "killed"
            if result.metric_before_average is None
            else f"{result.metric_before_average:.4f}",
        )
    return table


def _lines(workload: Workload[Any], task: DemoTask, summary: dict[str, Any]) -> list[str]:
    steps = [worker["gradient_steps"] for worker in summary["workers"]]
    lines = [
        f"{_words(workload.metric_name)} of the averaged model: "
        f"[bold]{summary[workload.metric_name]:.4f}[/bold]",
        f"trained {summary['train_seconds']:.1f} s on {summary['samples']:,} samples; gradient "
        f"steps of the slowest and the fastest worker: {min(steps):,} and {max(steps):,}",
    ]
    if task.method in ("a2cid2", "gossip") and len(steps) > 1:
        lines.append(
            f"achieved comm rate: {summary['achieved_comm_rate']:.3f} exchanges per worker per "
            f"gradient step, asked for {task.comm_rate:g}"
        )
    lines.append(
        f"consensus distance just before averaging: {summary['consensus_distance']:.3g}; "
        f"waited: {sum(worker['waited_seconds'] for worker in summary['workers']):.2f} s in all"
    )
    for fault in summary.get("faults", ()):
        if "missed" not in fault:
            lines.append(_fault_line(fault))
    return lines


def _fault_line(fault: dict[str, Any]) -> str:
    did = "killed" if fault["kind"] == "kill" else "stopped"
    times = [time_s for time_s in fault["detected_s"].values() if time_s is not None]
    text = f"worker {fault['rank']} {did} at {fault['at_s']:.1f} s: "
    if times:
        text += f"noticed after {min(times):.2f} to {max(times):.2f} s by {len(times)} of "
        text += f"{len(fault['detected_s'])} others"
    else:
        text += "nobody noticed"
    if fault["rejoined_s"] is not None:
        text += f", back after {fault['rejoined_s']:.1f} s"
    return text


def _words(metric_name: str) -> str:
    return metric_name.replace("_", " ")


def _write_reports(console: Console, arguments: DemoArguments, task: DemoTask) -> None:
    """Figure and TensorBoard files from the logs; then say where everything is."""
    from rich.markup import escape

    from gossipdp.cli.demo_worker import average_file
    from gossipdp.observe.log import FILE_PATTERN, RunLog
    from gossipdp.report.figures import draw_run
    from gossipdp.report.tensorboard import tensorboard_is_installed, write_tensorboard

    run_log = RunLog.read(task.directory)
    figure = task.directory / "figure.png"
    draw_run(run_log, figure, title=_opening(arguments, task))
    tensorboard = "not written, tensorboard is not installed: pip install 'gossipdp[tensorboard]'"
    if tensorboard_is_installed():
        write_tensorboard(run_log, task.directory / "tensorboard")
        tensorboard = f"tensorboard --logdir {_short(task.directory / 'tensorboard')}"
    files = {
        "figure": _short(figure),
        "logs": _short(task.directory / FILE_PATTERN),
        "averaged model": _short(average_file(task.directory)),
        "TensorBoard files": tensorboard,
    }
    for name, text in files.items():
        console.print(f"{name}: {escape(text)}", highlight=False, soft_wrap=True)


def _short(path: Path) -> str:
    """Relative to the working directory where it lies within."""
    working_directory = Path.cwd()
    if path.is_relative_to(working_directory):
        return str(path.relative_to(working_directory))
    return str(path)
