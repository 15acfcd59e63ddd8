"""One plan of ``make chaos`` with real processes; the others differ in seed and length alone."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

pytestmark = pytest.mark.processes

# With the undisturbed run 45 seconds in all; make chaos runs for two minutes.
SEED, SECONDS = 7, 28.0


def load_processes() -> ModuleType:
    """``processes.py``, which is on nobody's import path, so its code travels by value."""
    spec = importlib.util.spec_from_file_location(
        "chaos_processes", Path(__file__).with_name("processes.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


processes = load_processes()


@pytest.mark.parametrize("seed", range(50))
def test_a_plan_follows_from_its_seed_and_can_be_done(seed: int) -> None:
    plan = processes.draw_plan(seed, 60.0)
    assert str(plan) == str(processes.draw_plan(seed, 60.0))
    assert f"--seed {seed} --seconds 60" in str(plan)
    assert (plan.faults[0].rank, plan.faults[0].kind) == (0, "kill")
    assert all(event.at_s + event.for_s < 60 for event in (*plan.faults, *plan.cuts))
    for fault in plan.faults:
        away = {other.rank for other in plan.faults if 0 <= fault.at_s - other.at_s <= 8}
        assert len(away) <= processes.NUM_WORKERS - 2


@pytest.mark.timeout(300)
def test_workers_are_killed_stopped_started_again_and_cut_off(tmp_path: Path) -> None:
    plan = processes.draw_plan(SEED, SECONDS)
    assert {fault.kind for fault in plan.faults} == {"kill", "stop"}
    assert plan.cuts
    undisturbed = processes.run_plan(None, tmp_path / "undisturbed")
    outcome = processes.run_plan(plan, tmp_path / "faults")
    assert undisturbed.problems + outcome.problems == [], str(plan)
    # All notice each death; how soon is for make chaos to say, on a machine that is not busy.
    assert processes.late_notices(outcome.faults, "kill", math.inf) == []
    assert processes.not_back(outcome.faults) == []
    assert outcome.accuracy >= undisturbed.accuracy - 0.01
