"""What may be chosen in a training, and what is refused before anything starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from gossipdp.cli.main import main
from gossipdp.parallel.options import METHODS
from gossipdp.tasks import RECIPES
from gossipdp.tasks.options import (
    BytesGptOptions,
    Cifar10Options,
    ImageNetOptions,
    MethodName,
    TrainOptions,
)

OPTIONS = TrainOptions.__subclasses__()


def test_every_recipe_has_options_and_a_class():
    assert [kind.recipe for kind in OPTIONS] == list(RECIPES)
    assert get_args(MethodName) == METHODS


def test_the_papers_trainings_are_the_defaults():
    cifar10, imagenet = Cifar10Options(), ImageNetOptions()
    assert (cifar10.epochs, cifar10.batch_size) == (100, 128)
    assert (imagenet.epochs, imagenet.batch_size) == (90, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs is 0; it must be at least 1"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"checkpoint_every": 0}, "--checkpoint-every is 0"),
        ({"comm_rate": float("nan")}, "--comm-rate is nan"),
    ],
)
@pytest.mark.parametrize("kind", OPTIONS)
def test_what_cannot_be_meant(kind: type[TrainOptions], changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        kind(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 100, "heads": 8}, "--width 100 is not a multiple of --heads 8"),
        ({"context": 0}, "--context is 0"),
        ({"learning_rate": 0.0}, "--learning-rate is 0"),
    ],
)
def test_what_cannot_be_meant_of_the_gpt(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        BytesGptOptions(**changes)


def test_no_fewer_than_no_loader_processes():
    with pytest.raises(ValueError, match="--loader-processes is -1"):
        ImageNetOptions(loader_processes=-1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "cifar10 --data {empty}",
            "there is no {empty}/data_batch_1.bin. CIFAR-10 is not",
        ),
        ("imagenet --data {empty}", "ImageNet is not downloaded for you: register at"),
        ("bytes-gpt --data {empty}", "holds 0 bytes of text"),
        ("bytes-gpt --workers 0", "--workers is 0"),
        ("bytes-gpt --max-restarts -1", "--max-restarts is -1"),
        ("bytes-gpt --workers 6 --graph hypercube", "hypercube"),
        ("bytes-gpt --device tpu", "--device is 'tpu'; choose cpu or cuda"),
        (
            "bytes-gpt --data {here} --batch-size 9999",
            "training samples are less than one batch of",
        ),
    ],
)
def test_bad_input_is_one_line_before_any_worker_starts(
    words: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "gossipdp.launcher.local.launch", lambda *_, **__: pytest.fail("a worker was started")
    )
    assert main(["train", *words.format(empty=tmp_path, here=__file__).split()]) == 2
    error = capsys.readouterr().err
    assert message.format(empty=tmp_path) in error
    assert error.count("\n") == 1


def test_the_command_imports_no_torch():
    code = (
        "import sys, gossipdp.cli.train, gossipdp.tasks;"
        "slow = {'torch', 'numpy', 'PIL', 'rich.progress'} & set(sys.modules);"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_recipe_is_named_by_the_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)
