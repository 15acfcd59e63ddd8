"""Objectives of the user's own, by the place of a function."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossipdp.cli.simulate_tasks import load_objective

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from gossipdp.simulate.objectives import Quadratic

@dataclass
class Settings:
    dimension: int = 3

def mine():
    return Quadratic(Settings().dimension)

def wrong():
    return 5
"""


def test_a_function_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    objective = load_objective("own.py:mine")
    assert objective.name == "quadratic"
    assert objective.begin(2, 0).start.shape == (2, 3)


def test_a_function_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_objectives.py").write_text(OWN + "\nclass Other: pass\n")
    (tmp_path / "own_broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_objective("own_objectives:mine").metric_name is None
    for place, problem in {
        "own_objectives:yours": "own_objectives has no function 'yours'",
        "own_objectives:wrong": "own_objectives:wrong returned a int; it must return a gossipdp",
        "own_objective:mine": "there is no module 'own_objective' on the import path; name a file",
        "own.objectives:mine": "there is no module 'own.objectives'",
        f"{tmp_path}/other.py:mine": "there is no file .*other.py",
        "own_objectives:": "names no function; write package.module:function or file.py:function",
    }.items():
        with pytest.raises(ValueError, match=problem):
            load_objective(place)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_objective("own_broken:mine")
