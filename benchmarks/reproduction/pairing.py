"""Pairing and the duration of exchanges, for every neighbour policy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from reproduction import parts
from reproduction.parts import COLOURS, HOLDS, TAIL, verdict

from gossipdp_lab.simulate import (
    Consensus,
    ConstantTime,
    Link,
    LinkModel,
    LognormalTime,
    Scenario,
    Trace,
    simulate,
)
from gossipdp_lab.simulate.policies import NEIGHBOUR_POLICIES

GRAPHS = ("ring", "torus", "exponential", "complete")
DURATIONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
SATURATED = 1.5
AT_LEAST = 5.0
LARGE = 64
STEP_S = 1.0
LATENCY_S = 0.001
EXCHANGE_JITTER, STEP_JITTER = 0.3, 0.1
DIMENSION = 16
NUM_RECORDS = 600


CELL = ("method", "graph", "num_workers", "policy", "duration", "is_jittered", "seed")
"""The fields in which runs differ: the first of :class:`Run`."""


class Run(msgspec.Struct, frozen=True):
    """One run; decays per exchange per worker and per gradient step, see :func:`decay`."""

    method: str
    graph: str
    num_workers: int
    policy: str
    duration: float
    """Duration of an exchange, in gradient steps."""
    is_jittered: bool
    seed: int
    decay_per_exchange: float
    decay_per_step: float
    comm_rate: float

    @property
    def network(self) -> str:
        """Method and graph."""
        plain = "" if self.method == "a2cid2" else f", {self.method}"
        return f"{self.graph} {self.num_workers}{plain}"


class Result(msgspec.Struct, frozen=True):
    """All runs, and how they were made."""

    runs: list[Run]
    num_steps: float
    dimension: int

    def choose(self, **wanted: object) -> list[Run]:
        """Return the runs whose attributes are all as wanted."""
        return [run for run in self.runs if all(getattr(run, k) == v for k, v in wanted.items())]

    def values(self, attribute: str, of: Callable[[Run], bool] | None = None) -> list[str]:
        """Return the different values of an attribute, in the order of measurement."""
        chosen = self.runs if of is None else filter(of, self.runs)
        return list(dict.fromkeys(getattr(run, attribute) for run in chosen))

    @property
    def fresh_over_available(self) -> dict[tuple[str, bool], float]:
        """Decay per exchange of ``fresh`` over that of ``available``, links saturated.

        By network (the ring, and the large torus), and whether durations are jittered.
        """
        ratios = {}
        for network in self.values("network", _counts):
            for is_jittered in (False, True):
                cell = {
                    "network": network, "duration": SATURATED, "is_jittered": is_jittered
                }  # fmt: skip
                both = [self.choose(policy=policy, **cell) for policy in ("fresh", "available")]
                if all(both):
                    fresh, available = (
                        statistics.fmean(run.decay_per_exchange for run in runs) for runs in both
                    )
                    ratios[network, is_jittered] = fresh / available if available > 0 else math.inf
        return ratios

    def slow_runs(self) -> list[Run]:
        """Return runs of ``fresh`` that decay at under a third of their network's usual rate."""
        fresh = self.choose(policy="fresh")
        usual = {
            network: statistics.median(r.decay_per_exchange for r in fresh if r.network == network)
            for network in {run.network for run in fresh}
        }
        return [run for run in fresh if run.decay_per_exchange < usual[run.network] / 3.0]


def _counts(run: Run) -> bool:
    """Return whether the verdict is about this network."""
    return (run.graph == "ring" and run.method == "a2cid2") or run.num_workers == LARGE


def measure(quick: bool) -> Result:
    """Every policy, duration and graph."""
    size, num_steps = (8, 40.0) if quick else (16, 200.0)
    seeds = range(1 if quick else 2)
    graphs = ("ring",) if quick else GRAPHS
    durations = (0.0, SATURATED) if quick else DURATIONS
    small = [("a2cid2", graph, size) for graph in graphs] + [("gossip", "ring", size)]
    cells = list(product(small, NEIGHBOUR_POLICIES, durations, (False, True), seeds))
    if not quick:
        large = [("a2cid2", "torus", LARGE)]
        cells += product(large, ("fresh", "available"), (SATURATED,), (False, True), seeds)
    jobs = [dict(zip(CELL, (*network, *rest), strict=True)) for network, *rest in cells]
    measure_one = partial(measure_run, num_steps)
    runs = parts.run_jobs(measure_one, jobs)
    return Result(runs=runs, num_steps=num_steps, dimension=DIMENSION)


def measure_run(num_steps: float, **cell: Any) -> Run:
    """Simulate one run without gradients over links; ``cell``: the fields of ``CELL``."""
    duration, is_jittered = cell["duration"], cell["is_jittered"]
    scenario = Scenario(
        graph=cell["graph"],
        num_workers=cell["num_workers"],
        objective=Consensus(DIMENSION),
        fidelity="links",
        neighbour_policy=cell["policy"],
        compute_time=LognormalTime(STEP_S, STEP_JITTER) if is_jittered else ConstantTime(STEP_S),
        links=LinkModel(
            every=Link(LATENCY_S, 1.0 / duration if duration else math.inf),
            jitter=EXCHANGE_JITTER if is_jittered else 0.0,
        ),
        model_bytes=STEP_S,
        num_steps=num_steps,
        num_records=NUM_RECORDS,
        stop_below=1e-12,
        seed=cell["seed"],
    )
    trace = simulate(scenario, cell["method"])
    per_exchange, rate = decay(trace), late_comm_rate(trace)
    return Run(
        **cell,
        decay_per_exchange=per_exchange,
        decay_per_step=per_exchange * rate,
        comm_rate=rate,
    )


def decay(trace: Trace) -> float:
    """Return the decay per exchange, also of a run that hardly falls."""
    return trace.decay_per_exchange(lowest=TAIL[1], least_fall=1.0)


def late_comm_rate(trace: Trace) -> float:
    """Exchanges per worker and step, over the second half of the run: at first nobody asks."""
    half = len(trace.records) // 2
    steps, exchanges = (trace.column(name)[half:] for name in ("time_s", "exchanges"))
    made = 2.0 * (exchanges[-1] - exchanges[0]) / trace.num_workers
    return float(made / ((steps[-1] - steps[0]) / trace.unit_s))


def draw(result: Result, path: Path) -> None:
    """Decay over the duration of exchanges that vary: a panel a network."""
    networks = [
        network
        for network in result.values("network")
        if len({run.duration for run in result.choose(network=network)}) > 1
    ]
    figure, panels = parts.figure_of_page_width(3.2, 1, len(networks), squeeze=False)
    for axes, network in zip(panels[0], networks, strict=True):
        for place, policy in enumerate(result.values("policy")):
            by_duration: dict[float, list[float]] = {}
            for run in result.choose(network=network, policy=policy, is_jittered=True):
                by_duration.setdefault(run.duration, []).append(run.decay_per_exchange)
            means = [statistics.fmean(decays) for decays in by_duration.values()]
            axes.plot(
                list(by_duration), means, marker=parts.MARKERS[place], color=COLOURS[place],
                label=policy, markersize=4.5, lw=1.4,
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_xticks((0, 0.5, 1, 1.5, 2), ("0", "", "1", "", "2"))
        axes.tick_params(labelsize="small")
    panels[0, 0].set_ylabel("decay per exchange", fontsize="small")
    for axes, network in zip(panels[0], networks, strict=True):
        axes.set_title(network, fontsize="medium")
    figure.supxlabel("duration of an exchange, in gradient steps", fontsize="medium")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4)
    parts.save(figure, path)


def claims(result: Result) -> list[tuple[str, str]]:
    """Compare the library's rule with the first that is free."""
    ratios = result.fresh_over_available
    holds = bool(ratios) and all(ratio >= AT_LEAST for ratio in ratios.values())
    shown = ", ".join(f"{ratio:.0f}" for ratio in ratios.values())
    slow, runs = result.slow_runs(), result.choose(policy="fresh")
    return [
        (
            "ours: to pair with any worker that is free stops the mixing on slow links",
            f"{verdict(holds, HOLDS)}: with exchanges of {SATURATED:g} steps our rule agrees "
            f"{shown} times as fast (ring of 16, torus of {LARGE}; constant and jittered times); "
            f"{len(slow)} of its {len(runs)} runs were slower than a third of the median",
        )
    ]


def caption(result: Result) -> list[str]:
    """Say what was measured, and what differs from the paper."""
    return [
        "How fast workers agree per exchange, over the duration of an exchange; durations vary at "
        "random. `available`: with the first that is free, as in the paper, so the same pairs "
        "meet again and again; `fresh`, our rule: not with the latest partners; `poisson`: with "
        "a partner drawn in advance; `scheduled`: in a fixed order. No gradients, at most "
        f"{result.num_steps:g} steps. The paper does not measure pairing."
    ]
