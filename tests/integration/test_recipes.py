"""Recipes trained whole: by the command, by workers of a launcher, and by their scripts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_files import write_cifar10, write_imagenet

from gossipdp.cli.main import main
from gossipdp.tasks import make_recipe
from gossipdp.tasks.options import (
    BytesGptOptions,
    Cifar10Options,
    ImageNetOptions,
    TrainOptions,
)
from gossipdp.tasks.training import MODEL_FILE, train


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def cifar10(folder: Path) -> Cifar10Options:
    write_cifar10(folder, images_per_file=2)
    return Cifar10Options(data=folder, epochs=1, batch_size=4)


def imagenet(folder: Path) -> ImageNetOptions:
    write_imagenet(folder, per_class=1)
    return ImageNetOptions(data=folder, epochs=1, batch_size=2, loader_processes=0)


def bytes_gpt(folder: Path) -> BytesGptOptions:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    return BytesGptOptions(
        data=folder, epochs=2, batch_size=8, context=32, width=32, depth=1, heads=2
    )


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
@pytest.mark.parametrize("name", ["cifar10", "imagenet"])
def test_the_command(workers, name: str, tmp_path: Path):
    options = in_folder({"cifar10": cifar10, "imagenet": imagenet}[name], tmp_path)
    if name == "imagenet":
        options = replace(options, loader_processes=1)
    assert main(["train", name, "--workers", "2", *words_of(options)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["num_workers"] == 2
    assert results["samples"] >= make_recipe(options).num_samples
    assert 0 <= results["metric"] <= 1
    assert (options.directory / MODEL_FILE).exists()


@pytest.mark.processes
def test_under_a_launcher_the_command_is_one_worker(workers, tmp_path: Path):
    options = in_folder(bytes_gpt, tmp_path)
    assert workers(main, 2, (["train", "bytes-gpt", *words_of(options)],)) == [0, 0]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["num_workers"] == 2
    assert (options.directory / MODEL_FILE).exists()
