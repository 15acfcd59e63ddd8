"""Crops, flips and boxes: each a shift or a part of its own image, with the right frequencies."""

import pytest
import torch

from gossipdp.recipes.augmentation import (
    normalize,
    random_boxes,
    random_crop_and_flip,
    random_flip,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def shifted(image: torch.Tensor, padding: int) -> dict[tuple[int, int, bool], bytes]:
    """All that may become of an image, slowly: by row, column and mirroring."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    found = {}
    for row in range(2 * padding + 1):
        for column in range(2 * padding + 1):
            crop = padded[:, row : row + height, column : column + width]
            found[row, column, False] = crop.contiguous().numpy().tobytes()
            found[row, column, True] = crop.flip(2).contiguous().numpy().tobytes()
    return found


def test_each_crop_is_a_shift_of_its_own_image_and_all_shifts_come():
    images = torch.randint(1, 256, (600, 3, 6, 5), dtype=torch.uint8)
    crops = random_crop_and_flip(images, padding=1)
    assert crops.shape == images.shape
    assert crops.dtype == torch.uint8
    came = []
    for image, crop in zip(images, crops, strict=True):
        content = crop.contiguous().numpy().tobytes()
        came += [shift for shift, bits in shifted(image, 1).items() if bits == content]
    assert len(came) == len(images)
    assert len(set(came)) == 18
    flips = sum(flipped for _, _, flipped in came)
    assert 240 < flips < 360  # five standard deviations around a half


def test_the_order_in_memory_is_channels_last():
    crops = random_crop_and_flip(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), padding=2)
    assert crops.is_contiguous(memory_format=torch.channels_last)
    floats = normalize(crops, (0.5,) * 3, (0.5,) * 3)
    assert floats.is_contiguous(memory_format=torch.channels_last)


def test_the_same_seed_gives_the_same_crops():
    images = torch.randint(256, (32, 3, 32, 32), dtype=torch.uint8)
    torch.manual_seed(7)
    first = random_crop_and_flip(images, 4)
    second = random_crop_and_flip(images, 4)
    torch.manual_seed(7)
    assert torch.equal(first, random_crop_and_flip(images, 4))
    assert not torch.equal(first, second)


def test_flips_mirror_about_half():
    images = torch.randint(256, (400, 3, 2, 4), dtype=torch.uint8)
    flipped = random_flip(images)
    mirrored = (flipped == images.flip(-1)).all(dim=(1, 2, 3))
    same = (flipped == images).all(dim=(1, 2, 3))
    assert bool((mirrored | same).all())
    assert 150 < int(mirrored.sum()) < 250


def test_normalize():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    values = normalize(images, (0.5, 0.2, 0.0), (0.25, 0.1, 2.0)).flatten()
    torch.testing.assert_close(values, torch.tensor([-2.0, 0.0, 0.5]))


def test_boxes_lie_within_their_images_and_have_the_areas_and_ratios():
    widths, heights = torch.randint(40, 600, (2, 4000))
    boxes = random_boxes(widths, heights)
    left, upper, right, lower = boxes.unbind(1)
    assert bool((left >= 0).all() and (upper >= 0).all())
    assert bool((right <= widths).all() and (lower <= heights).all())
    shares = (right - left) * (lower - upper) / (widths * heights)
    ratios = (right - left) / (lower - upper)
    # Whole pixels leave some room around the limits.
    assert 0.06 < float(shares.min()) < 0.12
    assert 0.9 < float(shares.max()) <= 1.0
    assert 0.68 < float(ratios.min()) < 0.78
    assert 1.28 < float(ratios.max()) < 1.45
    square = random_boxes(torch.full((4000,), 500), torch.full((4000,), 500))
    areas = (square[:, 2] - square[:, 0]) * (square[:, 3] - square[:, 1]) / 250_000
    assert 0.45 < float(areas.mean()) < 0.56  # even from 0.08 to 1, but the largest fit seldom
    assert abs(float(square[:, 0].mean() - (500 - square[:, 2]).mean())) < 20


def test_an_image_that_no_box_fits_gives_its_middle():
    boxes = random_boxes(torch.tensor([1000, 10]), torch.tensor([10, 1000]), areas=(0.9, 1.0))
    assert boxes.tolist() == [[493, 0, 506, 10], [0, 493, 10, 506]]
