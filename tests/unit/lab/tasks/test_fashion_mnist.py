import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import idx, write_fashion_mnist

from gossipdp_lab.tasks import FashionMnistOptions
from gossipdp_lab.tasks.images import FashionMnist, read_fashion_mnist, read_idx


def recipe_of(folder: Path, **options: Any) -> FashionMnist:
    return FashionMnist(FashionMnistOptions(data=folder, **options))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_values_that_were_written_come_back(tmp_path, suffix):
    arrays = write_fashion_mnist(tmp_path, num_train=30, num_test=20, suffix=suffix)
    for (images, labels), part in zip(read_fashion_mnist(tmp_path), ("train", "t10k"), strict=True):
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert images.shape[1:] == (1, 28, 28)
        assert np.array_equal(images.squeeze(1).numpy(), arrays[f"{part}-images-idx3-ubyte"])
        assert np.array_equal(labels.numpy(), arrays[f"{part}-labels-idx1-ubyte"])


def test_a_missing_file_is_named_with_the_package_that_brings_it(tmp_path):
    write_fashion_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    wanted = r"t10k-labels-idx1-ubyte or \.gz: install Debian's package dataset-fashion-mnist, or"
    with pytest.raises(FileNotFoundError, match=wanted) as caught:
        read_fashion_mnist(tmp_path)
    assert "--data" in str(caught.value)


IMAGES = np.zeros((2, 28, 28), np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"", "no whole IDX file of bytes in 3 dimension"),
        ("train-images-idx3-ubyte", idx(IMAGES)[:-1], "no whole IDX file of bytes in 3"),
        ("train-images-idx3-ubyte", idx(IMAGES) + b"\0", "no whole IDX file of bytes in 3"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\x03" + idx(IMAGES)[4:], "no whole IDX file"),
        ("train-labels-idx1-ubyte", idx(IMAGES), "no whole IDX file of bytes in 1 dimension"),
        ("train-labels-idx1-ubyte", idx(IMAGES[:1, 0, 0]), "8 images but 1 labels of train"),
        ("train-labels-idx1-ubyte", idx(np.full(8, 10, np.uint8)), "is it Fashion-MNIST"),
        ("train-images-idx3-ubyte", idx(np.zeros((8, 28, 27), np.uint8)), "is it Fashion-MNIST"),
        ("t10k-images-idx3-ubyte.gz", b"no gzip", "cannot be decompressed"),
        ("t10k-images-idx3-ubyte.gz", gzip.compress(idx(IMAGES), mtime=0)[:-9], "be decompressed"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    write_fashion_mnist(tmp_path)
    (tmp_path / name).write_bytes(content)  # a plain file comes before a compressed one
    with pytest.raises(ValueError, match=message):
        read_fashion_mnist(tmp_path)


def test_lengths_are_four_bytes_the_most_significant_first(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(b"\0\0\x08\x01" + b"\0\0\x01\x02" + bytes(range(256)) + b"\7\7")
    assert read_idx(path, num_dimensions=1).tolist() == [*range(256), 7, 7]


def test_its_statistics_and_its_warm_up(tmp_path):
    write_fashion_mnist(tmp_path)
    recipe = recipe_of(tmp_path, batch_size=4)
    # 5% of warm-up, as 5 epochs of 100.
    assert [recipe.rate_factor(at, 8) for at in (0.025, 0.05)] == pytest.approx([4.5, 8])
    images = recipe.train[0].float() / 255
    expected = (images - 0.2860) / 0.3530
    torch.testing.assert_close(recipe.normalize(recipe.train[0]), expected)


def test_it_learns(tmp_path):
    torch.manual_seed(0)
    write_fashion_mnist(tmp_path, num_train=64, num_test=64)
    recipe = recipe_of(tmp_path, batch_size=64)
    model = recipe.make_model()
    optimizer, losses = recipe.make_optimizer(model), []
    for _ in range(25):
        for batch in recipe.train_loader(0, 1, 0):
            optimizer.zero_grad()
            loss = recipe.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert 0 <= recipe.evaluate(model) <= 1
