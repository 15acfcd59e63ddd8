"""Repeat the paper's experiment on real images: all-reduce, gossip and A2CiD2 on Fashion-MNIST.

Simulated workers train the network of ``gossipdp train fashion-mnist`` by its recipe, the paper's
for CIFAR-10, on batches of 32: on a ring, with plain gossip at one and at two exchanges a step and
with A2CiD2 at one (figures 1 and 2 of the paper), on a complete graph, where A2CiD2 is plain
gossip, and by the library's defaults. Exchanges follow the real protocol over links of 100 Gbit/s.
All rows train on equally many samples. The learning rate is the paper's times a factor, in
proportion to the samples of a step.

The model that is judged is the mean of the workers. Exchanges average the running statistics of
BatchNorm too; they lag behind the parameters, so they are computed anew, of 2,000 training images,
before a model is judged.

``--real``: also a few runs of real processes, by the command. The data is that of Debian's package
dataset-fashion-mnist. A run of 16 workers takes 4 to 5 minutes of one core, everything about 30
runs. Each run that ends is appended to a file of JSON lines, and is not run again: the benchmark
can be stopped at any time. Writes benchmarks/results/paper_images.{jsonl,json,md}.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from quality_simulated import chosen, of_shapes
from reproduction.parts import Estimate
from support.finished_runs import Simulations, loss_of
from support.report import Report, Table, results_folder, run_script
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from gossipdp_lab.simulate import (
    ConstantTime,
    Evaluation,
    Link,
    LinkModel,
    LognormalTime,
    ModuleObjective,
    Quadratic,
    Scenario,
    SlowedTime,
    Trace,
    simulate,
)
from gossipdp_lab.simulate.optimizers import MakeOptimizer
from gossipdp_lab.tasks.fashion_mnist import FashionMnist
from gossipdp_lab.tasks.images import CIFAR_RESNET18_PARAMETERS
from gossipdp_lab.tasks.options import FashionMnistOptions

NAME = "paper_images"
RULE_BATCH = 128
"""The batch of the recipe's learning rate."""
NUM_RECORDS = 12
JUDGED, CALIBRATED = 5_000, 2_000
"""Training images of which the loss is taken, and of which BatchNorm's statistics are computed."""
SLOW_FACTOR = 2.0
LINKS = LinkModel(Link(latency_s=50e-6, bytes_per_s=100e9 / 8))
MODEL_BYTES = 4.0 * CIFAR_RESNET18_PARAMETERS
REAL_WORKERS, REAL_BATCH = 4, 128


@dataclass(frozen=True)
class Row:
    """One way to agree. ``has_straggler``: one worker takes twice as long for its steps."""

    method: str
    graph: str = "ring"
    comm_rate: float = 1.0
    has_straggler: bool = False

    @property
    def is_synchronous(self) -> bool:
        """Say if all workers take their steps together."""
        return self.method == "allreduce"

    def compute_time(self) -> SlowedTime:
        """Return step times of 0.1 s that vary by a tenth; the first worker may be slow."""
        return SlowedTime(LognormalTime(), {0: SLOW_FACTOR} if self.has_straggler else {})


ALL_REDUCE, GOSSIP, DOUBLED, ACCELERATED = (
    "AR-SGD",
    "gossip, ring",
    "gossip, ring, 2 exchanges a step",
    "A2CiD2, ring",
)
ROWS = {
    ALL_REDUCE: Row("allreduce"),
    GOSSIP: Row("gossip"),
    DOUBLED: Row("gossip", comm_rate=2.0),
    ACCELERATED: Row("a2cid2"),
    "gossip and A2CiD2, complete graph": Row("a2cid2", "complete"),
    "our defaults: exponential graph, 4 exchanges a step": Row("a2cid2", "exponential", 4.0),
    "A2CiD2, ring, one worker 2 times slower": Row("a2cid2", has_straggler=True),
}


@dataclass(frozen=True)
class Setting:
    """The settings that all rows share; the samples are those of an epoch.

    times: the factor of the paper's learning rate.
    """

    workers: int
    epochs: int
    batch_size: int
    num_samples: int
    times: float = 1.0

    @property
    def steps(self) -> float:
        """Return the gradient steps of each worker, if all take equally many."""
        return self.epochs * self.num_samples / self.batch_size / self.workers

    def __str__(self) -> str:
        return f"{self.workers} workers, batches of {self.batch_size}, {self.epochs} epochs"


class Task:
    """The recipe as simulated workers train it."""

    def __init__(
        self, data: Path, *, workers: int, epochs: int, batch_size: int, times: float = 1.0
    ) -> None:
        options = FashionMnistOptions(data=data, epochs=epochs, batch_size=batch_size)
        self.recipe = FashionMnist(options)
        self.setting = Setting(workers, epochs, batch_size, self.recipe.num_samples, times)

    def objective(self) -> ModuleObjective:
        """Return the objective; row by row is quicker here than all rows at once by vmap."""
        recipe = self.recipe
        return ModuleObjective(
            recipe.make_model,
            recipe.loss,
            recipe.train_loader,
            evaluate=self.judge,
            name="fashion-mnist",
            metric_name=recipe.metric_name,
            max_rows=1,
        )

    def judge(self, model: nn.Module) -> Evaluation:
        """Return the loss on training images and the accuracy on the test images."""
        recipe = self.recipe
        images, labels = (each[:JUDGED] for each in recipe.train)
        torch.manual_seed(0)
        seen = [recipe.normalize(recipe.augment(each)) for each in images[:CALIBRATED].split(200)]
        update_bn(seen, model)
        loss = 0.0
        for some, theirs in zip(images.split(500), labels.split(500), strict=True):
            logits = model(recipe.normalize(some))
            loss += float(F.cross_entropy(logits, theirs, reduction="sum"))
        return Evaluation(loss / len(labels), recipe.evaluate(model))

    def optimizer(self) -> MakeOptimizer:
        """Return the recipe's, for workers of this batch, at a multiple of the paper's rate."""
        template = self.recipe.make_model()
        places = {id(each): place for place, each in enumerate(template.parameters())}
        groups = self.recipe.make_optimizer(template).param_groups
        rate = groups[0]["lr"] * self.setting.times * self.setting.batch_size / RULE_BATCH

        def make(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
            mine = [
                group
                | {"lr": rate, "params": [parameters[places[id(each)]] for each in group["params"]]}
                for group in groups
            ]
            return [torch.optim.SGD(mine)]

        return of_shapes(make, [each.shape for each in template.parameters()])

    def scenario(self, row: Row, seed: int) -> Scenario:
        """Return a run of as many gradient steps, of all workers, as the setting asks for."""
        setting, n = self.setting, self.setting.workers
        speed = (n - 1 + 1 / SLOW_FACTOR) / n if row.has_straggler else 1.0
        # All-reduce makes as many rounds, whatever they take: :func:`clock` has their time.
        return Scenario(
            graph=row.graph,
            num_workers=n,
            objective=self.objective(),
            optimizer=self.optimizer(),
            comm_rate=row.comm_rate,
            fidelity="links",
            compute_time=ConstantTime() if row.is_synchronous else row.compute_time(),
            links=LinkModel(Link(latency_s=0.0)) if row.is_synchronous else LINKS,
            model_bytes=MODEL_BYTES,
            num_steps=setting.steps / speed,
            num_records=NUM_RECORDS,
            seed=seed,
            schedule=lambda progress: self.recipe.rate_factor(progress, n),
        )


class Runs(Simulations):
    """The runs that have ended, simulated and real ones."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ("kind", "row", *(each.name for each in fields(Setting)), "seed"))

    def of_row(self, kind: str, name: str, setting: Setting) -> list[dict[str, Any]]:
        """Return the runs of a row, by seed."""
        return self.of(kind=kind, row=name, **asdict(setting))

    def find_simulated(self, name: str, task: Task, seed: int) -> dict[str, Any]:
        """Return a simulated run, from the file or made now."""
        row = ROWS[name]

        def outcome(trace: Trace) -> dict[str, Any]:
            last, distances = trace.records[-1], trace.column("consensus_distance")
            return {
                "accuracy": last.metric,
                "accuracies": trace.column("metric").tolist(),
                "consensus_distance": float(distances[NUM_RECORDS // 2 :].mean()),
                "gradient_steps": last.gradient_steps,
                "exchanges_per_step": trace.achieved_comm_rate,
            }

        run = {"kind": "simulated", "row": name, **asdict(task.setting), "seed": seed}
        return self.find(run, row.method, lambda: task.scenario(row, seed), outcome)

    def find_real(self, name: str, setting: Setting, data: Path, seed: int) -> dict[str, Any]:
        """Return a run of real processes by the command, from the file or made now."""
        row = ROWS[name]
        run = {"kind": "real", "row": name, **asdict(setting), "seed": seed}
        known = self.known.get(self.key(run))
        if known is not None:
            return known
        given = {
            "workers": setting.workers,
            "epochs": setting.epochs,
            "batch-size": setting.batch_size,
            "data": data,
            "method": row.method,
            "graph": row.graph,
            "seed": seed,
        }
        if not row.is_synchronous:
            given["comm-rate"] = row.comm_rate
        with TemporaryDirectory() as folder:
            path = Path(folder, "results.json")
            given |= {"output": folder, "json": path}
            words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
            command = [sys.executable, "-m", "gossipdp", "train", "fashion-mnist", *words]
            subprocess.run(command, check=True)
            outcome = json.loads(path.read_text())
        run |= {
            "accuracy": outcome["metric"],
            "consensus_distance": outcome["consensus_distance"],
            "exchanges_per_step": outcome["achieved_comm_rate"],
            "slowest_steps": outcome["slowest_steps"],
            "fastest_steps": outcome["fastest_steps"],
            "minutes": outcome["minutes"],
        }
        self.keep(run)
        return run


def clock(setting: Setting) -> Table:
    """Return how long the rows take, by the simulator's clock; no network is trained for it."""
    rows = []
    names = (ALL_REDUCE, GOSSIP, DOUBLED, ACCELERATED)
    for has_straggler in (False, True):
        seconds: dict[str, float] = {}
        for name in names:
            row = replace(ROWS[name], has_straggler=has_straggler)
            scenario = Scenario(
                graph=row.graph,
                num_workers=setting.workers,
                objective=Quadratic(dimension=2),
                comm_rate=row.comm_rate,
                fidelity="links",
                compute_time=row.compute_time(),
                links=LINKS,
                model_bytes=MODEL_BYTES,
                num_steps=setting.steps,
                num_records=1,
            )
            trace = simulate(scenario, row.method)
            per_step = scenario.end_s / trace.records[-1].gradient_steps
            seconds[name] = per_step * setting.steps * setting.workers
            share = seconds[name] / scenario.end_s
            steps = share * min(trace.worker_steps), share * max(trace.worker_steps)
            rows.append(
                [
                    f"{name}, {'one worker 2 times slower' if has_straggler else 'alike'}",
                    f"{seconds[name]:.1f}",
                    f"{seconds[name] / seconds[ALL_REDUCE]:.2f}",
                    f"{steps[0]:.0f} / {steps[1]:.0f}",
                    f"{trace.achieved_comm_rate:.2f}",
                ]
            )
    return Table(
        f"Time: {setting}",
        ("", "seconds", "over AR-SGD", "steps, slowest / fastest", "exchanges a step"),
        rows,
        "By the simulator's clock, for equally many samples of all workers together: gradient "
        "steps of 0.1 s on average (standard deviation of their logarithm 0.1), links of 100 "
        "Gbit/s and 50 microseconds, models as large as the paper's ResNet-18 (44.7 MB). AR-SGD "
        "sends after the gradient, by a ring, and waits for the slowest worker in each step; the "
        "others send while they compute. No network was trained for this table.",
    )


def percent(values: Sequence[float]) -> str:
    """Return the mean of accuracies, in percent, and of several the standard deviation."""
    estimate = Estimate.of([100 * value for value in values])
    spread = f" ± {estimate.deviation:.2f}" if len(values) > 1 else ""
    return f"{estimate.mean:.2f}{spread}"


def cells(name: str, found: list[dict[str, Any]]) -> list[str]:
    """Return one row of a table of results."""
    distances = [run["consensus_distance"] for run in found]
    losses = [loss_of(run) for run in found]
    return [
        name,
        percent([run["accuracy"] for run in found]),
        Estimate.of(losses).text if math.isfinite(sum(losses)) else "diverged",
        "" if ROWS[name].is_synchronous else Estimate.of(distances).text,
        f"{Estimate.of([run['exchanges_per_step'] for run in found]).mean:.2f}",
        str(len(found)),
    ]


HEAD = (
    "", "test accuracy, %", "training loss", "consensus distance", "exchanges a step", "seeds"
)  # fmt: skip
NOTE = (
    "Mean ± standard deviation over the seeds, at the end. Test accuracy and training loss (5,000 "
    "images, not augmented) are those of the mean of the workers, with BatchNorm's statistics "
    "computed anew of 2,000 augmented training images. Consensus distance: mean squared distance "
    "of the workers from their mean, over the second half of the run. On a complete graph A2CiD2 "
    "is plain gossip: one row for both. The rule: 0.1 for each 128 samples of a step of all workers"
)


def tables(runs: Runs, setting: Setting) -> list[Table]:
    """Return the results of simulated workers, if there are any."""
    rows = [
        cells(name, found) for name in ROWS if (found := runs.of_row("simulated", name, setting))
    ]
    peak = 0.1 * setting.times * setting.batch_size / RULE_BATCH * setting.workers
    factor = "" if setting.times == 1 else f"{setting.times:g} times "
    title = f"At {factor}the paper's learning rate: {setting}"
    return [Table(title, HEAD, rows, f"{NOTE}. The largest here: {peak:g}.")] if rows else []


def real_table(runs: Runs, setting: Setting) -> list[Table]:
    """Return the results of real processes, if there are any."""
    rows = []
    for name, row in ROWS.items():
        found = runs.of_row("real", name, setting)
        if not found:
            continue
        rates = [run["exchanges_per_step"] for run in found if run["exchanges_per_step"]]
        distances = [run["consensus_distance"] for run in found]
        rows.append(
            [
                name,
                percent([run["accuracy"] for run in found]),
                "" if row.is_synchronous else Estimate.of(distances).text,
                f"{Estimate.of(rates).mean:.2f}" if rates else "",
                f"{Estimate.of([run['minutes'] for run in found]).mean:.2f}",
                str(len(found)),
            ]
        )
    head = ("", "test accuracy, %", "consensus distance at the end", "exchanges a step", "minutes",
            "seeds")  # fmt: skip
    note = "Workers share this machine's cores, so their minutes compare no network."
    return [Table(f"Real processes: {setting}", head, rows, note)] if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", help="only these, with semicolons between them")
    parser.add_argument("--data", type=Path, default=FashionMnistOptions.data)
    parser.add_argument("--workers", type=int, default=16, help="simulated ones")
    parser.add_argument("--epochs", type=int, default=4, help="of all workers together")
    parser.add_argument("--batch-size", type=int, default=32, help="of a simulated worker")
    parser.add_argument("--times", type=float, default=1.0, help="factor of the paper's rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="also 4 real processes, 3 seeds")
    parser.add_argument("--no-runs", action="store_true", help="only tabulate what has been run")
    parser.add_argument("--quick", action="store_true", help="4 workers, one seed, one epoch")
    options = parser.parse_args()
    names = chosen(parser, options.rows, ROWS)
    if options.quick:
        options.workers, options.epochs, options.seeds = 4, 1, 1
    measure(options, names)


def measure(options: argparse.Namespace, names: list[str]) -> None:
    """Make the runs, those that show most first, and write after each stage."""
    try:
        task = Task(
            options.data,
            workers=options.workers,
            epochs=options.epochs,
            batch_size=options.batch_size,
            times=options.times,
        )
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error  # a line, as of any mistake in the call
    setting = task.setting
    real = replace(setting, workers=REAL_WORKERS, batch_size=REAL_BATCH)
    folder = results_folder(options.quick)
    runs = Runs(folder / f"{NAME}.jsonl")
    report = Report(NAME, "The paper's experiment on Fashion-MNIST", quick=options.quick)
    times = clock(setting)

    def write() -> None:
        report.tables = [*tables(runs, setting), times, *real_table(runs, real)]
        report.write({"runs": f"{NAME}.jsonl"})

    if not options.no_runs:
        for seed in range(options.seeds):
            for name in names:
                runs.find_simulated(name, task, seed)
            write()
        for name in names if options.real else ():
            if not ROWS[name].has_straggler:
                for seed in range(options.seeds):
                    runs.find_real(name, real, options.data, seed)
    write()


if __name__ == "__main__":
    run_script(main)
