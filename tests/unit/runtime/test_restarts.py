import pytest

from gossipdp.runtime.restarts import LONG_LIFE_S, MAX_DELAY_S, Restarts


def test_the_delay_doubles_up_to_its_cap_and_each_worker_has_its_own() -> None:
    restarts = Restarts(100)
    delays = []
    for _ in range(20):
        restarts.started(0, 0.0)
        due = restarts.due_after_death(0, 1.0)
        assert due is not None
        delays.append(due - 1.0)
    assert delays[:7] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4])
    assert delays[7:] == pytest.approx([MAX_DELAY_S] * 13)
    restarts.started(1, 0.0)
    assert restarts.due_after_death(1, 1.0) == pytest.approx(1.1)
    assert (restarts.count(0), restarts.count(1), restarts.num_left) == (20, 1, 79)


def test_a_long_life_starts_the_delays_anew() -> None:
    restarts = Restarts(10)
    for _ in range(3):
        restarts.started(0, 0.0)
        restarts.due_after_death(0, LONG_LIFE_S - 1)
    restarts.started(0, 0.0)
    assert restarts.due_after_death(0, LONG_LIFE_S) == pytest.approx(LONG_LIFE_S + 0.1)
    restarts.started(0, 0.0)
    assert restarts.due_after_death(0, 1.0) == pytest.approx(1.2)


def test_the_budget_is_common_to_all_workers() -> None:
    restarts = Restarts(2)
    assert restarts.due_after_death(0, 1.0) is not None
    assert restarts.due_after_death(1, 1.0) is not None
    assert restarts.due_after_death(2, 1.0) is None
    assert restarts.count(2) == 0
    assert Restarts(0).due_after_death(0, 1.0) is None


def test_a_negative_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="--max-restarts is -1; it must be 0 or more"):
        Restarts(-1)
