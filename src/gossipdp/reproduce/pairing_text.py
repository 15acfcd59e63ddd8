"""What the section on pairing measured, its figure and its text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec

from gossipdp.reproduce.drawing import COLOURS, MARKERS, new_figure, save
from gossipdp.reproduce.fits import spread
from gossipdp.reproduce.markdown import table, verdict
from gossipdp.reproduce.section import FIGURE

SATURATED = 1.5
AT_LEAST = 5.0
LARGE = 64
ASKING_ALL = (
    "half left out, asked last",
    "least recently met first",
    "drawn by age",
    "drawn by age squared",
)
"""The candidates that leave nobody out."""
WORTH_ADOPTING = 1.05
"""A candidate has to be better by this factor everywhere on average to be worth a new default."""


class PairingRun(msgspec.Struct, frozen=True):
    """One run; decays over its second half, per exchange per worker and per gradient step."""

    part: str
    """"duration" or "search"."""
    method: str
    graph: str
    num_workers: int
    policy: str
    duration: float
    """Of an exchange, in gradient steps."""
    is_jittered: bool
    seed: int
    decay_per_exchange: float
    decay_per_step: float
    comm_rate: float
    repeated_share: float
    """Share of exchanges with the same partner as before."""

    @property
    def network(self) -> str:
        """Method and graph."""
        plain = "" if self.method == "a2cid2" else f", {self.method}"
        return f"{self.graph} {self.num_workers}{plain}"


class PairingResult(msgspec.Struct, frozen=True):
    """All runs, and how they were made."""

    runs: list[PairingRun]
    num_steps: float
    dimension: int

    def choose(self, **wanted: object) -> list[PairingRun]:
        """The runs whose attributes are all as wanted."""
        return [run for run in self.runs if all(getattr(run, k) == v for k, v in wanted.items())]

    def values(self, attribute: str, of: Callable[[PairingRun], bool] | None = None) -> list[str]:
        """The different values of an attribute, in the order of measurement."""
        chosen = self.runs if of is None else filter(of, self.runs)
        return list(dict.fromkeys(getattr(run, attribute) for run in chosen))

    @property
    def must_show(self) -> dict[tuple[str, bool], float]:
        """Decay per exchange of ``fresh`` over that of ``available``, links saturated.

        By network, and whether durations are jittered.
        """
        ratios = {}
        for network in self.values("network", _counts):
            for is_jittered in (False, True):
                both = [
                    self.choose(
                        part="duration", network=network, policy=policy, duration=SATURATED,
                        is_jittered=is_jittered,
                    )
                    for policy in ("fresh", "available")
                ]  # fmt: skip
                if all(both):
                    fresh, available = (
                        statistics.fmean(run.decay_per_exchange for run in runs) for runs in both
                    )
                    ratios[network, is_jittered] = fresh / available if available > 0 else math.inf
        return ratios


def _counts(run: PairingRun) -> bool:
    """Whether the verdict is about this network: the ring, and the large torus."""
    is_ring = run.graph == "ring" and run.method == "a2cid2"
    return run.part == "duration" and (is_ring or run.num_workers == LARGE)


FIGURE_ROWS = (
    (False, "decay_per_exchange", "constant durations\ndecay per exchange"),
    (True, "decay_per_exchange", "jittered durations\ndecay per exchange"),
    (True, "decay_per_step", "jittered durations\ndecay per step"),
)


def draw(result: PairingResult, path: Path) -> None:
    """Decay over the duration of exchanges: a column a network, a row as in FIGURE_ROWS."""
    networks = [
        network
        for network in result.values("network", _is_part_one)
        if len({run.duration for run in result.choose(part="duration", network=network)}) > 1
    ]
    figure = new_figure(7.2)
    panels = figure.subplots(len(FIGURE_ROWS), len(networks), sharex=True, squeeze=False)
    for row, (is_jittered, attribute, label) in zip(panels, FIGURE_ROWS, strict=True):
        for axes, network in zip(row, networks, strict=True):
            for place, policy in enumerate(result.values("policy", _is_part_one)):
                by_duration: dict[float, list[float]] = {}
                for run in result.choose(
                    part="duration", network=network, policy=policy, is_jittered=is_jittered
                ):
                    by_duration.setdefault(run.duration, []).append(getattr(run, attribute))
                means = [statistics.fmean(decays) for decays in by_duration.values()]
                axes.plot(
                    list(by_duration), means, marker=MARKERS[place], color=COLOURS[place],
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
    save(figure, path)


def _is_part_one(run: PairingRun) -> bool:
    return run.part == "duration"


def write(result: PairingResult) -> list[str]:
    """The section's Markdown."""
    ratios = result.must_show
    holds = bool(ratios) and all(ratio >= AT_LEAST for ratio in ratios.values())
    shown = "; ".join(
        f"{network}, {'jittered' if is_jittered else 'constant'}: "
        + (f"{ratio:.0f} times" if math.isfinite(ratio) else "`available` does not decay at all")
        for (network, is_jittered), ratio in ratios.items()
    )
    return [
        "Claim (ours; the paper pairs workers that are free, and its theory needs edges that fire "
        "independently): once exchanges last as long as gradient steps, pairing with whoever is "
        "free locks in, and the network stops mixing; not asking the latest partners (`fresh`) "
        f"mends it, and decays at least {AT_LEAST:g} times as fast with saturated links.",
        f"Verdict: {verdict(holds)}. `fresh` over `available`, decay per exchange, exchanges of "
        f"{SATURATED:g} gradient steps: {shown}.",
        FIGURE,
        "**Saturated links** (exchanges of "
        f"{SATURATED:g} gradient steps, comm rate asked for 1). The same partner as before: 1 "
        "means that every worker meets one other for ever; by chance it would be 1 / degree.",
        _saturated_table(result),
        _slow_text(result),
        _search_text(result),
        _search_table(result),
        "How it is measured: real protocol code on simulated links (fidelity `links`), no "
        f"gradients, {result.dimension} values a worker, until the consensus distance is at 1e-12 "
        f"of its first or {result.num_steps:g} steps are over; A2CiD2 unless said otherwise. "
        "Decay is the slope of −log(consensus distance) over the second half of the run, which "
        "exists also where nothing mixes. Jittered: lognormal, gradient steps with spread 0.1, "
        "exchanges 0.3. Latency is a thousandth of a step.",
        "What differs from the paper: it measures no pairing by itself. At duration 0 `poisson` "
        "and `available` are its Poisson edges, but for the phases, which real workers estimate.",
    ]


def _saturated_table(result: PairingResult) -> str:
    rows = []
    for network in result.values("network", _is_part_one):
        for policy in result.values("policy", _is_part_one):
            for is_jittered in (False, True):
                runs = result.choose(
                    part="duration", network=network, policy=policy, duration=SATURATED,
                    is_jittered=is_jittered,
                )  # fmt: skip
                if runs:
                    rows.append(
                        (
                            network,
                            f"`{policy}`",
                            "jittered" if is_jittered else "constant",
                            spread([run.decay_per_exchange for run in runs]).text,
                            spread([run.decay_per_step for run in runs]).text,
                            f"{statistics.fmean(run.comm_rate for run in runs):.2f}",
                            f"{statistics.fmean(run.repeated_share for run in runs):.2f}",
                        )
                    )
    head = (
        "network", "policy", "durations", "decay per exchange", "decay per step",
        "comm rate", "same partner as before",
    )  # fmt: skip
    return table(head, rows, num_left=3)


def slow_runs(result: PairingResult) -> list[PairingRun]:
    """Runs of ``fresh`` that decay at less than a third of what is usual on their network."""
    fresh = result.choose(part="duration", policy="fresh")
    usual = {
        network: statistics.median(r.decay_per_exchange for r in fresh if r.network == network)
        for network in {run.network for run in fresh}
    }
    return [run for run in fresh if run.decay_per_exchange < usual[run.network] / 3.0]


def _slow_text(result: PairingResult) -> str:
    slow = slow_runs(result)
    num_runs = len(result.choose(part="duration", policy="fresh"))
    if not slow:
        return f"None of the {num_runs} runs of `fresh` decays at less than a third of the usual."
    found = "; ".join(
        f"{run.network}, exchanges of {run.duration:g} steps, "
        f"{'jittered' if run.is_jittered else 'constant'}, seed {run.seed}: "
        f"{run.decay_per_exchange:.3f} per exchange"
        for run in slow
    )
    return (
        f"**`fresh` is not immune.** {len(slow)} of its {num_runs} runs decayed at less than a "
        f"third of what is usual on the same network ({found}). Where nothing jitters, workers "
        "can fall for a while into cycles of partners, never the same one twice in a row, in "
        "which parts of the graph do not meet. Among the runs with jitter there "
        + ("is none such." if not any(run.is_jittered for run in slow) else "are such, too.")
    )


def gains(
    result: PairingResult, attribute: str, duration: float | None = None
) -> dict[str, tuple[float, float]]:
    """Each candidate over ``fresh``: geometric mean over networks, durations and seeds, paired.

    Args:
        result: the runs.
        attribute: what is compared.
        duration: count exchanges of this duration alone.

    Returns:
        Per candidate the ratio, and the standard error of its logarithm.
    """
    search = [run for run in result.choose(part="search") if duration in (None, run.duration)]
    reference = {
        (run.network, run.duration, run.seed): getattr(run, attribute)
        for run in search
        if run.policy == "fresh"
    }
    logarithms: dict[str, list[float]] = {}
    for run in search:
        base = reference[run.network, run.duration, run.seed]
        ratio = getattr(run, attribute) / base
        logarithms.setdefault(run.policy, []).append(math.log(max(ratio, 1e-6)))
    return {
        policy: (
            math.exp(statistics.fmean(values)),
            spread(values).deviation / math.sqrt(len(values)),
        )
        for policy, values in logarithms.items()
    }


def _search_text(result: PairingResult) -> str:
    by_time = gains(result, "decay_per_step")
    best = max((policy for policy in by_time if policy != "fresh"), key=lambda p: by_time[p][0])
    ratio, error = by_time[best]
    if ratio - 2 * error * ratio > WORTH_ADOPTING:
        worth = "That is beyond chance and more than a few percent: worth adopting."
    elif ratio - 2 * error * ratio > 1.0:
        worth = "That is beyond chance, but too little to change a default for."
    else:
        worth = "That is within chance: nothing to adopt."
    saturated = gains(result, "decay_per_step", SATURATED)
    all_asked = [saturated[policy][0] for policy in ASKING_ALL if policy in saturated]
    if all_asked:
        worth += (
            " What counts is to leave the latest partners out altogether: the candidates that ask "
            "them in the end, however late, pair with whoever is free when links are saturated, "
            f"and reach {min(all_asked):.2f} to {max(all_asked):.2f} of the decay of `fresh` there."
        )
    return (
        "**A search for something better.** Candidates for the initiator's choice, with jittered "
        "durations, on the graphs above. The columns by graph are decay per step over that "
        f"of `fresh`. Best per unit of time: *{best}*, {ratio:.3f} times `fresh` (± {error:.3f}, "
        f"paired by seed). {worth} The default stays `fresh`."
    )


def _search_table(result: PairingResult) -> str:
    per_exchange, per_step = gains(result, "decay_per_exchange"), gains(result, "decay_per_step")
    search = result.choose(part="search")
    cases = list(dict.fromkeys((run.network, run.duration) for run in search))
    rows = []
    for policy in per_step:
        cells = []
        for network, duration in cases:
            mine, fresh = (
                statistics.fmean(
                    run.decay_per_step
                    for run in search
                    if (run.network, run.duration, run.policy) == (network, duration, name)
                )
                for name in (policy, "fresh")
            )
            cells.append(f"{mine / fresh:.2f}")
        both = [
            f"{ratio:.3f} ± {error:.3f}"
            for ratio, error in (per_step[policy], per_exchange[policy])
        ]
        rows.append((policy, *both, *cells))
    head = ("candidate", "per step, over `fresh`", "per exchange, over `fresh`")
    return table((*head, *(f"{network}, {duration:g}" for network, duration in cases)), rows)
