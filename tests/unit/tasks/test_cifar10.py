"""CIFAR-10 from its archive or its folder, and whatever else may lie there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from image_files import cifar10_files, write_cifar10

from gossipdp.tasks.cifar10 import Cifar10, read_cifar10


def test_archive_and_folder_hold_the_same(tmp_path: Path) -> None:
    archive = write_cifar10(tmp_path)
    (tmp_path / "other").mkdir()
    folder = write_cifar10(tmp_path / "other", archive=False)
    for found in (archive, tmp_path, folder, tmp_path / "other"):
        (images, labels), (test_images, test_labels) = read_cifar10(found)
        assert images.shape == (40, 3, 32, 32)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert (len(labels), len(test_images), len(test_labels)) == (40, 8, 8)
    # The patch of class 0 is red and at the top, as the files were written.
    content = cifar10_files(8)["data_batch_1.bin"]
    assert labels[0] == content[0]
    assert bytes(images[0].flatten().tolist()) == content[1 : 1 + 3072]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "data_batch_3.bin").unlink(), "has no data_batch_3.bin"),
        (
            lambda folder: (folder / "data_batch_3.bin").write_bytes(b"\0" * 3000),
            "data_batch_3.bin has no rows of 3,073 bytes",
        ),
        (lambda folder: (folder / "test_batch.bin").write_bytes(b""), "no rows of 3,073 bytes"),
        (
            lambda folder: (folder / "test_batch.bin").write_bytes(b"\x0a" + b"\0" * 3072),
            "a label that is not 0 to 9",
        ),
    ],
)
def test_what_is_no_cifar10_is_named(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(write_cifar10(tmp_path, archive=False))
    with pytest.raises(ValueError, match=message):
        read_cifar10(tmp_path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    archive = write_cifar10(tmp_path)
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz cannot be read .*; get it again"):
        read_cifar10(tmp_path)


def test_where_it_is_missing_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no CIFAR-10\. CIFAR-10 is not downloaded"):
        read_cifar10(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no .*none\. CIFAR-10 is not downloaded"):
        read_cifar10(tmp_path / "none")


def test_the_papers_schedule(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    recipe = Cifar10(tmp_path, batch_size=4, device="cpu", epochs=100)
    factors = [recipe.rate_factor(at, 8) for at in (0, 0.025, 0.05, 0.499, 0.5, 0.749, 0.75)]
    assert factors == pytest.approx([1, 4.5, 8, 8, 0.8, 0.8, 0.08])
    (group, _) = recipe.make_optimizer(torch.nn.Linear(2, 2)).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 5e-4)


def test_batches_and_accuracy(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    recipe = Cifar10(tmp_path, batch_size=16, device="cpu", epochs=1)
    batches = list(recipe.train_loader(0, 1, 0))
    assert [images.shape[0] for images, _ in batches] == [16, 16]
    model = recipe.make_model()
    assert torch.isfinite(recipe.loss(model, batches[0]))
    labels = recipe.test[1]
    constant = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    torch.nn.init.zeros_(constant[1].weight)
    with torch.no_grad():
        constant[1].bias.copy_(torch.arange(10) == labels[0])
    assert recipe.evaluate(constant) == float((labels == labels[0]).double().mean())


def test_pixels_are_normalized_channel_by_channel(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    recipe = Cifar10(tmp_path, batch_size=4, device="cpu", epochs=1)
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    expected = [
        (value - mean) / deviation
        for value, mean, deviation in zip((0, 0.2, 1), recipe.mean, recipe.deviation, strict=True)
    ]
    torch.testing.assert_close(recipe.normalize(images).flatten(), torch.tensor(expected))
