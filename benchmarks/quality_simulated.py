"""Does a model train as well without barriers? 16 simulated workers, a small language model.

Every row trains the same network on the same number of bytes with the same optimizer; only how
workers agree differs. Exchanges follow the real protocol, and take no time but where a row says so.
Each row's learning rate is tuned by itself, on a grid of factors of two: from its first rate the
search goes on, up or down, as long as the loss of the first seed falls. The other seeds are run at
the best rate. The loss is that of the mean model on held-out text, in bits a byte.

Each run that ends is appended to a file of JSON lines; a run that stands there is not run again. So
the benchmark can be stopped at any time, and goes on where it was. Writes
benchmarks/results/quality_simulated.{jsonl,json,md}.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gossipdp.dynamics.outer import OuterStep
from rich.console import Console
from scipy.stats import spearmanr
from support.batched_transformer import BatchedTransformer
from support.byte_model import ByteModel
from support.finished_runs import FinishedRuns
from support.learning_rates import NoBestRateError, best_rate, next_rate
from support.report import QUICK_RESULTS, RESULTS, Report, Table
from support.torch_rows import TorchRows
from torch import nn

from gossipdp_lab.progress_bar import ProgressView
from gossipdp_lab.simulate import (
    AdamW,
    ConstantTime,
    Link,
    LinkModel,
    Objective,
    RowOptimizer,
    Scenario,
    Sgd,
    SlowedTime,
    simulate,
)
from gossipdp_lab.simulate.study import ROUNDS, one_thread
from gossipdp_lab.simulate.synchronous import DiLoCo
from gossipdp_lab.tasks.workload import learning_rate_factor

NAME = "quality_simulated"


@dataclass(frozen=True)
class Row:
    """One way to agree, and where the search for its learning rate begins, for the mlp."""

    method: str
    first_rate: float
    graph: str = "complete"
    comm_rate: float = 1.0
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)

    def scenario(self, rate: float, seed: int, setting: Setting) -> Scenario:
        """One run of it."""
        return Scenario(
            graph=self.graph,
            num_workers=setting.workers,
            objective=OBJECTIVES[setting.model](setting.data == "disjoint"),
            optimizer=OPTIMIZERS[self.optimizer](rate, setting.model),
            comm_rate=self.comm_rate,
            num_steps=setting.steps,
            seed=seed,
            num_records=10,
            schedule=learning_rate_factor,
            fidelity="links",
            # A latency would make rounds end later: fewer steps.
            **{"links": LinkModel(Link(latency_s=0.0)), **self.options},
        )


@dataclass(frozen=True)
class Setting:
    """The settings that all rows share."""

    data: str
    model: str
    workers: int
    steps: int

    def __str__(self) -> str:
        return f"{self.model}, {self.data} data, {self.workers} workers, {self.steps} steps"


class StepsBySpeed(DiLoCo):
    """DiLoCo without waiting: a worker f times slower takes a step in every f-th round.

    A round is a step of the fastest, so that the scenario's step time is theirs. Each worker's
    drift counts alike, however many steps it has.

    Source: Liu et al. 2024, arXiv 2401.09135 (dynamic local updates).
    """

    def step(self, factor: float) -> None:
        training, x = self.training, self.population.x
        ranks = [rank for rank in self.ranks if self.number % slowness(rank) == 0]
        if ranks:
            rows = x[ranks]
            found = training.gradients(ranks, rows)
            self.population.step(ranks, training.changes(ranks, rows, found, factor))
        self.mix()


ROUNDS["diloco, steps by speed"] = StepsBySpeed


def slowness(rank: int) -> int:
    """Return how many times longer a step of this rank takes, where speeds are 1:2:4:8."""
    return 2 ** (rank % 4)


OBJECTIVES: dict[str, Callable[[bool], Objective]] = {
    "mlp": ByteModel,
    "mlp, 64 predictions": lambda is_disjoint: ByteModel(is_disjoint, batch_size=8),
    "transformer": BatchedTransformer,
}
RATE_FACTORS = {"mlp": 1.0, "mlp, 64 predictions": 1.0, "transformer": 1 / 8}
"""The start of the search for a rate, relative to that for the mlp."""


def shapes(model: str) -> list[torch.Size]:
    """Those of the parameters of a network, in the order in which they lie in a row."""
    if model == "mlp":
        made: nn.Module = ByteModel().make_model()
    else:
        made = BatchedTransformer().make_task().make_model()
    return [each.shape for each in made.parameters()]


def _muon(rate: float, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the embeddings and the logits, AdamW for what is left.

    In the mlp that is the one hidden matrix; in the transformer the positions' embeddings, which
    lie between, would be among them. At a learning rate for both, as Liu et al. 2025, arXiv
    2502.16982, scale Muon's steps.
    """
    matrices = [each for each in parameters if each.ndim == 2][1:-1]
    others = [each for each in parameters if all(each is not other for other in matrices)]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=rate)]


OPTIMIZERS: dict[str, Callable[[float, str], RowOptimizer]] = {
    "adamw": lambda rate, _: AdamW(rate),
    "adamw, beta_2 0.95": lambda rate, _: AdamW(rate, betas=(0.9, 0.95)),
    "adamw, beta_2 0.99": lambda rate, _: AdamW(rate, betas=(0.9, 0.99)),
    "sgd": lambda rate, _: Sgd(rate, momentum=0.9),
    "muon": lambda rate, model: TorchRows(partial(_muon, rate), shapes(model)),
    "adafactor": lambda rate, model: TorchRows(
        lambda parameters: [torch.optim.Adafactor(parameters, lr=rate)], shapes(model)
    ),
}
"""By the learning rate and the network's name."""


def _row(
    method: str, rate: float, graph: str = "complete", every: float = 1, **options: Any
) -> Row:
    optimizer = options.pop("optimizer", "adamw")
    return Row(method, rate, graph, 1 / every, optimizer, options)


def _v(every: int) -> dict[str, int]:
    return {"exp_avg_sq": every}


PLAIN_MEAN = OuterStep(momentum=0.0, lr=1.0)
OUTER = OuterStep(momentum=0.7, lr=1.0)
"""DiLoCo's, whose paper has momentum 0.9 and lr 0.7: a row of its own. Gossip's rows name the
momentum where it is not the library's default."""
GENTLE = OuterStep(momentum=0.5, lr=1.0)

ROWS: dict[str, Row] = {
    "all-reduce": _row("allreduce", 0.032),
    "gossip": _row("gossip", 0.064),
    "gossip, v every 16th": _row("gossip", 0.064, exchange_moments=_v(16)),
    "gossip, v and m every 2nd": _row(
        "gossip", 0.064, exchange_moments={"exp_avg_sq": 2, "exp_avg": 2}
    ),
    "gossip, two exchanges a step, v every 32nd": _row(
        "gossip", 0.064, every=0.5, exchange_moments=_v(32)
    ),
    "gossip, four exchanges a step, v every 64th": _row(
        "gossip", 0.064, every=0.25, exchange_moments=_v(64)
    ),
    # The library's defaults, at two rates that comm_rate="auto" takes: 4 where nothing bounds it.
    "gossipdp, 1 exchange a step": _row("a2cid2", 0.064, "exponential", exchange_moments=_v(4)),
    "gossipdp, 4 exchanges a step": _row(
        "a2cid2", 0.064, "exponential", every=0.25, exchange_moments=_v(4)
    ),
    "gossipdp, 4 exchanges a step, v every time": _row(
        "a2cid2", 0.064, "exponential", every=0.25, exchange_moments=_v(1)
    ),
    "gossipdp, 4 exchanges a step, v and m every 2nd": _row(
        "a2cid2", 0.064, "exponential", every=0.25, exchange_moments=_v(2) | {"exp_avg": 2}
    ),
    "gossipdp, 8 exchanges a step": _row(
        "a2cid2", 0.064, "exponential", every=0.125, exchange_moments=_v(8)
    ),
    "gossip, ring, v every 16th": _row("gossip", 0.064, "ring", exchange_moments=_v(16)),
    "a2cid2, ring, v every 16th": _row("a2cid2", 0.064, "ring", exchange_moments=_v(16)),
    "DiLoCo, H = 16": _row("diloco", 0.016, sync_every=16, outer=OUTER),
    "DiLoCo, H = 16, v every time": _row(
        "diloco", 0.016, sync_every=16, outer=OUTER, exchange_moments=_v(1)
    ),
    "DiLoCo, H = 16, momentum 0.5": _row("diloco", 0.032, sync_every=16, outer=GENTLE),
    "local SGD, H = 16": _row("diloco", 0.032, sync_every=16, outer=PLAIN_MEAN),
    "gossip, H = 4": _row("gossip", 0.064, every=4),
    "gossip, H = 8": _row("gossip", 0.032, every=8),
    "gossip, outer step, H = 8": _row("gossip", 0.032, every=8, outer=OuterStep()),
    "gossip, outer step of momentum 0.7, H = 8": _row("gossip", 0.016, every=8, outer=OUTER),
    "gossip, outer step in one exchange of 4, H = 8": _row(
        "gossip", 0.032, every=8, outer=OuterStep(every=4)
    ),
    "gossip, outer step of momentum 0.7 in one exchange of 4, H = 8": _row(
        "gossip", 0.016, every=8, outer=replace(OUTER, every=4)
    ),
    "gossip, outer step in one exchange of 8, H = 8": _row(
        "gossip", 0.032, every=8, outer=OuterStep(every=8)
    ),
    "gossip, outer step of momentum 0.7, H = 8, v every time": _row(
        "gossip", 0.016, every=8, outer=OUTER, exchange_moments=_v(1)
    ),
    "gossip, outer step of momentum 0.7 in each exchange, H = 8": _row(
        "gossip", 0.016, every=8, outer=replace(OUTER, every=1)
    ),
}
for _method in ("gossip", "a2cid2"):
    ROWS |= {
        f"{_method}, ring, H = 8": _row(_method, 0.032, "ring", every=8),
        f"{_method}, ring, outer step of momentum 0.7, H = 8": _row(
            _method, 0.016, "ring", every=8, outer=OUTER
        ),
    }
_UNEVEN = {"compute_time": SlowedTime(ConstantTime(), {n: slowness(n) for n in range(1024)})}
ROWS |= {  # at equal time: a slow worker takes fewer steps, and whoever waits for it too
    "DiLoCo, H = 16, speeds 1:2:4:8": _row("diloco", 0.016, sync_every=16, outer=OUTER, **_UNEVEN),
    "DiLoCo, H = 16, steps by speed 1:2:4:8": _row(
        "diloco, steps by speed", 0.016, sync_every=16, outer=OUTER
    ),
    "DiLoCo, H = 16, momentum 0.5, steps by speed 1:2:4:8": _row(
        "diloco, steps by speed", 0.032, sync_every=16, outer=GENTLE
    ),
    "local SGD, H = 16, steps by speed 1:2:4:8": _row(
        "diloco, steps by speed", 0.032, sync_every=16, outer=PLAIN_MEAN
    ),
    "gossip, outer step of momentum 0.7, H = 8, speeds 1:2:4:8": _row(
        "gossip", 0.016, every=8, outer=OUTER, **_UNEVEN
    ),
    "gossip, outer step, H = 4, speeds 1:2:4:8": _row(
        "gossip", 0.032, every=4, outer=OuterStep(), **_UNEVEN
    ),
    "gossip, outer step in each exchange, H = 4, speeds 1:2:4:8": _row(
        "gossip", 0.032, every=4, outer=OuterStep(every=1), **_UNEVEN
    ),
    "gossip, outer step in one exchange of 4, H = 4, speeds 1:2:4:8": _row(
        "gossip", 0.032, every=4, outer=OuterStep(every=4), **_UNEVEN
    ),
    "gossip, outer step of momentum 0.7, H = 4, speeds 1:2:4:8": _row(
        "gossip", 0.016, every=4, outer=OUTER, **_UNEVEN
    ),
    "gossip, H = 4, speeds 1:2:4:8": _row("gossip", 0.064, every=4, **_UNEVEN),
    "gossip, v every 16th, speeds 1:2:4:8": _row(
        "gossip", 0.064, exchange_moments=_v(16), **_UNEVEN
    ),
}
_SLOW = Link(latency_s=0.02, bytes_per_s=100e6 / 8)
# As if the model had a million parameters and a step took the simulator's 0.1 s; at equal time too.
_ALL_SLOW: dict[str, Any] = {"model_bytes": 4e6, "links": LinkModel(_SLOW)}
_ONE_SLOW: dict[str, Any] = {
    "model_bytes": 4e6,
    "links": LinkModel(Link(latency_s=0.0), overrides={(0, 1): _SLOW}),
}
for _every in (16, 32, 64, 128):
    ROWS[f"DiLoCo, H = {_every}, 100 Mbit/s and 20 ms"] = _row(
        "diloco", 0.016, sync_every=_every, outer=OUTER, **_ALL_SLOW
    )
for _every in (16, 32, 64):
    ROWS[f"local SGD, H = {_every}, 100 Mbit/s and 20 ms"] = _row(
        "diloco", 0.032, sync_every=_every, outer=PLAIN_MEAN, **_ALL_SLOW
    )
for _every in (16, 64):
    ROWS[f"DiLoCo, H = {_every}, one slow link"] = _row(
        "diloco", 0.016, sync_every=_every, outer=OUTER, **_ONE_SLOW
    )
ROWS |= {
    "gossip, H = 4, 100 Mbit/s and 20 ms": _row("gossip", 0.064, every=4, **_ALL_SLOW),
    "gossip, H = 8, 100 Mbit/s and 20 ms": _row("gossip", 0.032, every=8, **_ALL_SLOW),
    "gossip, outer step, H = 8, 100 Mbit/s and 20 ms": _row(
        "gossip", 0.032, every=8, outer=OuterStep(), **_ALL_SLOW
    ),
    "gossip, H = 4, one slow link": _row("gossip", 0.064, every=4, **_ONE_SLOW),
    "gossip, outer step of momentum 0.7, H = 8, one slow link": _row(
        "gossip", 0.016, every=8, outer=OUTER, **_ONE_SLOW
    ),
}
_SLOWER = {"optimizer": "adamw, beta_2 0.95"}
ROWS |= {
    "all-reduce, beta_2 0.95": _row("allreduce", 0.032, **_SLOWER),
    "gossip, beta_2 0.95": _row("gossip", 0.064, **_SLOWER),
    "gossip, beta_2 0.95, v every 5th": _row("gossip", 0.064, exchange_moments=_v(5), **_SLOWER),
}
_AS_ONE: dict[str, Any] = {"sync_every": 1, "outer": PLAIN_MEAN}
ROWS |= {  # workers that never differ, and take the mean of their own steps: what is left is Adam's
    "own steps, averaged each time": _row("diloco", 0.064, **_AS_ONE),
    "own steps, averaged each time, beta_2 0.95": _row("diloco", 0.064, **_AS_ONE, **_SLOWER),
    "own steps and v, averaged each time, beta_2 0.95": _row(
        "diloco", 0.128, exchange_moments=_v(1), **_AS_ONE, **_SLOWER
    ),
}
_SGD = {"optimizer": "sgd"}
ROWS |= {
    "all-reduce, SGD": _row("allreduce", 0.4, **_SGD),
    "gossip, SGD": _row("gossip", 0.4, **_SGD),
    "gossip, SGD, momentum every 2nd": _row(
        "gossip", 0.4, exchange_moments={"momentum_buffer": 2}, **_SGD
    ),
}
_MUON, _ADAFACTOR = {"optimizer": "muon"}, {"optimizer": "adafactor"}
ROWS |= {
    "all-reduce, Muon": _row("allreduce", 0.032, **_MUON),
    "gossip, Muon": _row("gossip", 0.064, **_MUON),
    "gossip, Muon, v every 16th": _row("gossip", 0.064, exchange_moments=_v(16), **_MUON),
    "gossip, Muon, v every 16th, momentum every 5th": _row(
        "gossip", 0.064, exchange_moments=_v(16) | {"momentum_buffer": 5}, **_MUON
    ),
    "all-reduce, Adafactor": _row("allreduce", 0.064, **_ADAFACTOR),
    "gossip, Adafactor": _row("gossip", 0.064, **_ADAFACTOR),
    "gossip, Adafactor, v every time": _row(
        "gossip",
        0.064,
        exchange_moments=dict.fromkeys(("row_var", "col_var", "variance"), 1),
        **_ADAFACTOR,
    ),
}


REFERENCES = {
    "adamw": "all-reduce",
    "adamw, beta_2 0.95": "all-reduce, beta_2 0.95",
    "sgd": "all-reduce, SGD",
    "muon": "all-reduce, Muon",
    "adafactor": "all-reduce, Adafactor",
}
"""The row that each optimizer's rows are compared with."""


class Runs(FinishedRuns[dict[str, Any]]):
    """The runs that have ended."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, dict[str, Any], self.key)

    @staticmethod
    def key(run: dict[str, Any]) -> str:
        """Return the key that tells a run from others."""
        names = ("row", "data", "model", "workers", "steps", "learning_rate", "seed")
        return json.dumps([run[name] for name in names])

    def of(self, name: str, setting: Setting) -> list[dict[str, Any]]:
        """All runs of a row."""
        wanted = asdict(setting) | {"row": name}
        return [run for run in self.known.values() if wanted.items() <= run.items()]

    def settings(self) -> list[Setting]:
        """All for which there are runs."""
        names = [each.name for each in fields(Setting)]
        found = {tuple(run[name] for name in names) for run in self.known.values()}
        return [Setting(*each) for each in sorted(found)]

    def find(self, name: str, row: Row, setting: Setting, rate: float, seed: int) -> dict[str, Any]:
        """Return the run, from the file or made now."""
        run = {"row": name, **asdict(setting), "learning_rate": rate, "seed": seed}
        known = self.known.get(self.key(run))
        if known is not None:
            return known
        label = f"{name}, {setting}, rate {rate:g}, seed {seed}"
        console = Console()
        with ProgressView(label, console=console, line_every_s=60.0) as view:
            trace = simulate(row.scenario(rate, seed, setting), row.method, view.advance)
        last = trace.records[-1]
        run |= {
            "loss": last.loss if math.isfinite(last.loss) else None,
            "losses": [each.loss if math.isfinite(each.loss) else None for each in trace.records],
            "gradient_steps": last.gradient_steps,
            "consensus_distance": last.consensus_distance,
            "models_per_step": trace.models_per_step,
            "wall_s": trace.wall_s,
        }
        console.print(f"{label}: {last.loss:.4f}", highlight=False)
        self.keep(run)
        return run


def tune(loss_at: Callable[[float], float], first: float) -> float:
    """Return the best of the rates that were tried, also where no higher loss is beside it."""
    losses: dict[float, float] = {}
    with suppress(NoBestRateError):
        while (rate := next_rate(losses, [first])) is not None:
            losses[rate] = loss_at(rate)
    return best_rate(losses)


def loss_of(run: dict[str, Any]) -> float:
    """Its final loss; infinite where it diverged."""
    return math.inf if run["loss"] is None else float(run["loss"])


def measure(runs: Runs, name: str, setting: Setting, seeds: int) -> list[dict[str, Any]]:
    """Tune a row and run its seeds at the best rate."""
    row = ROWS[name]
    first = row.first_rate * RATE_FACTORS[setting.model]
    best = tune(lambda rate: loss_of(runs.find(name, row, setting, rate, seed=0)), first)
    return [runs.find(name, row, setting, best, seed) for seed in range(seeds)]


def as_row(name: str, found: list[dict[str, Any]], above: float) -> list[str]:
    """One row of the table of results."""
    losses = [loss_of(run) for run in found]
    mean = statistics.mean(losses)
    return [
        name,
        f"{mean:.3f}",
        f"{100 * above:+.1f}%" if math.isfinite(above) else "",
        f"{statistics.stdev(losses):.3f}" if len(losses) > 1 else "",
        str(len(losses)),
        f"{found[0]['learning_rate']:g}",
        f"{models_a_step(found[0]):.3f}",
    ]


def models_a_step(run: dict[str, Any]) -> float:
    """Return the models that a worker sends in the time of a step of the fastest worker."""
    steps_of_the_fastest = int(run["workers"]) * int(run["steps"])
    return float(run["models_per_step"]) * int(run["gradient_steps"]) / steps_of_the_fastest


def tried(runs: Runs, name: str, setting: Setting) -> dict[float, float]:
    """Return the losses of the first seed at all rates that were tried, by rate."""
    found = {
        run["learning_rate"]: loss_of(run) for run in runs.of(name, setting) if run["seed"] == 0
    }
    return dict(sorted(found.items()))


def result_of(runs: Runs, name: str, setting: Setting) -> list[dict[str, Any]]:
    """Return the runs of a row at its best rate, by seed; none if it was not tuned."""
    rates = tried(runs, name, setting)
    if not rates:
        return []
    best = min(rates, key=lambda rate: rates[rate])
    found = [run for run in runs.of(name, setting) if run["learning_rate"] == best]
    return sorted(found, key=lambda run: int(run["seed"]))


def rare_gradients(workers: int, steps: int, beta_2: float) -> Table:
    """Measure how far each worker's second moment is from the mean of all, for rare gradients.

    All workers stand at the same parameters, those of all-reduce with AdamW: so their v differ by
    their batches alone. A coordinate's rarity is the share of all gradients in which it was less
    than a hundredth of its own root mean square.
    """
    source = ByteModel().begin(workers, seed=0)
    optimizer = AdamW(0.032, betas=(0.9, beta_2))
    state, x = optimizer.begin(source.start[:1]), source.start[:1].clone()
    second = torch.zeros_like(source.start)
    quiet = torch.zeros_like(second[0])
    with one_thread():
        for step in range(steps):
            values = source.gradients(range(workers), x.expand(workers, -1)).values
            second.mul_(beta_2).addcmul_(values, values, value=1 - beta_2)
            mean_square = second.mean(dim=0)
            quiet += (values.square() < 1e-4 * mean_square).float().mean(dim=0)
            mean = values.mean(dim=0, keepdim=True)
            x += optimizer.changes(state, [0], x, mean, learning_rate_factor(step / steps))
    rarity = quiet / steps
    mean_square = second.mean(dim=0)
    seen = mean_square > 0
    error = (second.std(dim=0) / mean_square)[seen]
    rarity = rarity[seen]
    # What one worker's own v makes of a step's size, to the median over workers.
    ratio = (mean_square[seen] / second[:, seen].clamp_min(1e-30)).sqrt().median(dim=0).values
    order = rarity.argsort()
    rows = []
    for part, place in enumerate(order.tensor_split(5)):
        rows.append(
            [
                f"{part + 1} of 5",
                f"{rarity[place].mean():.2f}",
                f"{error[place].median():.2f}",
                f"{ratio[place].median():.2f}",
            ]
        )
    correlation = float(spearmanr(rarity, error).statistic)
    return Table(
        f"Why v: {workers} workers at the same parameters, {steps} steps, beta_2 {beta_2:g}",
        ("coordinates", "quiet", "spread of v", "step by own v"),
        rows,
        "Fifths of the coordinates, by the share of batches in which a gradient is under a "
        "hundredth of its own root mean square (quiet). Spread of v: standard deviation over "
        "workers, of the mean of v; step by own v: how much larger a step the median worker takes "
        "with its own v than with the mean of all; both medians over coordinates. Rank correlation "
        f"of quiet and spread over the {len(rarity):,} coordinates that have gradients: "
        f"{correlation:.2f}.",
    )


def tables(runs: Runs, setting: Setting) -> list[Table]:
    """Return the results of a setting, and the rates that were tried."""
    results = {name: found for name in ROWS if (found := result_of(runs, name, setting))}
    if not results:
        return []
    rows = []
    for name, found in results.items():
        reference = results.get(REFERENCES[ROWS[name].optimizer], [])
        # Over the seeds that both have: these share their data and their first parameters.
        theirs = [loss_of(run) for run in reference[: len(found)]]
        ours = [loss_of(run) for run in found[: len(theirs)]]
        above = statistics.mean(ours) / statistics.mean(theirs) - 1 if theirs else math.nan
        rows.append(as_row(name, found, above))
    grid = [
        [
            name,
            "; ".join(
                f"{rate:g}: {f'{loss:.3f}' if math.isfinite(loss) else 'diverged'}"
                for rate, loss in tried(runs, name, setting).items()
            ),
        ]
        for name in results
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
            "worker sends in the time of one gradient step of the fastest, moments included.",
        ),
        Table(f"Learning rates tried, first seed: {setting}", ("", "rate: loss"), grid),
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
    parser.add_argument("--model", default="mlp", choices=list(OBJECTIVES))
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1500, help="of each worker")
    parser.add_argument("--seeds", type=int, default=1, help="at each row's best rate")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--no-runs", action="store_true", help="only tabulate what has been run")
    parser.add_argument("--why", action="store_true", help="how noisy v is and where")
    options = parser.parse_args()
    names = chosen(parser, options.rows, ROWS)
    steps = 20 if options.quick else options.steps
    workers = 4 if options.quick else options.workers
    report = Report(NAME, "Final loss at equal tokens, simulated", quick=options.quick)
    runs = Runs((QUICK_RESULTS if options.quick else RESULTS) / f"{NAME}.jsonl")
    settings = [Setting(data, options.model, workers, steps) for data in options.data.split(",")]
    for setting in settings if not options.no_runs else ():
        for name in names:
            measure(runs, name, setting, options.seeds)
    for setting in runs.settings() if options.no_runs else settings:
        report.tables += tables(runs, setting)
    if options.why:
        report.tables += [rare_gradients(workers, steps, beta_2) for beta_2 in (0.999, 0.95)]
    every = list(runs.known.values())
    report.write({"runs": every if options.json else f"{NAME}.jsonl"}, options.json)


if __name__ == "__main__":
    main()
