"""Does a model train as well without barriers? 16 simulated workers, a small language model.

docs/quality.md says what is trained. Each row's learning rate is tuned by the first seed, by
factors of two; the other seeds are run at the best rate. A run that ends is appended to a file of
JSON lines, and is not made again. Writes benchmarks/results/quality_simulated.{jsonl,json,md}.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from scipy.stats import t
from support.byte_task import BYTES, bits_a_byte, make_model, texts
from support.coded_rows import coded_exchanges
from support.finished_runs import NoBestRateError, Simulations, best_rate, loss_of, next_rate
from support.report import Report, Table, results_folder
from torch import Tensor, nn

from gossipdp.rules import DEFAULT_GRAPH
from gossipdp_lab.simulate import Evaluation, Link, LinkModel, ModuleObjective, Scenario, Trace
from gossipdp_lab.simulate.scenario import MakeOptimizer
from gossipdp_lab.simulate.study import ROUNDS
from gossipdp_lab.simulate.synchronous import Rounds
from gossipdp_lab.tasks.workload import learning_rate_factor

NAME = "quality_simulated"


@dataclass(frozen=True)
class Row:
    """One way to agree, and where the search for its learning rate begins."""

    method: str
    first_rate: float
    graph: str = "complete"
    every: float = 1.0
    """Steps from one exchange that a worker asks for to the next."""
    optimizer: str = "AdamW"
    is_coded: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Of the scenario."""

    @property
    def reference(self) -> str:
        """Return the row that it is compared with."""
        return "all-reduce" if self.optimizer == "AdamW" else f"all-reduce, {self.optimizer}"

    def scenario(self, rate: float, seed: int, setting: Setting) -> Scenario:
        return Scenario(
            graph=self.graph,
            num_workers=setting.workers,
            objective=byte_objective(setting.data == "disjoint"),
            optimizer=OPTIMIZERS[self.optimizer](rate),
            comm_rate=1 / self.every,
            num_steps=setting.steps,
            seed=seed,
            num_records=10,
            schedule=learning_rate_factor,
            fidelity="links",
            # A latency would make rounds end later: fewer steps.
            **{"links": LinkModel(Link(latency_s=0.0)), **self.options},
        )


def byte_objective(disjoint: bool) -> ModuleObjective:
    """Make the objective; its loss is that of the held-out text, in bits a byte.

    disjoint: each worker has a stretch of the text of its own: packages that follow one another by
        name. Otherwise all draw from the whole text.
    """

    def of_worker(rank: int, num_workers: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        text = texts()[0]
        own = text.tensor_split(num_workers)[rank] if disjoint else text
        return BYTES.batches(own, (seed << 20) + rank)

    def evaluate(model: nn.Module) -> Evaluation:
        return Evaluation(bits_a_byte(model))

    return ModuleObjective(
        BYTES.make_model, BYTES.loss, of_worker, evaluate=evaluate, name="bytes", max_rows=1
    )


@dataclass(frozen=True)
class Setting:
    data: str
    workers: int
    steps: int

    def __str__(self) -> str:
        return f"{self.data} data, {self.workers} workers, {self.steps} steps"


class LocalSteps(Rounds):
    """H steps apart, then an all-reduce of the changes, and an outer Nesterov step.

        g = mean_i x_i - base,   m = mu m + g,   base = x_i = base + g + mu m

    With mu = 0 it is local SGD, else DiLoCo (Douillard et al. 2023, arXiv 2311.08105), whose paper
    has mu = 0.9 and an outer rate of 0.7.
    """

    every: ClassVar[int] = 16
    momentum: ClassVar[float] = 0.0

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        self._base = self.population.x[0].clone()
        self._momentum = torch.zeros_like(self._base)

    def communicate(self, computed_s: list[float]) -> list[float]:
        return computed_s if self.number % self.every else self.all_reduced(computed_s)

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        found = training.gradients(self.ranks, population.x)
        changes = training.changes(self.ranks, population.x, found, factor)
        population.step(self.ranks, changes)
        if self.number % self.every == 0:
            drift = population.x.mean(dim=0) - self._base
            self._momentum.mul_(self.momentum).add_(drift)
            self._base += drift + self.momentum * self._momentum
            population.x.copy_(self._base.expand_as(population.x))


class GentleDiLoCo(LocalSteps):
    """With half of the usual momentum, which did better."""

    momentum = 0.5


ROUNDS |= {kind.__name__: kind for kind in (LocalSteps, GentleDiLoCo)}


def _muon(rate: float, parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrix, between the embeddings and the logits, AdamW for what is left.

    At a learning rate for both, as Liu et al. 2025, arXiv 2502.16982, scale Muon's steps.
    """
    matrices = [each for each in parameters if each.ndim == 2][1:-1]
    others = [each for each in parameters if all(each is not other for other in matrices)]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=rate)]


def of_shapes(
    make: Callable[[list[Tensor]], list[torch.optim.Optimizer]], shapes: Sequence[torch.Size]
) -> MakeOptimizer:
    """Return a function of a worker's row that calls ``make`` with views of these shapes.

    For torch's optimizers whose steps depend on the shapes of parameters.
    """

    def of_row(rows: list[Tensor]) -> list[torch.optim.Optimizer]:
        pieces = rows[0].split([shape.numel() for shape in shapes])
        return make([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])

    return of_row


def _of_model(make: Callable[[list[Tensor]], list[torch.optim.Optimizer]]) -> MakeOptimizer:
    return of_shapes(make, [each.shape for each in make_model().parameters()])


OPTIMIZERS: dict[str, Callable[[float], MakeOptimizer]] = {
    "AdamW": lambda rate: partial(torch.optim.AdamW, lr=rate),
    "beta_2 0.95": lambda rate: partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95)),
    "SGD": lambda rate: partial(torch.optim.SGD, lr=rate, momentum=0.9),
    "Muon": lambda rate: _of_model(partial(_muon, rate)),
    "Adafactor": lambda rate: _of_model(
        lambda parameters: [torch.optim.Adafactor(parameters, lr=rate)]
    ),
}
"""By the learning rate."""


def _v(every: int) -> dict[str, Any]:
    return {"exchange_moments": {"exp_avg_sq": every}}


_DEFAULTS: dict[str, Any] = {"graph": DEFAULT_GRAPH, "options": {"exchange_moments": True}}
CODED = ", lattice8"
ROWS: dict[str, Row] = {
    "all-reduce": Row("allreduce", 0.032),
    "gossip, v every 16th": Row("gossip", 0.064, options=_v(16)),
    "gossip, two exchanges a step, v every 32nd": Row("gossip", 0.064, every=0.5, options=_v(32)),
    "gossip, four exchanges a step, v every 64th": Row("gossip", 0.064, every=0.25, options=_v(64)),
    # The defaults in float32, at two rates of comm_rate="auto": 4 where nothing bounds it.
    "gossipdp, 1 exchange a step": Row("a2cid2", 0.064, **_DEFAULTS),
    "gossipdp, 4 exchanges a step": Row("a2cid2", 0.064, every=0.25, **_DEFAULTS),
    f"gossipdp, 1 exchange a step{CODED}": Row("a2cid2", 0.064, is_coded=True, **_DEFAULTS),
    "gossip, ring, v every 16th": Row("gossip", 0.064, "ring", options=_v(16)),
    "a2cid2, ring, v every 16th": Row("a2cid2", 0.064, "ring", options=_v(16)),
    "gossip, H = 8": Row("gossip", 0.032, every=8),
    "local SGD, H = 16": Row("LocalSteps", 0.032),
    "DiLoCo, H = 16, momentum 0.5": Row("GentleDiLoCo", 0.032),
    "all-reduce, beta_2 0.95": Row("allreduce", 0.032, optimizer="beta_2 0.95"),
    "gossip, beta_2 0.95": Row("gossip", 0.064, optimizer="beta_2 0.95"),
    "gossip, beta_2 0.95, v every 5th": Row(
        "gossip", 0.064, optimizer="beta_2 0.95", options=_v(5)
    ),
    "all-reduce, SGD": Row("allreduce", 0.4, optimizer="SGD"),
    "gossip, SGD": Row("gossip", 0.4, optimizer="SGD"),
    "all-reduce, Muon": Row("allreduce", 0.032, optimizer="Muon"),
    "gossip, Muon": Row("gossip", 0.064, optimizer="Muon"),
    "gossip, Muon, v every 16th": Row("gossip", 0.064, optimizer="Muon", options=_v(16)),
    "all-reduce, Adafactor": Row("allreduce", 0.064, optimizer="Adafactor"),
    "gossip, Adafactor": Row("gossip", 0.064, optimizer="Adafactor"),
}


class Runs(Simulations):
    def __init__(self, path: Path) -> None:
        names = ("row", "data", "workers", "steps", "learning_rate", "seed")
        super().__init__(path, names)

    def settings(self) -> list[Setting]:
        names = [each.name for each in fields(Setting)]
        found = {tuple(run[name] for name in names) for run in self.known.values()}
        return [Setting(*each) for each in sorted(found)]

    def find_row(self, name: str, setting: Setting, rate: float, seed: int) -> dict[str, Any]:
        """Return the run, from the file or made now."""
        row = ROWS[name]

        def outcome(trace: Trace) -> dict[str, Any]:
            last = trace.records[-1]
            return {
                "gradient_steps": last.gradient_steps,
                "consensus_distance": last.consensus_distance,
                "models_per_step": trace.models_per_step,
            }

        run = {"row": name, **asdict(setting), "learning_rate": rate, "seed": seed}
        with coded_exchanges() if row.is_coded else nullcontext():
            return self.find(run, row.method, lambda: row.scenario(rate, seed, setting), outcome)


def tune(loss_at: Callable[[float], float], first: float) -> float:
    """Return the best of the rates that were tried, also where no higher loss is beside it."""
    losses: dict[float, float] = {}
    with suppress(NoBestRateError):
        while (rate := next_rate(losses, [first])) is not None:
            losses[rate] = loss_at(rate)
    return best_rate(losses)


def measure(runs: Runs, name: str, setting: Setting, seeds: int) -> None:
    """Tune a row and run its seeds at the best rate."""

    def loss_at(rate: float) -> float:
        return loss_of(runs.find_row(name, setting, rate, seed=0))

    best = tune(loss_at, ROWS[name].first_rate)
    for seed in range(seeds):
        runs.find_row(name, setting, best, seed)


def paired_difference(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Return how far runs end above others of their seed and rate, in percent: mean ± 95%."""
    theirs = {(run["seed"], run["learning_rate"]): loss_of(run) for run in others}
    keys = [(run["seed"], run["learning_rate"]) for run in ours]
    above = [
        100 * (loss_of(run) / theirs[key] - 1)
        for run, key in zip(ours, keys, strict=True)
        if key in theirs
    ]
    if len(above) < 2:
        return "too few seeds"
    half = t.ppf(0.975, len(above) - 1) * statistics.stdev(above) / math.sqrt(len(above))
    return f"{statistics.fmean(above):+.2f}% ± {half:.2f}% ({len(above)} seeds)"


def result_of(runs: Runs, name: str, setting: Setting) -> list[dict[str, Any]]:
    """Return the runs of a row at its best rate, by seed; none if it was not tuned."""
    every = runs.of(row=name, **asdict(setting))
    tried = {run["learning_rate"]: loss_of(run) for run in every if run["seed"] == 0}
    best = min(sorted(tried), key=lambda rate: tried[rate], default=None)
    return [run for run in every if run["learning_rate"] == best]


def tables(runs: Runs, setting: Setting) -> list[Table]:
    results = {name: found for name in ROWS if (found := result_of(runs, name, setting))}
    if not results:
        return []
    rows = []
    for name, found in results.items():
        losses = [loss_of(run) for run in found]
        # Over the seeds that both have: these share their data and their first parameters.
        theirs = [loss_of(run) for run in results.get(ROWS[name].reference, [])[: len(found)]]
        ours = losses[: len(theirs)]
        above = statistics.mean(ours) / statistics.mean(theirs) - 1 if theirs else math.nan
        rows.append(
            [
                name,
                f"{statistics.mean(losses):.3f}",
                f"{100 * above:+.1f}%" if math.isfinite(above) else "",
                f"{statistics.stdev(losses):.3f}" if len(losses) > 1 else "",
                str(len(losses)),
                f"{found[0]['learning_rate']:g}",
                f"{found[0]['models_per_step']:.3f}",
            ]
        )
    paired = [
        f" {name} over float32, both at {found[0]['learning_rate']:g}: "
        f"{paired_difference(found, runs.of(**asdict(setting), row=name.removesuffix(CODED)))}."
        for name, found in results.items()
        if name.endswith(CODED)
    ]
    return [
        Table(
            f"Final loss: {setting}",
            (
                "",
                "bits a byte",
                "above all-reduce",
                "spread",
                "seeds",
                "learning rate",
                "models a step",
            ),
            rows,
            "Mean over seeds of the loss of the mean model on held-out text, at each row's own "
            "best learning rate; spread: standard deviation over seeds; models a step: what a "
            "worker sends in a gradient step, moments included." + "".join(paired),
        ),
    ]


def chosen(parser: argparse.ArgumentParser, text: str | None, rows: Mapping[str, Any]) -> list[str]:
    """Return the rows that ``--rows`` names; all of them without it."""
    names = [name.strip() for name in text.split(";")] if text else list(rows)
    for name in names:
        if name not in rows:
            parser.error(f"there is no row {name!r}; the rows are: {'; '.join(rows)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", help="only these, with semicolons between them")
    parser.add_argument("--data", default="common,disjoint", help="common, disjoint, or both")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1500, help="of each worker")
    parser.add_argument("--seeds", type=int, default=1, help="at each row's best rate")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--no-runs", action="store_true", help="only tabulate what has been run")
    options = parser.parse_args()
    names = chosen(parser, options.rows, ROWS)
    steps = 20 if options.quick else options.steps
    workers = 4 if options.quick else options.workers
    report = Report(NAME, "Final loss at equal tokens, simulated", quick=options.quick)
    runs = Runs(results_folder(options.quick) / f"{NAME}.jsonl")
    settings = [Setting(data, workers, steps) for data in options.data.split(",")]
    for setting in settings if not options.no_runs else ():
        for name in names:
            measure(runs, name, setting, options.seeds)
    for setting in runs.settings() if options.no_runs else settings:
        report.tables += tables(runs, setting)
    report.notes.append(runs.source())
    report.write({"runs": f"{NAME}.jsonl"})


if __name__ == "__main__":
    main()
