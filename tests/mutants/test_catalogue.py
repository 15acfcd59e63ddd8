"""The catalogue of mutants fits the code; ``make mutants`` applies it."""

from pathlib import Path

from run_processes import load_script

run = load_script(Path(__file__).with_name("run.py"))
MUTANTS = run.load()
PACKAGES = {path.parent.name for path in (Path(run.ROOT) / run.SOURCE).glob("*/*/__init__.py")}


def test_every_mutant_can_be_made_and_its_tests_are_there():
    found = {mutant.stands_for: problem for mutant in MUTANTS if (problem := mutant.problem())}
    assert not found


def test_what_mutants_stand_for_is_said_once_and_over_all_packages():
    sentences = [mutant.stands_for for mutant in MUTANTS]
    assert len(sentences) == len(set(sentences)) >= 80
    untested = {"demo", "report", "tasks"}
    assert {Path(mutant.file).parts[1] for mutant in MUTANTS} >= PACKAGES - untested
