import io
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import SYNSETS, write_cifar10, write_imagenet
from PIL import Image

from gossipdp_lab.tasks import Cifar10Options, ImageNetOptions
from gossipdp_lab.tasks.images import (
    Cifar10,
    ImageNet,
    middle_box,
    random_box,
    random_crop_and_flip,
    random_flip,
    read_cifar10,
    scaled_part,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def cifar10(folder: Path, **options: Any) -> Cifar10:
    return Cifar10(Cifar10Options(data=folder, **options))


def test_cifar10_from_its_folder_or_the_one_around_it(tmp_path):
    for path in (write_cifar10(tmp_path), tmp_path):
        (images, labels), (test_images, test_labels) = read_cifar10(path)
        assert images.shape == (40, 3, 32, 32)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert (len(labels), len(test_images), len(test_labels)) == (40, 8, 8)
    # The patch of class 0 is red and at the top, as the files were written.
    content = (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").read_bytes()
    assert labels[0] == content[0]
    assert bytes(images[0].flatten().tolist()) == content[1 : 1 + 3072]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data_batch_3.bin", b"\0" * 3000, "data_batch_3.bin has no rows of 3,073 bytes"),
        ("test_batch.bin", b"", "no rows of 3,073 bytes"),
        ("test_batch.bin", b"\x0a" + b"\0" * 3072, "a label that is not 0 to 9"),
    ],
)
def test_what_is_no_cifar10_is_named(tmp_path, file, content, message):
    (write_cifar10(tmp_path) / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_cifar10(tmp_path)


def test_the_papers_schedule(tmp_path):
    write_cifar10(tmp_path)
    recipe = cifar10(tmp_path, batch_size=4)
    factors = [recipe.rate_factor(at, 8) for at in (0, 0.025, 0.05, 0.499, 0.5, 0.749, 0.75)]
    assert factors == pytest.approx([1, 4.5, 8, 8, 0.8, 0.8, 0.08])
    (group, _) = recipe.make_optimizer(torch.nn.Linear(2, 2)).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1 * 4 / 128, 0.9, 5e-4)


def test_batches_and_accuracy(tmp_path):
    write_cifar10(tmp_path)
    recipe = cifar10(tmp_path, batch_size=16)
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


def recipe_of(folder: Path, batch_size: int = 4) -> ImageNet:
    return ImageNet(ImageNetOptions(data=folder, batch_size=batch_size, loader_processes=0))


def test_images_get_the_label_of_their_folder(tmp_path):
    write_imagenet(tmp_path)
    recipe = recipe_of(tmp_path)
    assert tuple(recipe.synsets) == SYNSETS
    found = [recipe.validation[number] for number in range(len(recipe.validation))]
    images, labels = (torch.stack(each) for each in zip(*found, strict=True))
    assert images.shape == (6, 3, 224, 224)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    # Each class has a colour, also in the PNG and in CMYK.
    assert images.float().mean(dim=(2, 3)).argmax(dim=1).tolist() == labels.tolist()


def test_every_worker_sees_all_images_in_an_order_of_its_own(tmp_path):
    write_imagenet(tmp_path)
    recipe = recipe_of(tmp_path)
    orders = [torch.cat([label for _, label in recipe.train_loader(r, 2, 0)]) for r in (0, 1)]
    assert [sorted(order.tolist()) for order in orders] == [[0] * 4 + [1] * 4 + [2] * 4] * 2
    assert not torch.equal(*orders)


def test_a_file_that_is_no_image_is_named(tmp_path):
    write_imagenet(tmp_path)
    bad = tmp_path / "train" / SYNSETS[0] / f"{SYNSETS[0]}_0.JPEG"
    bad.write_bytes(b"no image")
    with pytest.raises(ValueError, match=f"{bad.name} cannot be read"):
        recipe_of(tmp_path).train[0]


def test_boxes_lie_within_their_images_and_have_the_areas_and_ratios():
    sizes = torch.randint(40, 600, (4000, 2)).tolist()
    shares, ratios = [], []
    for width, height in sizes:
        left, upper, right, lower = random_box(width, height)
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= height
        shares.append((right - left) * (lower - upper) / (width * height))
        ratios.append((right - left) / (lower - upper))
    # Whole pixels leave some room around the limits.
    assert 0.06 < min(shares) < 0.12
    assert 0.9 < max(shares) <= 1.0
    assert 0.68 < min(ratios) < 0.78
    assert 1.28 < max(ratios) < 1.45
    square = torch.tensor([random_box(500, 500) for _ in range(4000)], dtype=torch.float64)
    areas = (square[:, 2] - square[:, 0]) * (square[:, 3] - square[:, 1]) / 250_000
    assert 0.45 < float(areas.mean()) < 0.56  # even from 0.08 to 1, but the largest fit seldom
    assert abs(float(square[:, 0].mean() - (500 - square[:, 2]).mean())) < 20


def test_an_image_that_no_box_fits_gives_its_middle():
    torch.manual_seed(1)
    assert random_box(100_000, 10) == (49993, 0, 50006, 10)
    assert middle_box(256, 512) == pytest.approx((16, 144, 240, 368))


def test_a_large_jpeg_is_decoded_small_and_cut_where_the_box_is(tmp_path):
    pixels = np.zeros((1000, 1600, 3), np.uint8)
    pixels[:500, 800:] = (250, 0, 0)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=95)
    with Image.open(content) as image:
        part = scaled_part(image, (800, 0, 1600, 500), 40)
        assert image.size[0] < 1600
    assert part.shape == (40, 40, 3)
    assert part[5:-5, 5:-5, 0].min() > 230
    assert part[5:-5, 5:-5, 1:].max() < 20


def test_each_crop_is_a_shift_of_its_own_image_and_all_shifts_come():
    images = torch.randint(1, 256, (600, 3, 6, 5), dtype=torch.uint8)
    crops = random_crop_and_flip(images, padding=1)
    assert crops.shape == images.shape
    assert crops.dtype == torch.uint8
    came = []
    for image, crop in zip(images, crops, strict=True):
        padded = torch.nn.functional.pad(image, [1, 1, 1, 1])
        for row, column, is_flipped in product(range(3), range(3), (False, True)):
            shifted = padded[:, row : row + 6, column : column + 5]
            if torch.equal(crop, shifted.flip(2) if is_flipped else shifted):
                came.append((row, column, is_flipped))
    assert len(came) == len(images)
    assert len(set(came)) == 18
    flips = sum(is_flipped for *_, is_flipped in came)
    assert 240 < flips < 360  # five standard deviations around a half


def test_flips_mirror_about_half():
    images = torch.randint(256, (400, 3, 2, 4), dtype=torch.uint8)
    flipped = random_flip(images)
    mirrored = (flipped == images.flip(-1)).all(dim=(1, 2, 3))
    same = (flipped == images).all(dim=(1, 2, 3))
    assert bool((mirrored | same).all())
    assert 150 < int(mirrored.sum()) < 250
