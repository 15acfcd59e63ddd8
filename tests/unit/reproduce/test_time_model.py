import msgspec
import pytest

from gossipdp.reproduce.time_model import (
    FITS,
    PAPER_TIMES,
    Draws,
    TimeModel,
    fit,
    predict,
)

DRAWS = Draws.of(8, 30)
PLAIN = TimeModel(0.04, 0.6, 0.0, 0.0, 0.0, 0.0, 0.0)
TRUE = TimeModel(0.05, 0.5, 0.03, 0.12, 2e-5, 5e-11, 8.0)


def test_without_spread_and_links_time_is_work_over_workers():
    minutes, ratio = predict(PLAIN, PAPER_TIMES, DRAWS)
    for predicted, one in zip(minutes, PAPER_TIMES, strict=True):
        step_s = PLAIN.step_s(one.task)
        assert predicted == pytest.approx(one.num_steps / one.num_workers * step_s / 60.0)
    assert ratio == 1.0


def test_all_reduce_costs_what_the_simulator_says():
    one = next(time for time in PAPER_TIMES if time.num_workers == 16)
    with_links = msgspec.structs.replace(PLAIN, latency_s=1e-4, s_per_byte=1e-10)
    (plain, linked), _ = zip(*(predict(m, [one], DRAWS) for m in (PLAIN, with_links)), strict=True)
    communication_s = 30 / 16 * one.model_bytes * 1e-10 + 30 * 1e-4
    rounds = one.num_steps / 16
    assert linked[0] - plain[0] == pytest.approx(rounds * communication_s / 60.0)


def test_spread_slows_all_reduce_alone():
    spread = msgspec.structs.replace(PLAIN, within=0.2)
    for before, after, one in zip(
        predict(PLAIN, PAPER_TIMES, DRAWS)[0],
        predict(spread, PAPER_TIMES, DRAWS)[0],
        PAPER_TIMES,
        strict=True,
    ):
        if one.method == "allreduce":
            assert after > 1.15 * before
        else:
            assert after == pytest.approx(before)


def test_the_fit_finds_a_model_that_gives_the_same_times():
    minutes, ratio = predict(TRUE, PAPER_TIMES, DRAWS)
    times = [
        msgspec.structs.replace(one, minutes=value)
        for one, value in zip(PAPER_TIMES, minutes, strict=True)
    ]
    found = fit("spread and links", times, ratio, DRAWS)
    assert found.minutes == pytest.approx(minutes, rel=0.01)
    assert found.model.between == pytest.approx(TRUE.between, rel=0.05)
    assert found.model.cifar_step_s == pytest.approx(TRUE.cifar_step_s, rel=0.02)
    worse = fit("spread alone", times, ratio, DRAWS)
    assert worse.chi_squared > 10 * found.chi_squared + 1.0


def test_each_fit_holds_its_parameters_at_zero():
    for name, held in FITS.items():
        found = fit(name, PAPER_TIMES, 0.93, Draws.of(3, 5))
        assert all(getattr(found.model, field) == 0.0 for field in held)
        assert found.num_free == 7 - len(held)
