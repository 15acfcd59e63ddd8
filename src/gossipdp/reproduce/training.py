"""Loss and consensus distance on rings of 4 to 64 workers: does A2CiD2 act like a doubled rate?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import final

from gossipdp.reproduce import training_text
from gossipdp.reproduce.jobs import run_jobs
from gossipdp.reproduce.section import Effort, Section
from gossipdp.reproduce.training_text import TrainingResult, TrainingRun, TrainingSettings
from gossipdp.simulate.compute_time import ConstantTime, LognormalTime
from gossipdp.simulate.objective import Objective
from gossipdp.simulate.objectives import digits_objective
from gossipdp.simulate.optimizers import Sgd
from gossipdp.simulate.quadratic import Quadratic
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import simulate

RATES = (("gossip", 1.0), ("gossip", 2.0), ("a2cid2", 1.0))
SETTINGS = TrainingSettings(
    total_steps=19_200,
    batch_size=32,
    largest_learning_rate=0.2,
    largest=64,
    momentum=0.9,
    weight_decay=5e-4,
    dirichlet_alpha=0.1,
    step_spread=0.1,
    noise_steps=800.0,
    noise_learning_rate=0.1,
)
QUICK = TrainingSettings(
    total_steps=160,
    batch_size=32,
    largest_learning_rate=0.2,
    largest=8,
    momentum=0.9,
    weight_decay=5e-4,
    dirichlet_alpha=0.1,
    step_spread=0.1,
    noise_steps=40.0,
    noise_learning_rate=0.1,
    num_records=8,
)


@final
class TrainingSection(Section[TrainingResult]):
    """The paper's claim that on a ring A2CiD2 acts like doubling the comm rate."""

    name = "training"
    title = "Training on rings"
    result_type = TrainingResult

    def measure(self, effort: Effort) -> TrainingResult:
        """Train on digits, alike and not; then keep white noise in check."""
        settings = QUICK if effort.quick else SETTINGS
        sizes = (4, 8) if effort.quick else (4, 8, 16, 32, 64)
        seeds = range(1 if effort.quick else 3)
        largest = settings.largest
        networks = [("ring", n) for n in sizes] + [
            (graph, largest) for graph in ("exponential", "complete")
        ]
        digits = [
            TrainingJob(settings, data, graph, n, method, rate, seed)
            for data, (graph, n), (method, rate), seed in product(
                ("iid", "dirichlet"), networks, RATES, seeds
            )
        ] + [
            TrainingJob(settings, data, "ring", n, "allreduce", 1.0, seed)
            for data, n, seed in product(("iid", "dirichlet"), sizes, seeds)
        ]
        noise = [
            TrainingJob(settings, "noise", "ring", largest, method, rate, seed)
            for (method, rate), seed in product(RATES, seeds)
        ]
        # Noise takes several times as many steps, each of them cheaper.
        runs = run_jobs(
            measure_run, digits + noise, effort, "training",
            cost=lambda job: 2.0 if job.data == "noise" else 1.0,
        )  # fmt: skip
        return TrainingResult(runs=runs, settings=settings, seeds=list(seeds))

    def draw(self, result: TrainingResult, path: Path) -> None:
        """Distance and loss over n, and over time at the largest ring."""
        training_text.draw(result, path)

    def write(self, result: TrainingResult) -> list[str]:
        """Rings, then the other graphs."""
        return training_text.write(result)


@dataclass(frozen=True)
class TrainingJob:
    """One run: ``data`` is "iid", "dirichlet" or "noise" (a flat quadratic with white noise)."""

    settings: TrainingSettings
    data: str
    graph: str
    num_workers: int
    method: str
    comm_rate: float
    seed: int

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        if self.data == "noise":
            return Quadratic(mu=0.0, smoothness=0.0, noise_variance=1.0)
        return digits_objective(
            batch_size=self.settings.batch_size,
            dirichlet_alpha=self.settings.dirichlet_alpha if self.data == "dirichlet" else None,
        )

    @property
    def optimizer(self) -> Sgd:
        """SGD with momentum, its learning rate proportional to the number of workers."""
        settings = self.settings
        if self.data == "noise":
            return Sgd(settings.noise_learning_rate, settings.momentum)
        return Sgd(
            settings.largest_learning_rate * self.num_workers / settings.largest,
            settings.momentum,
            settings.weight_decay,
        )


def measure_run(job: TrainingJob) -> TrainingRun:
    """Train one network."""
    settings, is_noise = job.settings, job.data == "noise"
    is_synchronous = job.method == "allreduce"
    scenario = Scenario(
        graph=job.graph,
        num_workers=job.num_workers,
        objective=job.objective,
        optimizer=job.optimizer,
        comm_rate=job.comm_rate,
        # All-reduce does as many rounds as the others do steps: waiting is the next section's.
        compute_time=ConstantTime(1.0)
        if is_synchronous
        else LognormalTime(1.0, settings.step_spread),
        num_steps=settings.noise_steps if is_noise else settings.total_steps / job.num_workers,
        num_records=settings.num_records,
        learning_rate_decay=not is_noise,
        seed=job.seed,
    )
    trace = simulate(scenario, job.method)
    distances = trace.column("consensus_distance")
    last = trace.records[-1]
    return TrainingRun(
        data=job.data,
        graph=job.graph,
        num_workers=job.num_workers,
        method=job.method,
        comm_rate=job.comm_rate,
        seed=job.seed,
        loss=last.loss,
        accuracy=None if is_noise else last.metric,
        late_distance=float(distances[settings.num_records // 2 :].mean()),
        distances=[float(f"{distance:.5g}") for distance in distances],
    )
