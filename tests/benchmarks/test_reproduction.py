"""The reproduction: what its sections measure, what they conclude, and the page."""

import math
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import reproduce
from hypothesis import given
from hypothesis import strategies as st
from reproduction import invariant, mixing
from reproduction.parts import fit_power_law

from gossipdp.graph import build_graph

SIZES = [8, 16, 32, 64, 128, 256]
CONSISTENT = "**consistent with the paper**: its 9 exponents, synchronous methods' too, lie "
UNLIKE = "**not consistent with the paper**"


# Fits and spreads


@given(exponent=st.floats(0.1, 4), factor=st.floats(1e-3, 1e3))
def test_an_exact_power_law_is_found(exponent, factor):
    fit = fit_power_law(SIZES, [factor * n**exponent for n in SIZES])
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.factor == pytest.approx(factor, rel=1e-9)
    assert fit.standard_error < 1e-6


# Communications to agree


@pytest.mark.parametrize(
    ("error", "expected"), [(0.0, CONSISTENT), (0.14, CONSISTENT), (0.2, UNLIKE)]
)
def test_the_verdict_counts_the_paper_s_exponents_and_ours_apart(error, expected):
    points = [
        mixing.Point(graph, method, n, [n ** (paper + error)])
        for method, by_graph in mixing.EXPONENTS.items()
        for graph, paper in by_graph.items()
        for n in (8, 16, 32, 64)
    ]
    ((_, text),) = mixing.claims(mixing.Result(points, dimension=16, tail=(1e-6, 1e-12)))
    assert expected in text


def test_rounds_are_those_of_the_chebyshev_polynomials():
    gamma, value = 0.97, 0.4
    rounds = mixing.mixing_rounds(np.array([[value]]), np.ones((1, 1)), gamma)
    for degree, now in zip(range(1, 12), rounds, strict=False):
        chebyshev = np.polynomial.chebyshev.Chebyshev([0.0] * degree + [1.0])
        expected = chebyshev(value / gamma) / chebyshev(1 / gamma)
        assert now[0, 0] == pytest.approx(expected, abs=1e-12)
    plain = mixing.mixing_rounds(np.array([[value]]), np.ones((1, 1)))
    assert [float(next(plain)[0, 0]) for _ in range(2)] == pytest.approx([value, value**2])


def test_lazy_rounds_have_a_rate_on_a_complete_graph():
    lazy = mixing.lazy_matrix(build_graph("complete", 9))
    assert mixing.second_eigenvalue(lazy) == pytest.approx(0.5)


def test_metropolis_weights_of_a_star_and_a_ring():
    star = mixing.mixing_matrix(build_graph("star", 5))
    assert star[0, 1:] == pytest.approx([0.2] * 4)
    assert star[1, 1] == pytest.approx(0.8)
    ring = mixing.mixing_matrix(build_graph("ring", 40))
    assert ring[3, 2:5] == pytest.approx([1 / 3] * 3)
    gap = 2 / 3 * (1 - math.cos(2 * math.pi / 40))
    assert mixing.second_eigenvalue(ring) == pytest.approx(1 - gap)


# The invariant


def test_the_invariant_s_verdict_follows_from_the_runs():
    def run(method: str, distance: float, drift: float) -> invariant.Run:
        series = ([0.0, 5.0, 10.0], [1.0, 1e-3, distance], [0.0, drift, drift])
        return invariant.Run(method, 0, *series)

    others = [run("released", 1e-4, 1e-2), run("gossip", 1e-3, 1e-16)]
    good = invariant.Result([run("a2cid2", 1e-12, 1e-16), *others], 64, 10.0, [0], 64)
    bad = invariant.Result([run("a2cid2", 1e-12, 1e-9), *others], 64, 10.0, [0], 64)
    assert "**holds**" in invariant.claims(good)[0][1]
    assert "**does not hold**" in invariant.claims(bad)[0][1]
    assert good.released_when_ours_at(1e-10) == [1e-4]
    assert good.released_when_ours_at(1e-15) == []


# The page


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Run every section, in little, where a quick run writes by itself: under runs/."""
    committed = {path: path.read_bytes() for path in reproduce.DOCS.rglob("reproduction*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("quick"))
        reproduce.main(["--quick"])
        page = Path("runs/reproduction/reproduction.md").absolute()
    assert {path: path.read_bytes() for path in committed} == committed
    return page


def test_every_section_is_there_with_figure_claims_and_provenance(written):
    text = written.read_text()
    first = text.split("\n## ")[0]
    for name, title in reproduce.PICTURES.items():
        (part,) = (part for part in text.split("\n## ") if part.startswith(title))
        assert (written.parent / f"figures/reproduction-{name}.png").stat().st_size > 1000
        assert f"](figures/reproduction-{name}.png)" in part
        if name in reproduce.SECTIONS:
            assert "**Quick run.**" in part
            assert "<sub>" in part
    for claim in ("table 1:", "figures 1 and 2:", "table 2:", "table 3:", "ours:", "no locks"):
        assert claim in first


def test_method_rate_and_data_reach_the_simulator(written):
    """Each makes the difference in the quick runs that the simulator's own tests measure."""
    results = {
        name: msgspec.json.decode(reproduce.read_stored(written.parent, name).result, type=each)
        for name, each in ((name, part.Result) for name, part in reproduce.SECTIONS.items())
    }
    point = {
        (point.graph, point.method): sum(point.communications) / 2
        for point in results["mixing"].points
        if point.num_workers == 16
    }
    assert point["ring", "a2cid2"] < 0.6 * point["ring", "gossip"]
    assert point["ring", "dpsgd-chebyshev"] < 0.2 * point["ring", "dpsgd"]

    late = {
        (run.data, run.method, run.comm_rate): run.late_distance
        for run in results["training"].runs
        if (run.graph, run.num_workers) == ("ring", 8)
    }
    plain = late["noise", "gossip", 1.0]
    assert max(late["noise", "gossip", 2.0], late["noise", "a2cid2", 1.0]) < 0.75 * plain
    assert late["dirichlet", "gossip", 1.0] > 2 * late["iid", "gossip", 1.0]
    assert late["iid", "allreduce", 1.0] < 1e-9 * late["iid", "gossip", 1.0]

    racks = {(run.method, run.comm_rate): run.distances for run in results["racks"].runs}
    assert sum(racks["a2cid2", 1.0][20:]) < 0.7 * sum(racks["gossip", 1.0][20:])
    assert sum(racks["gossip", 2.0][20:]) < 0.7 * sum(racks["gossip", 1.0][20:])

    last = {run.method: run for run in results["invariant"].runs}
    assert max(last["a2cid2"].drifts + last["gossip"].drifts) < 1e-13
    assert max(last["released"].drifts) > 1e-3
    assert last["a2cid2"].distances[-1] < 1e-2 * last["gossip"].distances[-1]


def test_the_committed_page_is_that_of_the_committed_results(tmp_path, monkeypatch):
    for section in reproduce.SECTIONS.values():  # the text is compared; others look at figures
        monkeypatch.setattr(section, "draw", lambda result, path: None)
    monkeypatch.setattr(reproduce.images, "draw", lambda runs, path: None)
    (tmp_path / "figures").mkdir()
    for path in (reproduce.DOCS / "figures").glob("reproduction-*.json"):
        shutil.copy(path, tmp_path / "figures")
    page = reproduce.reproduce([], tmp_path)
    assert page.read_text() == (reproduce.DOCS / "reproduction.md").read_text()
