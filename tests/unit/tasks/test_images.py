"""Crops and flips: each a shift of its own image, with the right frequencies."""

import pytest
import torch

from gossipdp.tasks.images import random_crop_and_flip, random_flip


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
