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
from reproduction.parts import COLOURS, FIGURE, HOLDS, TAIL, Estimate, table, verdict

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

TITLE = "Pairing"
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
FIGURE_ROWS = (
    (False, "decay_per_exchange", "constant durations\ndecay per exchange"),
    (True, "decay_per_exchange", "jittered durations\ndecay per exchange"),
    (True, "decay_per_step", "jittered durations\ndecay per step"),
)


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
    """Decay over the duration of exchanges: a column a network, a row as in FIGURE_ROWS."""
    networks = [
        network
        for network in result.values("network")
        if len({run.duration for run in result.choose(network=network)}) > 1
    ]
    shape = (len(FIGURE_ROWS), len(networks))
    figure, panels = parts.figure_of_page_width(7.2, *shape, sharex=True, squeeze=False)
    for row, (is_jittered, attribute, label) in zip(panels, FIGURE_ROWS, strict=True):
        for axes, network in zip(row, networks, strict=True):
            for place, policy in enumerate(result.values("policy")):
                by_duration: dict[float, list[float]] = {}
                for run in result.choose(network=network, policy=policy, is_jittered=is_jittered):
                    by_duration.setdefault(run.duration, []).append(getattr(run, attribute))
                means = [statistics.fmean(decays) for decays in by_duration.values()]
                axes.plot(
                    list(by_duration), means, marker=parts.MARKERS[place], color=COLOURS[place],
                    label=policy, markersize=4.5, lw=1.4,
                )  # fmt: skip
            axes.set_ylim(bottom=0)
            axes.set_xticks((0, 0.5, 1, 1.5, 2), ("0", "", "1", "", "2"))
            axes.tick_params(labelsize="small")
        row[0].set_ylabel(label, fontsize="small")
    for axes, network in zip(panels[0], networks, strict=True):
        axes.set_title(network, fontsize="medium")
    figure.supxlabel("duration of an exchange, in gradient steps", fontsize="medium")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4)
    parts.save(figure, path)


def write(result: Result) -> list[str]:
    """Draw the policies and the lock-in."""
    ratios = result.fresh_over_available
    holds = bool(ratios) and all(ratio >= AT_LEAST for ratio in ratios.values())
    shown = "; ".join(
        (f"{ratio:.0f} times" if math.isfinite(ratio) else "infinitely many times")
        + f" on {network}, {'jittered' if is_jittered else 'constant'} durations"
        for (network, is_jittered), ratio in ratios.items()
    )
    return [
        "Claim (ours): if exchanges last as long as gradient steps and each worker pairs with the "
        "first that is free (`available`), the same pairs meet again and again, and the network "
        "stops mixing. The library's rule (`fresh`) leaves out a worker's latest partners: with "
        f"exchanges of {SATURATED:g} gradient steps, which saturate the links, workers then agree "
        f"at least {AT_LEAST:g} times as fast as with `available`.",
        f"Verdict: {verdict(holds, HOLDS)}. They agree faster by {shown}.",
        FIGURE,
        "[Decay per exchange](simulator.md#how-to-read-the-output) (more is faster) on saturated "
        "links, with jittered durations. In the figure `poisson` draws a partner in advance and "
        "waits for it; `scheduled` goes round in a fixed order.",
        _saturated_table(result),
        _slow_text(result),
        "How it is measured: the library's protocol on simulated links, without gradients; A2CiD2 "
        f"unless a row says gossip; comm rate 1 asked for; at most {result.num_steps:g} steps. The "
        f"decay is fitted while the distance falls from {TAIL[0]:g} to {TAIL[1]:g} of its first "
        "value. If a run ends earlier, it is fitted over the second half of the decades that the "
        "distance fell, which makes it too high. Jitter is lognormal, with a spread of "
        f"{STEP_JITTER:g} for steps and {EXCHANGE_JITTER:g} for exchanges.",
        "What differs from the paper: the paper pairs workers that are free and does not measure "
        "pairing; its theory assumes edges that fire independently.",
    ]


def _saturated_table(result: Result) -> str:
    policies, rows = ("fresh", "available"), []
    for network in result.values("network"):
        cells = []
        for policy in policies:
            runs = result.choose(
                network=network, policy=policy, duration=SATURATED, is_jittered=True
            )
            cells.append(Estimate.of([run.decay_per_exchange for run in runs]).text)
        rows.append((network, *cells))
    return table(("network", *(f"`{policy}`" for policy in policies)), rows)


def _slow_text(result: Result) -> str:
    slow = result.slow_runs()
    num_runs = len(result.choose(policy="fresh"))
    if not slow:
        return (
            f"None of the {num_runs} runs of `fresh` has less than a third of the median decay on "
            "its network."
        )
    found = "; ".join(
        f"{run.network}, exchanges of {run.duration:g} steps, "
        f"{'jittered' if run.is_jittered else 'constant'}, seed {run.seed}: "
        f"{run.decay_per_exchange:.3f} per exchange"
        for run in slow
    )
    return (
        f"**`fresh` is not immune.** {len(slow)} of its {num_runs} runs decayed at less than a "
        f"third of the median on the same network ({found}). If nothing jitters, workers can fall "
        "for a while into cycles of partners, never the same one twice in a row, in which parts of "
        "the graph do not meet. "
        + ("Some" if any(run.is_jittered for run in slow) else "None")
        + " of these runs had jitter."
    )
