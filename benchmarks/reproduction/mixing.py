"""Communications per e-fold of the consensus distance, measured; and how they grow with n."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from reproduction import parts
from reproduction.parts import COLOURS, CONSISTENT, TAIL, Estimate, verdict

from gossipdp.graph import Constants, Graph, build_graph
from gossipdp_lab.simulate import Consensus, Scenario, simulate
from gossipdp_lab.simulate.trace import decay_per_exchange

FloatArray = NDArray[np.float64]

GRAPHS = ("star", "ring", "complete")
METHOD_NAMES = {
    "dpsgd": "synchronous",
    "dpsgd-chebyshev": "accelerated synchronous",
    "gossip": "asynchronous, plain",
    "a2cid2": "A2CiD2",
}
ASYNCHRONOUS = ("gossip", "a2cid2")
EXPONENTS = {
    "dpsgd": {"star": 2.0, "ring": 3.0, "complete": 2.0},
    "dpsgd-chebyshev": {"star": 1.5, "ring": 2.0, "complete": 2.0},
    "gossip": {"star": 1.0, "ring": 3.0, "complete": 1.0},
    "a2cid2": {"star": 1.0, "ring": 2.0, "complete": 1.0},
}
"""The paper's table; it has no plain asynchronous gossip, whose row is our derivation."""
OURS = "gossip"
TOLERANCE = 0.15
DIMENSION = 16
NUM_RECORDS = 800
LABEL_DECADES = 0.36
"""The least distance of two labels of the figure."""


class Point(msgspec.Struct, frozen=True):
    graph: str
    method: str
    num_workers: int
    communications: list[float]
    """Per e-fold of the consensus distance, over the whole network; one a seed."""


class Result(msgspec.Struct, frozen=True):
    points: list[Point]
    dimension: int
    tail: tuple[float, float]

    def series(self, graph: str, method: str) -> list[Point]:
        found = [p for p in self.points if (p.graph, p.method) == (graph, method)]
        return sorted(found, key=lambda point: point.num_workers)

    def exponent(self, graph: str, method: str) -> parts.PowerLaw:
        """Fitted to the means over seeds."""
        series = self.series(graph, method)
        return parts.fit_power_law(
            [point.num_workers for point in series],
            [Estimate.of(point.communications).mean for point in series],
        )

    @property
    def graphs(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(point.graph for point in self.points))


def measure(quick: bool) -> Result:
    sizes = (8, 16) if quick else (8, 16, 32, 64, 128, 256)

    def num_seeds(method: str, num_workers: int) -> int:
        # More of small networks, whose few exchanges leave more to chance. Synchronous rounds
        # leave nothing to chance but the start, which the tail has forgotten.
        if quick:
            return 2
        return min(64, max(6, 1024 // num_workers)) if method in ASYNCHRONOUS else 3

    # The longest first: large ones.
    jobs = [
        {"graph": graph, "method": method, "num_workers": n, "num_seeds": num_seeds(method, n)}
        for n, graph, method in product(reversed(sizes), GRAPHS, METHOD_NAMES)
    ]
    points = parts.run_jobs(measure_point, jobs)
    return Result(points=points, dimension=DIMENSION, tail=TAIL)


def measure_point(graph: str, method: str, num_workers: int, num_seeds: int) -> Point:
    one = _asynchronous if method in ASYNCHRONOUS else _synchronous
    found = [one(graph, method, num_workers, seed) for seed in range(num_seeds)]
    return Point(graph, method, num_workers, found)


def _asynchronous(graph: str, method: str, num_workers: int, seed: int) -> float:
    """Pairwise exchanges over the whole network per e-fold."""
    constants = Constants.of(build_graph(graph, num_workers))
    exchanges_per_worker = constants.exchanges_per_unit_time * 2.0 / num_workers
    plain = method == "gossip"
    decay = constants.gossip_decay_bound if plain else constants.a2cid2_decay_bound
    scenario = Scenario(
        graph=graph,
        num_workers=num_workers,
        objective=Consensus(DIMENSION),
        # The bound only says how long to simulate at most: long enough for a slow seed, too.
        num_steps=1.5 * -math.log(TAIL[1]) / (decay * exchanges_per_worker),
        num_records=NUM_RECORDS,
        stop_below=TAIL[1],
        seed=seed,
    )
    return num_workers / 2.0 / simulate(scenario, method).decay_per_exchange(lowest=TAIL[1])


def mixing_matrix(graph: Graph) -> FloatArray:
    """Return Metropolis-Hastings weights, (n, n): symmetric, rows and columns sum to one.

        w_ij = 1 / (1 + max(deg_i, deg_j)) on edges,   w_ii = 1 - sum_j w_ij

    Source: Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation",
    2007. They need the degrees of neighbours only.
    """
    num_workers = len(graph)
    matrix = np.zeros((num_workers, num_workers))
    for i, j in graph.edges:
        matrix[i, j] = matrix[j, i] = 1.0 / (1.0 + max(len(graph[i]), len(graph[j])))
    np.fill_diagonal(matrix, 1.0 - matrix.sum(axis=1))
    return matrix


def second_eigenvalue(matrix: FloatArray) -> float:
    """Return the second largest absolute eigenvalue: a round shrinks disagreement by it."""
    values = np.linalg.eigvalsh(matrix)  # the largest is one, of the constant vector
    return max(abs(float(values[0])), abs(float(values[-2])))


def lazy_matrix(graph: Graph) -> FloatArray:
    """Return (I + W) / 2, whose eigenvalues are not negative.

    On a complete graph W itself is the mean: one round, and no rate to speak of.
    """
    return 0.5 * (np.eye(len(graph)) + mixing_matrix(graph))


def mixing_rounds(matrix: FloatArray, rows: FloatArray, gamma: float = 0.0) -> Iterator[FloatArray]:
    """Yield rows of shape (n, d) after each round of W, plain or, with ``gamma``, by Chebyshev.

        x_1     = W x_0
        x_{t+1} = (1 + omega_t) W x_t - omega_t x_{t-1}
        1 + omega_1 = 1 / (1 - gamma^2 / 2),   1 + omega_t = 1 / (1 - gamma^2 (1 + omega_{t-1}) / 4)

    with gamma the second largest absolute eigenvalue of W (0: omega stays 0). So x_t =
    T_t(W / gamma) / T_t(1 / gamma) x_0 with the Chebyshev polynomials T_t: of all polynomials of
    degree t in W that keep the mean, the one whose largest value over the eigenvalues
    [-gamma, gamma] is least. Late rounds shrink disagreement by (1 - root) / (1 + root) with
    root = sqrt(1 - gamma^2), in the square.

    Source: Golub, Varga 1961; for gossip Arioli, Scott 2014, and Scaman et al. 2017 (algorithm 2).
    """
    omega, divisor, before = 0.0, 2.0, rows
    while True:
        before, rows = rows, (1.0 + omega) * (matrix @ rows) - omega * before
        yield rows
        omega, divisor = 1.0 / (1.0 - gamma**2 * (1.0 + omega) / divisor) - 1.0, 4.0


def _synchronous(graph: str, method: str, num_workers: int, seed: int) -> float:
    """Return the rounds per e-fold, times |E|."""
    built = build_graph(graph, num_workers)
    matrix = lazy_matrix(built)
    gamma = second_eigenvalue(matrix) if method == "dpsgd-chebyshev" else 0.0
    rows = np.random.default_rng(seed).standard_normal((num_workers, DIMENSION))
    rows -= rows.mean(axis=0)  # which rounds keep
    distances = [float(np.vdot(rows, rows))]
    for mixed in mixing_rounds(matrix, rows, gamma):
        distances.append(float(np.vdot(mixed, mixed)))
        if distances[-1] < TAIL[1] * distances[0]:
            break
    communications = np.arange(len(distances)) * float(len(built.edges))
    return 1.0 / decay_per_exchange(communications, np.array(distances), lowest=TAIL[1])


def draw(result: Result, path: Path) -> None:
    """Draw a panel a graph: measured points, the fitted power laws as lines."""
    figure, panels = parts.figure_of_page_width(4.2, 1, len(result.graphs), sharey=True)
    for axes, graph in zip(panels, result.graphs, strict=True):
        ends: list[tuple[float, str, str]] = []
        for place, (method, name) in enumerate(METHOD_NAMES.items()):
            series, law = result.series(graph, method), result.exponent(graph, method)
            sizes = [point.num_workers for point in series]
            means = [Estimate.of(point.communications).mean for point in series]
            colour = COLOURS[place]
            # Where two methods do the same, the one beneath looks out.
            size = 8.0 if method == "gossip" else 5.0
            axes.plot(sizes, means, parts.MARKERS[place], color=colour, markersize=size, label=name)
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
    parts.save(figure, path)


def claims(result: Result) -> list[tuple[str, str]]:
    """Compare the exponents with the paper's, and with those that we derived."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for method, graph in product(METHOD_NAMES, result.graphs):
        found = result.exponent(graph, method).exponent
        errors[method == OURS].append(abs(found - EXPONENTS[method][graph]))
    most = max(errors[False])
    return [
        (
            "table 1: to agree on the star, the ring and the complete graph, n workers need "
            "n^1, n^2 and n^1 communications with A2CiD2, no fewer with others",
            f"{verdict(most <= TOLERANCE, CONSISTENT)}: its {len(errors[False])} exponents, "
            f"synchronous methods' too, lie within {most:.2f} of the fitted ones; so do those that "
            f"we derived for plain gossip ({max(errors[True]):.2f})",
        )
    ]


def caption(result: Result) -> list[str]:
    sizes = sorted({point.num_workers for point in result.points})
    high, low = result.tail
    return [
        f"Random vectors of {sizes[0]} to {sizes[-1]} workers, no gradients: uses of an edge, over "
        f"the whole network, that shrink the consensus distance by a factor e, fitted from {high:g}"
        f" to {low:g} of its first value. The paper has worst-case bounds; these are rates of "
        "single runs."
    ]
