"""The ring whose workers set unlike rates: a short run of a small one."""

import pytest
from unequal_rates import CASES, OBJECTIVES, rates_of_thirds, row_of, scenario_of, three_cases


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_workers_of_unlike_rates_agree_and_keep_their_mean(objective):
    traces = three_cases(scenario_of(objective, num_workers=12, num_steps=30, seed=0))
    rows = {case: row_of(objective.name, case, 0, trace) for case, trace in traces.items()}
    assert tuple(rows) == CASES
    fast, middling, slow = rates_of_thirds(traces["own rates"])
    assert fast > 1.5 * middling > 3 * slow
    for row in rows.values():
        assert row["drift"] < 1e-13
    distances = [rows[case]["consensus_distance"] for case in CASES]
    assert distances[1] < distances[0] < distances[2]
    if objective.has_gradients:
        assert rows["own rates"]["loss"] < 0.5 * rows["own rates"]["first_loss"]
    else:
        assert distances[0] < 0.05 * rows["own rates"]["first_consensus_distance"]
