"""Objectives by name: the built-in ones, and those of the user's own."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from gossipdp.simulate.compute_time import ConstantTime
from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.objectives import (
    OBJECTIVES,
    digits_objective,
    load_objective,
    make_objective,
)
from gossipdp.simulate.optimizers import Sgd
from gossipdp.simulate.quadratic import Quadratic
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.synchronous import run_allreduce

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from gossipdp.simulate.quadratic import Quadratic

@dataclass
class Settings:
    dimension: int = 3

def mine():
    return Quadratic(Settings().dimension)

def wrong():
    return 5
"""


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_runs_from_its_seed_alone(name: str) -> None:
    objective = make_objective(name, dimension=5, batch_size=8)
    assert objective.name == name
    objective = pickle.loads(pickle.dumps(objective))
    first, same, other = (objective.begin(3, seed) for seed in (0, 0, 1))
    assert torch.equal(first.start, same.start)
    if not objective.has_gradients:
        assert not torch.equal(first.start, other.start)
        return
    x = first.start
    values = [source.gradients([2, 0], x[[2, 0]]).values for source in (first, same, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    evaluation = first.evaluate(x[0])
    assert (evaluation.metric is None) == (objective.metric_name is None)
    assert evaluation.loss > 0


def test_arguments_reach_the_objective() -> None:
    assert make_objective("consensus", dimension=7) == Consensus(7)
    assert make_objective(
        "quadratic", dimension=7, mu=0.1, smoothness=3, noise_variance=2, heterogeneity=5
    ) == Quadratic(7, 0.1, 3, 2, 5)
    with pytest.raises(ValueError, match="no objective 'consensu'; choose one of consensus, quad"):
        make_objective("consensu")


def test_digits_are_learnt() -> None:
    scenario = Scenario(
        num_workers=4,
        objective=digits_objective(),
        optimizer=Sgd(0.1, momentum=0.9),
        compute_time=ConstantTime(1.0),
        num_steps=100,
        num_records=4,
    )
    trace = run_allreduce(scenario, lambda share: None)
    loss, accuracy = trace.column("loss"), trace.column("metric")
    assert loss[0] == pytest.approx(2.3, abs=0.1)
    assert loss[-1] < 0.15
    assert trace.records[-1].batch_loss == pytest.approx(loss[-2:].mean(), abs=0.1)
    assert accuracy[-1] > 0.93


def test_images_of_a_dirichlet_distribution_pull_workers_apart() -> None:
    def spread(dirichlet_alpha: float | None) -> float:
        source = digits_objective(dirichlet_alpha=dirichlet_alpha).begin(8, 0)
        steps = [source.gradients(range(8), source.start).values for _ in range(40)]
        values = torch.stack(steps).mean(dim=0)
        return float((values - values.mean(dim=0)).square().sum() / values.square().sum())

    assert spread(0.1) > 0.5 > 10 * spread(None)


def test_a_function_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    objective = make_objective("own.py:mine")
    assert objective.name == "quadratic"
    assert objective.begin(2, 0).start.shape == (2, 3)
    # A copy in another process finds the file from anywhere.
    pickled = pickle.dumps(objective)
    monkeypatch.chdir("/")
    assert pickle.loads(pickled).begin(2, 0).num_trained == 3


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
