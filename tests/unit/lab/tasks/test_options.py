"""The options of a training."""

from typing import get_args

import pytest

from gossipdp.cli.main import main
from gossipdp.parallel.options import METHODS
from gossipdp_lab.tasks import RECIPES
from gossipdp_lab.tasks.command import Recipe
from gossipdp_lab.tasks.options import Cifar10Options, ImageNetOptions, MethodName

OPTIONS = [get_args(annotated)[0] for annotated in get_args(Recipe)]


def test_every_recipe_has_options_and_a_class():
    assert [kind.recipe for kind in OPTIONS] == list(RECIPES)
    assert get_args(MethodName) == (*METHODS, "allreduce")


def test_the_papers_trainings_are_the_defaults():
    cifar10, imagenet = Cifar10Options(), ImageNetOptions()
    assert (cifar10.epochs, cifar10.batch_size) == (100, 128)
    assert (imagenet.epochs, imagenet.batch_size) == (90, 128)


def test_every_recipe_is_named_by_the_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)
