"""The catalogue of mutants fits the code; ``make mutants`` applies it."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType


def load_run() -> ModuleType:
    """``run.py``, which is on nobody's import path."""
    spec = importlib.util.spec_from_file_location("mutants_run", Path(__file__).with_name("run.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load_run()
MUTANTS = run.load()
PACKAGES = {path.parent.name for path in (Path(run.ROOT) / run.SOURCE).glob("*/*/__init__.py")}


def test_every_mutant_can_be_made_and_its_tests_are_there() -> None:
    found = {mutant.name: problem for mutant in MUTANTS if (problem := mutant.problem())}
    assert not found


def test_names_are_said_once_and_over_all_packages() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 80
    untested = {"demo", "report", "tasks"}
    assert {Path(mutant.file).parts[1] for mutant in MUTANTS} >= PACKAGES - untested


def test_what_is_out_of_step_is_said() -> None:
    mutant = MUTANTS[0]
    assert "occurs 0 times" in replace(mutant, old="no such text").problem()
    assert "changes nothing" in replace(mutant, new=mutant.old).problem()
    assert "there is no" in replace(mutant, file="gossipdp/graph/none.py").problem()
    assert "there is no tests/none.py" in replace(mutant, tests=("tests/none.py",)).problem()
    missing = f"{mutant.tests[0].partition('::')[0]}::test_none"
    assert "there is no test_none" in replace(mutant, tests=(missing,)).problem()
