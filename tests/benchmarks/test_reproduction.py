"""The reproduction: what its sections measure, what they conclude, and the page."""

import json
import math
import re

import msgspec
import numpy as np
import pytest
import reproduce
from hypothesis import given
from hypothesis import strategies as st
from reproduction import invariant, mixing, pairing, training
from reproduction.parts import Effort, Estimate, fit_power_law

from gossipdp.graph import build_graph
from gossipdp_lab.simulate import Record, Trace
from gossipdp_lab.simulate.synchronous import mixing_matrix, second_eigenvalue

SIZES = [8, 16, 32, 64, 128, 256]


# Fits and spreads


@given(exponent=st.floats(-4, 4), factor=st.floats(1e-3, 1e3))
def test_an_exact_power_law_is_found(exponent, factor):
    fit = fit_power_law(SIZES, [factor * n**exponent for n in SIZES])
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.factor == pytest.approx(factor, rel=1e-9)
    assert fit.standard_error < 1e-6


def test_the_standard_error_is_that_of_repeated_fits():
    random = np.random.default_rng(0)
    fits = [
        fit_power_law(SIZES, [n**2 * math.exp(0.1 * random.standard_normal()) for n in SIZES])
        for _ in range(400)
    ]
    spread_of_fits = np.std([fit.exponent for fit in fits])
    assert np.mean([fit.exponent for fit in fits]) == pytest.approx(2.0, abs=0.01)
    assert np.sqrt(np.mean([fit.standard_error**2 for fit in fits])) == pytest.approx(
        spread_of_fits, rel=0.1
    )


@pytest.mark.parametrize(("x", "y"), [([2], [1]), ([2, 2], [1, 3]), ([1, 2], [1, 0])])
def test_what_is_no_power_law_is_refused(x, y):
    with pytest.raises(ValueError, match="positive points at two or more x"):
        fit_power_law(x, y)


def test_estimates():
    assert Estimate.of([1.0, 3.0]) == pytest.approx((2.0, math.sqrt(2.0)))
    assert Estimate.of([5.0]) == (5.0, 0.0)
    assert Estimate.of([0.058, 0.060]).text == "0.059 ± 0.0014"
    assert Estimate.of([12345.0, 12345.0]).text == "12,345"


# Communications to agree


def test_synchronous_rounds_on_a_complete_graph_shrink_by_a_quarter():
    point = mixing.measure_point("complete", "dpsgd", 8, 1)
    assert point.communications[0] == pytest.approx(28 / math.log(4), rel=1e-6)
    assert point.prediction == pytest.approx(28 / math.log(4))


def test_the_number_is_that_of_the_method_that_was_simulated():
    points = {
        method: mixing.measure_point("ring", method, 16, 2)
        for method in ("gossip", "a2cid2", "dpsgd", "dpsgd-chebyshev")
    }
    mean = {method: sum(point.communications) / 2 for method, point in points.items()}
    assert mean["a2cid2"] < 0.6 * mean["gossip"]
    assert mean["dpsgd-chebyshev"] < 0.2 * mean["dpsgd"]
    # The bound holds for the asynchronous methods, and is not what is returned.
    for method in ("gossip", "a2cid2"):
        assert 0.3 < mean[method] / points[method].prediction < 0.95
        first, second = points[method].communications
        assert first != second


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (0.0, "**consistent with the paper**. 9 of the paper's 9"),
        (0.14, "**consistent with the paper**. 9 of the paper's 9"),
        (0.2, "**not consistent with the paper**. 0 of the paper's 9"),
    ],
)
def test_the_verdict_counts_the_paper_s_exponents_and_ours_apart(error, expected):
    points = [
        mixing.Point(graph, method, n, [n ** (paper + error)], 1.0)
        for method, by_graph in mixing.EXPONENTS.items()
        for graph, paper in by_graph.items()
        for n in (8, 16, 32, 64)
    ]
    text = mixing.write(mixing.Result(points, dimension=16, tail=(1e-6, 1e-12)))[1]
    assert expected in text
    assert "of the 3 exponents that we derived" in text


def test_rounds_are_those_of_the_chebyshev_polynomials() -> None:
    gamma, value = 0.97, 0.4
    rounds = mixing.Mixing(np.array([[value]]), gamma)
    for _ in range(2):  # also after it began anew
        now = np.ones((1, 1))
        for degree in range(1, 12):
            now = rounds.multiply(now)
            chebyshev = np.polynomial.chebyshev.Chebyshev([0.0] * degree + [1.0])
            expected = chebyshev(value / gamma) / chebyshev(1 / gamma)
            assert now[0, 0] == pytest.approx(expected, abs=1e-12)
        rounds.restart()
    plain = mixing.Mixing(np.array([[value]]))
    assert plain.multiply(plain.multiply(np.ones((1, 1))))[0, 0] == pytest.approx(value**2)


@pytest.mark.parametrize("chebyshev", [False, True])
def test_consensus_rounds_decay_as_the_second_eigenvalue_says(chebyshev: bool) -> None:
    matrix = mixing_matrix(build_graph("ring", 16), lazy=True)
    start = np.random.default_rng(0).standard_normal((16, 4))
    distances = mixing.consensus_rounds(matrix, start, chebyshev=chebyshev)
    centred = start - start.mean(axis=0)
    assert distances[0] == pytest.approx((centred**2).sum() / 16)
    assert distances[-1] < 1e-12 * distances[0] <= distances[-2]
    shares = distances / distances[0]
    tail = np.flatnonzero(shares < 1e-6)
    slope, _ = np.polyfit(tail, -np.log(shares[tail]), 1)
    gamma = second_eigenvalue(matrix)
    factor = mixing.chebyshev_limit(gamma) if chebyshev else gamma**2
    # All eigenvalues below gamma oscillate under the Chebyshev envelope.
    assert slope == pytest.approx(-math.log(factor), rel=0.1 if chebyshev else 1e-3)


def test_consensus_rounds_end_where_they_must() -> None:
    complete = mixing_matrix(build_graph("complete", 6))
    start = np.arange(12.0).reshape(6, 2)
    assert len(mixing.consensus_rounds(complete, start)) == 2
    assert (
        len(mixing.consensus_rounds(mixing_matrix(build_graph("path", 6)), start, max_rounds=5))
        == 6
    )
    assert mixing.consensus_rounds(complete, np.ones((6, 2))).tolist() == [0.0]


# Training on rings

LONGER = msgspec.structs.replace(training.QUICK, noise_steps=150.0, total_steps=320)


def trained(data: str, num_workers: int, method: str, rate: float) -> training.Run:
    cell = (data, "ring", num_workers, method, rate, 0)
    return training.measure_run(LONGER, **dict(zip(training.CELL, cell, strict=True)))


def test_the_distance_is_that_of_the_method_and_the_rate():
    plain, doubled, accelerated = (
        trained("noise", 16, method, rate).late_distance
        for method, rate in (("gossip", 1.0), ("gossip", 2.0), ("a2cid2", 1.0))
    )
    assert doubled < 0.75 * plain
    assert accelerated < 0.75 * plain


def test_digits_are_learnt_and_uneven_classes_keep_workers_apart():
    alike, uneven, synchronous = (
        trained(data, 8, method, 1.0)
        for data, method in (("iid", "gossip"), ("dirichlet", "gossip"), ("iid", "allreduce"))
    )
    assert alike.loss < 1.5  # of ln 10 at the start
    assert uneven.late_distance > 2 * alike.late_distance
    assert synchronous.late_distance < 1e-9 * alike.late_distance


def made_up_rings(ratio: float) -> training.Result:
    """A2CiD2 over gossip at rate 2 is one half, but for uneven classes on the ring of 8."""
    runs = []
    for data, n in (("iid", 8), ("dirichlet", 8), ("iid", 64), ("dirichlet", 64), ("noise", 64)):
        for method, rate in training.KINDS:
            is_odd = (data, n) == ("dirichlet", 8)
            late = (ratio if is_odd else 0.5) if method == "a2cid2" else 1.0
            # A2CiD2 is behind in the first 2 of 4 intervals.
            course = [1.0, 3.0, 3.0, late, late] if method == "a2cid2" else [1.0] * 5
            runs.append(training.Run(data, "ring", n, method, rate, 0, 0.1, 0.9, late, course))
    for graph in ("exponential", "complete"):
        runs += [
            training.Run(data, graph, 64, method, rate, 0, 0.1, 0.9, 1.0, [1.0] * 5)
            for data in ("iid", "dirichlet")
            for method, rate in training.GOSSIP_KINDS
        ]
    return training.Result(runs, training.Settings(), [0])


def test_the_verdict_is_about_all_rings_and_the_whole_run():
    worse = training.write(made_up_rings(1.2))[1]
    assert "**not reproduced**; it holds on 3 of 4 rings" in worse
    assert "uneven classes: 1.2 on the ring of 8, 0.5 on the ring of 64." in worse
    assert "ring of 8, uneven classes:" not in worse
    better = training.write(made_up_rings(0.9))[1]
    assert "**reproduced**; it holds on 4 of 4 rings" in better
    assert "stays ahead: ring of 8, same data: 75%; ring of 64, same data: 75%;" in better


# Pairing and the invariant


def paired(policy: str, method: str = "a2cid2") -> pairing.Run:
    cell = (method, "ring", 16, policy, 1.5, False, 0)
    return pairing.measure_run(120.0, **dict(zip(pairing.CELL, cell, strict=True)))


def test_available_locks_in_and_fresh_does_not():
    fresh, available = paired("fresh"), paired("available")
    assert fresh.decay_per_exchange > 3 * available.decay_per_exchange
    assert fresh.decay_per_exchange > 1.5 * paired("fresh", "gossip").decay_per_exchange
    # An exchange of 1.5 steps leaves room for two thirds of one a step.
    assert 0.4 < fresh.comm_rate < 0.7
    assert fresh.decay_per_step == pytest.approx(fresh.decay_per_exchange * fresh.comm_rate)


def trace_falling(*shares: float) -> Trace:
    """Of 4 workers with 2 exchanges each between records, in steps of 0.5 s."""
    trace = Trace("a2cid2", 4, unit_s=0.5)
    for number, share in enumerate(shares):
        trace.records.append(
            Record(number * 1.0, 0.0, 0.0, 0.0, 5.0 * share, 4 * number, 0, 0.0, 0.0)
        )
    return trace


def test_a_run_that_hardly_falls_has_a_decay_too():
    # To 0.64 at once, then ever more slowly to 0.38: the second half of it, from 0.61 on, counts.
    late = [0.64 * math.exp(-0.02 * k) for k in range(27)]
    assert pairing.decay(trace_falling(1.0, *late)) == pytest.approx(0.01)
    # In the tail alone, from 1e-3 on.
    falling = [1.0, 0.5, 1e-3, *(1e-3 * math.exp(-0.6 * k) for k in range(1, 50))]
    assert pairing.decay(trace_falling(*falling)) == pytest.approx(0.3)
    assert pairing.late_comm_rate(trace_falling(*falling)) == pytest.approx(1.0)


def test_slow_runs_of_fresh_are_found():
    runs = [
        pairing.Run("a2cid2", "torus", 16, policy, 1.5, False, seed, decay, decay, 1)
        for policy, decays in (("fresh", (0.8, 0.1, 0.9)), ("available", (0.01, 0.01, 0.01)))
        for seed, decay in enumerate(decays)
    ]
    assert pairing.Result(runs, 60.0, 16).slow_runs() == [runs[1]]


def test_only_the_released_exchange_drifts():
    runs = {
        method: invariant.measure_run(method, 16, 120.0, seed=0)
        for method in ("a2cid2", "released", "gossip")
    }
    assert max(runs["a2cid2"].drifts) < 1e-13
    assert max(runs["gossip"].drifts) < 1e-13
    assert max(runs["released"].drifts) > 1e-2
    assert runs["a2cid2"].distances[-1] < 1e-3 * runs["gossip"].distances[-1]


def test_the_invariant_s_verdict_follows_from_the_runs():
    def run(method: str, distance: float, drift: float) -> invariant.Run:
        series = ([0.0, 5.0, 10.0], [1.0, 1e-3, distance], [0.0, drift, drift])
        return invariant.Run(method, 0, *series)

    others = [run("released", 1e-4, 1e-2), run("gossip", 1e-3, 1e-16)]
    good = invariant.Result([run("a2cid2", 1e-12, 1e-16), *others], 64, 10.0, [0], 64)
    bad = invariant.Result([run("a2cid2", 1e-12, 1e-9), *others], 64, 10.0, [0], 64)
    assert "**holds**" in invariant.write(good)[1]
    assert "**does not hold**" in invariant.write(bad)[1]
    assert good.released_when_ours_at(1e-10) == [1e-4]
    assert good.released_when_ours_at(1e-15) == []


# The page


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("docs")
    return reproduce.reproduce(list(reproduce.SECTIONS), directory, Effort(quick=True))


def test_every_section_is_there_with_figure_table_and_provenance(written):
    text = written.read_text()
    for number, (name, section) in enumerate(reproduce.SECTIONS.items(), start=1):
        heading = f"\n## {number}. {section.TITLE}\n"
        assert text.count(heading) == 1
        part = text.split(heading)[1].split("\n## ")[0]
        for expected in ("**Quick run.**", "Verdict: **", "What differs", "| --- |", "<sub>"):
            assert expected in part, (name, expected)
        for link in re.findall(r"\]\(([^)#]+)\)", part):
            assert (written.parent / link).stat().st_size > 1000, link
        assert "<figure>" not in part


def test_the_page_is_rebuilt_from_what_is_stored(written):
    before = written.read_text()
    assert reproduce.main(["--rewrite", "--output", str(written.parent)]) == 0
    assert written.read_text() == before


def test_the_committed_page_is_that_of_the_committed_results(tmp_path, monkeypatch):
    for section in reproduce.SECTIONS.values():  # the text is compared; others look at figures
        monkeypatch.setattr(section, "draw", lambda result, path: None)
    figures = tmp_path / "figures"
    figures.mkdir()
    for path in (reproduce.DOCS / "figures").glob("reproduction-*.json"):
        (figures / path.name).write_bytes(path.read_bytes())
    page = reproduce.reproduce([], tmp_path, Effort())
    assert page.read_text() == (reproduce.DOCS / "reproduction.md").read_text()


def test_docs_take_no_figures_of_code_that_no_commit_has(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "DOCS", tmp_path)
    monkeypatch.setattr(reproduce, "commit_here", lambda: "abc1234+")
    assert reproduce.main(["--only", "invariant"]) == 2
    assert "src or benchmarks have changes that are not committed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_quick_run_leaves_what_is_committed_alone(tmp_path, monkeypatch):
    """A quick run without --output writes under runs/ where it is called."""
    committed = {path: path.read_bytes() for path in reproduce.DOCS.rglob("reproduction*")}
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(["--quick", "--only", "invariant", "--processes", "1"]) == 0
    assert {path: path.read_bytes() for path in committed} == committed
    text = (tmp_path / "runs/reproduction/reproduction.md").read_text()
    assert text.count("Not run yet") == len(reproduce.SECTIONS) - 1
    stored = json.loads(
        (tmp_path / "runs/reproduction/figures/reproduction-invariant.json").read_text()
    )
    assert stored["quick"]
    assert stored["provenance"]["hardware"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "mixin"], "there is no section 'mixin'; choose among mixing"),
        (["--processes", "0"], "number of processes is 0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, words, message):
    assert reproduce.main([*words, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_result_is_refused(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/reproduction-mixing.json").write_text("{}")
    with pytest.raises(ValueError, match="not a stored result"):
        reproduce.read_stored(tmp_path, "mixing")
