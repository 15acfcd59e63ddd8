import dataclasses
import math

import pytest

import gossipdp.graph.constants as constants_module
from gossipdp.graph import Constants, build_graph, without


def of(name, num_workers, comm_rate=1.0):
    return Constants.of(build_graph(name, num_workers), comm_rate)


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 16, 63, 64, 200])
def test_ring_closed_forms(num_workers):
    constants = of("ring", num_workers)
    assert constants.chi1 == pytest.approx(1 / (1 - math.cos(2 * math.pi / num_workers)))
    assert constants.chi2 == pytest.approx((num_workers - 1) / num_workers)


@pytest.mark.parametrize("num_workers", [2, 3, 7, 64])
def test_the_complete_graph_is_not_accelerated(num_workers):
    constants = of("complete", num_workers)
    expected = (num_workers - 1) / num_workers
    assert constants.chi1 == pytest.approx(expected)
    assert constants.chi2 == pytest.approx(expected)
    assert constants.alpha_tilde == pytest.approx(0.5)
    assert constants.eta == pytest.approx(1 / (2 * expected))


@pytest.mark.parametrize("least_bits", [0.0, 1e-15, -1e-15])
def test_no_rounding_brings_the_gain_below_one_half(monkeypatch, least_bits):
    """Processors round differently, and every worker refuses a gain below 1/2."""
    exact = constants_module._spectrum_of

    def rounded(*arguments):
        found = exact(*arguments)
        return found._replace(
            lambda_2=found.lambda_2 * (1 + least_bits),
            resistances=found.resistances * (1 + least_bits),
        )

    monkeypatch.setattr(constants_module, "_spectrum_of", rounded)
    for num_workers in range(2, 65):
        constants = of("complete", num_workers)
        assert constants.chi2 <= constants.chi1
        assert 0.5 <= constants.alpha_tilde == pytest.approx(0.5)


@pytest.mark.parametrize("num_workers", [3, 10, 64])
def test_star_closed_forms(num_workers):
    # lambda = 1/(n-1) on every edge: lambda_2 is that too, and a leaf hangs on one resistor.
    constants = of("star", num_workers)
    assert constants.chi1 == pytest.approx(num_workers - 1)
    assert constants.chi2 == pytest.approx((num_workers - 1) / 2)


@pytest.mark.parametrize("dimension", [1, 2, 3, 6])
def test_hypercube_closed_forms(dimension):
    # lambda = 1/d, lambda_2 = 2/d; by symmetry and Foster's theorem R = (n-1) / sum of rates.
    constants = of("hypercube", 2**dimension)
    assert constants.chi1 == pytest.approx(dimension / 2)
    assert constants.chi2 == pytest.approx((2**dimension - 1) / 2**dimension)


@pytest.mark.parametrize("name", ["ring", "star", "torus", "erdos-renyi"])
def test_scaling_with_the_comm_rate(name):
    one, three = of(name, 12), of(name, 12, 3.0)
    assert three.eta == pytest.approx(3 * one.eta)
    assert three.alpha_tilde == pytest.approx(one.alpha_tilde)
    assert three.chi1 == pytest.approx(one.chi1 / 3)
    assert three.chi2 == pytest.approx(one.chi2 / 3)
    assert three.exchanges_per_unit_time == pytest.approx(3 * one.exchanges_per_unit_time)


def test_formulas_of_eta_and_alpha_tilde():
    constants = of("path", 9)
    assert constants.eta == pytest.approx(1 / (2 * math.sqrt(constants.chi1 * constants.chi2)))
    assert constants.alpha_tilde == pytest.approx(math.sqrt(constants.chi1 / constants.chi2) / 2)


def test_default_rates_keep_every_worker_within_its_budget():
    constants = of("star", 5, comm_rate=2.0)
    assert constants.rates == (0.5,) * 4
    assert constants.worker_rate(0) == pytest.approx(2.0)
    assert constants.worker_rate(3) == pytest.approx(0.5)
    assert constants.neighbours(0) == {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5}
    assert list(of("ring", 5).neighbours(2)) == [1, 3]
    assert of("ring", 64).exchanges_per_unit_time == pytest.approx(32.0)


def test_neighbours_cannot_be_changed_through_the_answer():
    constants = of("ring", 4)
    constants.neighbours(0).clear()
    assert constants.neighbours(0) == {1: 0.5, 3: 0.5}


def test_one_worker():
    constants = of("ring", 1)
    assert constants.edges == ()
    assert (constants.chi1, constants.chi2, constants.eta) == (0.0, 0.0, 0.0)
    assert constants.alpha_tilde == 0.5
    assert constants.exchanges_per_unit_time == 0.0
    assert constants.neighbours(0) == {}
    assert constants.worker_rate(0) == 0.0


def test_after_deaths_ranks_have_gaps():
    constants = Constants.of(without(build_graph("ring", 6), [0, 3]))
    assert constants.workers == (1, 2, 4, 5)
    assert constants.edges == ((1, 2), (1, 5), (2, 4), (4, 5))
    assert constants.chi1 == pytest.approx(of("ring", 4).chi1)
    assert constants.neighbours(1) == {2: 0.5, 5: 0.5}


def test_equal_graphs_have_equal_constants():
    assert of("torus", 12) == of("torus", 12)
    assert hash(of("torus", 12)) == hash(of("torus", 12))
    assert of("torus", 12).chi1 == of("torus", 12).chi1


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        of("ring", 3).rates = ()


def test_a_ring_of_4096_workers():
    constants = of("ring", 4096)
    assert constants.chi1 == pytest.approx(1 / (1 - math.cos(2 * math.pi / 4096)), rel=1e-6)
    assert constants.chi2 == pytest.approx(4095 / 4096, rel=1e-6)


def test_the_same_graph_and_rates_are_worked_out_once(monkeypatch):
    from gossipdp.graph import constants as module
    from gossipdp.graph.constants import spectrum

    asked = []
    monkeypatch.setattr(
        module, "spectrum", lambda *given: asked.append(given[0]) or spectrum(*given)
    )
    module._spectrum_of.cache_clear()
    first, same = of("ring", 5), of("ring", 5)
    assert (first.chi1, first.chi2) == (same.chi1, same.chi2)
    other = of("ring", 5, comm_rate=2.0)
    assert other.chi1 == pytest.approx(first.chi1 / 2)
    assert asked == [5, 5]
