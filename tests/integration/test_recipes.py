import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_files import write_cifar10, write_fashion_mnist, write_imagenet

from gossipdp.cli.main import main
from gossipdp_lab import tasks
from gossipdp_lab.tasks import TrainOptions, make_recipe
from gossipdp_lab.tasks.command import MODEL_FILE, train


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def cifar10(folder: Path) -> tasks.Cifar10Options:
    write_cifar10(folder, images_per_file=2)
    return tasks.Cifar10Options(data=folder, epochs=1, batch_size=10)


def imagenet(folder: Path) -> tasks.ImageNetOptions:
    write_imagenet(folder, per_class=1)
    return tasks.ImageNetOptions(data=folder, epochs=1, batch_size=2, loader_processes=1)


def fashion_mnist(folder: Path) -> tasks.FashionMnistOptions:
    write_fashion_mnist(folder, num_train=20)
    return tasks.FashionMnistOptions(data=folder, epochs=1, batch_size=10)


def bytes_gpt(folder: Path) -> tasks.BytesGptOptions:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    return tasks.BytesGptOptions(
        data=folder, epochs=2, batch_size=8, context=32, width=32, depth=1, heads=2
    )


def in_folder(make: Callable[[Path], TrainOptions], folder: Path) -> TrainOptions:
    data = folder / "data"
    data.mkdir()
    return replace(make(data), output=folder / "output", json=folder / "results.json")


@pytest.mark.processes
@pytest.mark.parametrize(("method", "num_workers"), [("a2cid2", 3), ("allreduce", 2)])
def test_the_command_trains_with_several_workers(method, num_workers, tmp_path):
    options = replace(in_folder(bytes_gpt, tmp_path), method=method, graph="complete")
    words = ["train", "bytes-gpt", "--workers", str(num_workers)]
    for name, value in vars(options).items():
        if value is not None and not isinstance(value, bool):
            words += [f"--{name.replace('_', '-')}", str(value)]
    assert main(words) == 0
    outcome = json.loads((tmp_path / "results.json").read_text())
    assert outcome["num_workers"] == num_workers
    assert options.epochs * make_recipe(options).num_samples <= outcome["samples"]
    least, most = outcome["slowest_steps"], outcome["fastest_steps"]
    assert least <= outcome["samples"] / options.batch_size / num_workers <= most
    assert method != "allreduce" or least == most
    assert (outcome["achieved_comm_rate"] is None) == (method != "a2cid2")
    assert 0 < outcome["metric"] < 8.5
    # What was saved is what was measured.
    recipe = make_recipe(options)
    net = recipe.make_model()
    net.load_state_dict(torch.load(options.directory / MODEL_FILE, weights_only=True))
    assert recipe.evaluate(net) == outcome["metric"]


@pytest.mark.parametrize("make", [cifar10, imagenet, fashion_mnist])
def test_the_papers_trainings(make, tmp_path):
    options = in_folder(make, tmp_path)
    assert train(options)["samples"] >= options.batch_size
    assert 0 <= json.loads((tmp_path / "results.json").read_text())["metric"] <= 1
    assert (options.directory / MODEL_FILE).exists()
