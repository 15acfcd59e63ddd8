"""Recipes trained whole: by the command, by workers of a launcher, and by their scripts."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recipe_archives import write_cifar10_archive, write_imagenet_archives
from run_processes import VARIABLES

from gossipdp.cli.main import main
from gossipdp.recipes import make_recipe
from gossipdp.recipes.options import (
    BytesGptOptions,
    Cifar10Options,
    ImageNetOptions,
    TrainOptions,
)
from gossipdp.recipes.training import MODEL_FILE, train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def cifar10(folder: Path) -> Cifar10Options:
    write_cifar10_archive(folder, images_per_file=2)
    return Cifar10Options(data=folder, epochs=1, batch_size=4)


def imagenet(folder: Path) -> ImageNetOptions:
    write_imagenet_archives(folder, per_class=1)
    return ImageNetOptions(data=folder, epochs=1, batch_size=2, loader_processes=0)


def bytes_gpt(folder: Path) -> BytesGptOptions:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    return BytesGptOptions(
        data=folder, epochs=2, batch_size=8, context=32, width=32, depth=1, heads=2
    )


MAKE_OPTIONS = {"cifar10": cifar10, "imagenet": imagenet, "bytes-gpt": bytes_gpt}


def in_folder(make: Callable[[Path], TrainOptions], folder: Path) -> TrainOptions:
    data = folder / "data"
    data.mkdir()
    return replace(make(data), output=folder / "output", json=folder / "results.json")


def words_of(options: TrainOptions) -> list[str]:
    """The options as they are written on a command line."""
    words = []
    for name, value in vars(options).items():
        if value is not None and not isinstance(value, bool):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def run_script(script: Path, words: list[str]) -> None:
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.processes
@pytest.mark.parametrize("name", MAKE_OPTIONS)
def test_the_script_trains_what_the_recipe_does_bit_for_bit(workers, name: str, tmp_path: Path):
    options = in_folder(MAKE_OPTIONS[name], tmp_path)
    (outcome,) = workers(train, 1, (options,))
    by_recipe = torch.load(options.directory / MODEL_FILE, weights_only=True)
    script = EXAMPLES / f"{name.replace('-', '_')}.py"
    of_script = replace(options, output=tmp_path / "script", json=tmp_path / "script.json")

    workers(run_script, 1, (script, words_of(of_script)))

    by_script = torch.load(of_script.directory / MODEL_FILE, weights_only=True)
    assert all(torch.equal(value, by_script[key]) for key, value in by_recipe.items())
    assert outcome is not None
    written = json.loads((tmp_path / "script.json").read_text())
    assert (written["metric_name"], written["metric"]) == (outcome.metric_name, outcome.metric)


@pytest.mark.processes
@pytest.mark.parametrize("method", ["a2cid2", "allreduce", "none"])
def test_one_worker_of_several_tells_what_came_of_it(workers, method: str, tmp_path: Path):
    options = replace(in_folder(bytes_gpt, tmp_path), method=method, graph="complete")
    outcomes = workers(train, 3, (options,))
    assert [outcome is None for outcome in outcomes] == [False, True, True]
    outcome = outcomes[0]
    budget = options.epochs * make_recipe(options).num_samples
    assert budget <= outcome.samples
    steps = (outcome.slowest_steps, outcome.fastest_steps)
    assert 3 * steps[0] <= outcome.samples / options.batch_size <= 3 * steps[1]
    assert method != "allreduce" or steps[0] == steps[1]
    assert (outcome.achieved_comm_rate is None) == (method != "a2cid2")
    assert 0 < outcome.metric < 8.5
    assert json.loads((tmp_path / "results.json").read_text())["metric"] == outcome.metric
    # What was saved is what was measured.
    recipe = make_recipe(options)
    net = recipe.make_model()
    net.load_state_dict(torch.load(options.directory / MODEL_FILE, weights_only=True))
    assert recipe.evaluate(net) == outcome.metric


@pytest.mark.processes
def test_the_command(workers, tmp_path: Path):
    options = replace(in_folder(imagenet, tmp_path), loader_processes=1)
    assert main(["train", "imagenet", "--workers", "2", *words_of(options)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["num_workers"] == 2
    assert results["samples"] >= make_recipe(options).num_samples
    assert 0 <= results["metric"] <= 1
    assert (options.directory / MODEL_FILE).exists()


@pytest.mark.processes
def test_a_script_under_a_launcher_shows_the_row(tmp_path: Path):
    options = in_folder(bytes_gpt, tmp_path)
    command = [sys.executable, "-m", "gossipdp.cli.main", "run", "-n", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "bytes_gpt.py"), *words_of(options)],
        capture_output=True,
        text=True,
        env=VARIABLES,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[0] bytes-gpt: " in done.stdout
    assert len(re.findall(r"a2cid2 +│ +ring +│ +2 +│", done.stdout)) == 1
    assert "[1]" not in done.stdout
