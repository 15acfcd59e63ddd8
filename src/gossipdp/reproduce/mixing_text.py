"""What the section on mixing measured, its figure and its text."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from gossipdp.reproduce.drawing import COLOURS, MARKERS, new_figure, save
from gossipdp.reproduce.fits import PowerLaw, fit_power_law, spread
from gossipdp.reproduce.markdown import table, verdict
from gossipdp.reproduce.section import FIGURE

METHOD_NAMES = {
    "dpsgd": "synchronous",
    "dpsgd-chebyshev": "accelerated synchronous",
    "gossip": "asynchronous, plain",
    "a2cid2": "A2CiD2",
}
# The paper's table; that of plain asynchronous gossip, which it does not have, is our derivation.
PAPER_EXPONENTS = {
    "dpsgd": {"star": 2.0, "ring": 3.0, "complete": 2.0},
    "dpsgd-chebyshev": {"star": 1.5, "ring": 2.0, "complete": 2.0},
    "gossip": {"star": 1.0, "ring": 3.0, "complete": 1.0},
    "a2cid2": {"star": 1.0, "ring": 2.0, "complete": 1.0},
}
TOLERANCE = 0.15
LABEL_DECADES = 0.36
"""How far apart two labels of the figure must be."""
LARGE = 32
"""From this size on terms such as 1 - 1/n play no part any more."""


class MixingPoint(msgspec.Struct, frozen=True):
    """One graph, method and size."""

    graph: str
    method: str
    num_workers: int
    communications: list[float]
    """Per e-fold of the consensus distance, over the whole network; one a seed."""
    prediction: float
    """The same by theory."""


class MixingResult(msgspec.Struct, frozen=True):
    """All points, and how they were measured."""

    points: list[MixingPoint]
    dimension: int
    tail: tuple[float, float]

    def series(self, graph: str, method: str) -> list[MixingPoint]:
        """Points by size."""
        found = [p for p in self.points if (p.graph, p.method) == (graph, method)]
        return sorted(found, key=lambda point: point.num_workers)

    def exponent(self, graph: str, method: str, smallest: int = 0) -> PowerLaw:
        """Fitted to the means over seeds, of sizes from ``smallest`` on where there are two."""
        series = self.series(graph, method)
        large = [point for point in series if point.num_workers >= smallest]
        chosen = large if len(large) > 1 else series
        return fit_power_law(
            [point.num_workers for point in chosen],
            [spread(point.communications).mean for point in chosen],
        )

    @property
    def graphs(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(point.graph for point in self.points))


def draw(result: MixingResult, path: Path) -> None:
    """Measured points, the fitted power laws as lines, theory as dots."""
    figure = new_figure(4.2)
    panels = figure.subplots(1, len(result.graphs), sharey=True)
    for axes, graph in zip(panels, result.graphs, strict=True):
        ends: list[tuple[float, str, str]] = []
        for place, (method, name) in enumerate(METHOD_NAMES.items()):
            series, law = result.series(graph, method), result.exponent(graph, method)
            sizes = [point.num_workers for point in series]
            means = [spread(point.communications).mean for point in series]
            colour = COLOURS[place]
            # Where two methods do the same, the one beneath looks out.
            size = 8.0 if method == "gossip" else 5.0
            axes.plot(sizes, means, MARKERS[place], color=colour, markersize=size, label=name)
            axes.plot(sizes, [law.factor * n**law.exponent for n in sizes], color=colour, lw=1.3)
            ends.append((math.log10(means[-1]), f"$n^{{{law.exponent:.2f}}}$", colour))
        height = -math.inf
        for end, label, colour in sorted(ends):
            height = max(end, height + LABEL_DECADES)
            axes.annotate(
                label, (sizes[-1], 10**height), (7, -4), textcoords="offset points", color=colour
            )
        axes.set(xscale="log", yscale="log", title=graph, xlabel="workers n")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.margins(x=0.22)
    panels[0].set_ylabel("communications per e-fold")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, path)


def write(result: MixingResult) -> list[str]:
    """The section's Markdown."""
    high, low = result.tail
    exponents = []
    hold = []
    for graph in result.graphs:
        for method, name in METHOD_NAMES.items():
            paper = PAPER_EXPONENTS[method][graph]
            every, large = result.exponent(graph, method), result.exponent(graph, method, LARGE)
            hold.append(abs(every.exponent - paper) <= TOLERANCE)
            exponents.append(
                (
                    graph, name, f"{paper:g}" + (" (ours)" if method == "gossip" else ""),
                    f"{every.exponent:.3f} ± {every.standard_error:.3f}",
                    f"{large.exponent:.3f} ± {large.standard_error:.3f}",
                    "yes" if hold[-1] else "no",
                )
            )  # fmt: skip
    sizes = sorted({point.num_workers for point in result.points})
    return [
        "Claim: how many communications the workers of a star, a ring and a complete graph need "
        "to agree to a given precision grows with their number n as a power of n, and no method "
        "has a smaller one than A2CiD2 on any of them.",
        f"Verdict: {verdict(all(hold))}. {sum(hold)} of {len(hold)} exponents lie within "
        f"{TOLERANCE:g} of the paper's table, fitted over n = {sizes[0]} to {sizes[-1]}.",
        table(
            ("graph", "method", "paper's exponent", f"measured, n = {sizes[0]} to {sizes[-1]}",
             f"n ≥ {LARGE}", f"within {TOLERANCE:g}"),
            exponents,
            num_left=2,
        ),
        FIGURE,
        f"How it is measured: workers start from normal vectors of {result.dimension} values. "
        "Communications per e-fold is the slope of the number of communications over "
        "−log(consensus distance), by least squares over the tail of the run, where the consensus "
        f"distance is between {high:g} and {low:g} of its first value. One communication is one "
        "edge used once, by both its ends; a synchronous round uses all |E|. Exponents are least "
        "squares of log on log over the means of the seeds, ± standard error; nothing is weighted "
        "and no size is left out. The column for large n shows how much terms such as 1 − 1/n "
        "bend the small ones.",
        "What differs from the paper: its table holds worst-case bounds; these are rates of "
        "single runs, from random starts. It has no row of plain asynchronous gossip: that one is "
        "our derivation (total rate × 2 χ₁). On the complete graph A2CiD2 is plain gossip "
        "(α̃ = ½), so that its points are the same. Synchronous rounds multiply by (I + W)/2 with "
        "Metropolis weights W, on all three graphs: on the complete graph W itself is the mean, "
        "and one round ends it. The accelerated ones run the Chebyshev recursion on the same "
        "matrix. Rates of edges are the default ones; scaling them changes how long it takes, not "
        "how many communications.",
        "All points; ± is the standard deviation over the seeds, left out where it is "
        "below a thousandth; there are more seeds of small networks (6 to 64; 3 of synchronous "
        "rounds). The prediction is theory and "
        "plays no part in what is measured: for asynchronous methods the bound from χ₁ and χ₂ on "
        "the expected decay (`gossipdp plan`), for synchronous ones the rate by the spectral gap.",
        "<details><summary>All points</summary>",
        table(
            ("graph", "method", "n", "measured", "prediction", "measured / prediction"),
            [_point_row(point) for point in result.points],
            num_left=2,
        ),
        "</details>",
    ]  # fmt: skip


def _point_row(point: MixingPoint) -> tuple[str, ...]:
    measured = spread(point.communications)
    return (
        point.graph,
        METHOD_NAMES[point.method],
        str(point.num_workers),
        measured.text,
        f"{point.prediction:,.4g}" if point.prediction < 1000 else f"{point.prediction:,.0f}",
        f"{measured.mean / point.prediction:.2f}",
    )
