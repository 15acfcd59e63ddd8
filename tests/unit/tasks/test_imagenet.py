"""ImageNet from folders of JPEG files: labels, boxes, scaling, and what cannot be read."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import SYNSETS, write_imagenet
from PIL import Image

from gossipdp.tasks.imagenet import ImageNet, JpegFolders, middle_box, random_box, scaled_part


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def recipe_of(folder: Path, batch_size: int = 4) -> ImageNet:
    return ImageNet(folder, batch_size=batch_size, device="cpu", epochs=90, loader_processes=0)


def test_images_get_the_label_of_their_folder(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    recipe = recipe_of(tmp_path)
    assert tuple(recipe.synsets) == SYNSETS
    images, labels = recipe.validation.__getitems__(list(range(len(recipe.validation))))
    assert images.shape == (6, 3, 224, 224)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    # Each class has a colour, also in the PNG and in CMYK.
    assert images.float().mean(dim=(2, 3)).argmax(dim=1).tolist() == labels.tolist()


def test_every_worker_sees_all_images_in_an_order_of_its_own(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    recipe = recipe_of(tmp_path)
    orders = [torch.cat([label for _, label in recipe.train_loader(r, 2, 0)]) for r in (0, 1)]
    assert [sorted(order.tolist()) for order in orders] == [[0] * 4 + [1] * 4 + [2] * 4] * 2
    assert not torch.equal(*orders)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    write_imagenet(tmp_path)
    bad = tmp_path / "train" / SYNSETS[0] / f"{SYNSETS[0]}_0.JPEG"
    bad.write_bytes(b"no image")
    with pytest.raises(ValueError, match=f"{bad.name} cannot be read"):
        recipe_of(tmp_path).train.__getitems__([0])


def test_folders_that_are_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"there is no .*train\. ImageNet is not downloaded"
    ):
        recipe_of(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match=r"holds no images as WNID/NAME\.JPEG"):
        recipe_of(tmp_path)


def test_boxes_lie_within_their_images_and_have_the_areas_and_ratios() -> None:
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


def test_an_image_that_no_box_fits_gives_its_middle() -> None:
    torch.manual_seed(1)
    assert random_box(100_000, 10) == (49993, 0, 50006, 10)
    assert middle_box(256, 512) == pytest.approx((16, 144, 240, 368))


def test_a_large_jpeg_is_decoded_small_and_cut_where_the_box_is(tmp_path: Path) -> None:
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


def test_a_dataset_of_no_known_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no images"):
        JpegFolders(tmp_path, SYNSETS, part="middle")
