"""ImageNet from the original archives and from both folder layouts: the same images and classes."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from recipe_archives import (
    SYNSETS,
    VALIDATION_LABELS,
    train_images,
    validation_images,
    write_imagenet_archives,
    write_imagenet_folders,
)

from gossipdp.recipes import imagenet_data
from gossipdp.recipes.batches import whole_batches
from gossipdp.recipes.image_store import tar_members
from gossipdp.recipes.imagenet_data import ImageSet, open_imagenet
from gossipdp.recipes.jpeg_batches import JpegBatches, scaled_part


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    return path


def contents(images: ImageSet) -> list[tuple[bytes, int]]:
    return [(images.store.read(number), int(label)) for number, label in enumerate(images.labels)]


@pytest.mark.parametrize("layout", ["archives", "folders, val sorted", "folders, val flat"])
def test_all_layouts(data: Path, layout: str):
    if layout == "archives":
        write_imagenet_archives(data)
    else:
        write_imagenet_folders(data, sorted_validation=layout.endswith("sorted"))
    files = open_imagenet(data)
    assert files.synsets == SYNSETS
    files = pickle.loads(pickle.dumps(files))  # as loader processes may get it
    expected = [
        (content, label)
        for label, (_, images) in enumerate(train_images(4))
        for _, content in images
    ]
    assert contents(files.train) == expected
    pairs = zip((content for _, content in validation_images()), VALIDATION_LABELS, strict=True)
    assert sorted(contents(files.validation)) == sorted(pairs)


def test_the_table_of_contents_is_kept_and_read_anew_for_another_archive(
    data: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    write_imagenet_archives(data)
    first = open_imagenet(data)
    (kept,) = (own_cache / "gossipdp").iterdir()
    read = imagenet_data._contents
    monkeypatch.setattr(imagenet_data, "_contents", lambda *_: pytest.fail("it was read again"))
    assert contents(open_imagenet(data).train) == contents(first.train)
    monkeypatch.setattr(imagenet_data, "_contents", read)
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 1  # in the first array
    for damaged in (b"damaged", b"", whole[: len(whole) // 2], flipped):
        kept.write_bytes(damaged)
        assert contents(open_imagenet(data).train) == contents(first.train)
        assert kept.read_bytes() == whole
    write_imagenet_archives(data, per_class=2)
    assert len(open_imagenet(data).train.labels) == 6


def test_a_cache_that_cannot_be_written_ends_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_imagenet_archives(data)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(open_imagenet(data).train.labels) == 12


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("ILSVRC2012_img_train.tar", "holds neither train nor ILSVRC2012_img_train.tar"),
        ("ILSVRC2012_img_val.tar", "holds neither val nor ILSVRC2012_img_val.tar"),
        ("ILSVRC2012_devkit_t12.tar.gz", "neither ILSVRC2012_devkit_t12.tar.gz nor"),
    ],
)
def test_what_is_missing_and_how_to_get_it(data: Path, removed: str, message: str):
    write_imagenet_archives(data)
    (data / removed).unlink()
    with pytest.raises(FileNotFoundError, match=rf"(?s){message}.*image-net\.org.*--data"):
        open_imagenet(data)


def test_no_folder_at_all(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        open_imagenet(tmp_path / "nowhere")


def test_archives_that_are_others(data: Path):
    write_imagenet_archives(data)
    archive = data / "ILSVRC2012_img_train.tar"
    (data / "ILSVRC2012_img_val.tar").replace(archive)
    with pytest.raises(ValueError, match=r"is not the archive of ILSVRC 2012: .*WNID\.tar"):
        open_imagenet(data)
    archive.write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="no tar header at byte 0"):
        open_imagenet(data)


def test_a_cut_archive(data: Path):
    write_imagenet_archives(data)
    archive = data / "ILSVRC2012_img_train.tar"
    archive.write_bytes(archive.read_bytes()[:9000])
    with pytest.raises(ValueError, match=r"the archive ends within"):
        open_imagenet(data)


def test_members_are_those_that_tarfile_finds():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, size in (("a", 0), ("b/c", 511), ("d" * 150, 512), ("e", 5000)):
            member = tarfile.TarInfo(name)
            member.size = size
            archive.addfile(member, io.BytesIO(name[:1].encode() * size))
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    length = len(content.getvalue())
    shifted = io.BytesIO(b"?" * 100 + content.getvalue())
    found = list(tar_members(shifted, 100, length))
    content.seek(0)
    with tarfile.open(fileobj=content) as archive:
        expected = [(each.offset_data + 100, each.size) for each in archive if each.isfile()]
    assert [(start, size) for _, start, size in found] == expected


class TestBatches:
    def open(self, data: Path, part: str, size: int = 32) -> JpegBatches:
        write_imagenet_archives(data)
        return JpegBatches(open_imagenet(data).train, size=size, part=part)

    @pytest.mark.parametrize("part", ["random", "middle"])
    def test_each_image_shows_its_class(self, data: Path, part: str):
        images, labels = self.open(data, part).__getitems__(list(range(12)))
        assert images.shape == (12, 3, 32, 32)
        assert images.dtype == torch.uint8
        assert images.is_contiguous(memory_format=torch.channels_last)
        # Of a CMYK file only the channels' order can be expected.
        assert images.float().mean(dim=(2, 3)).argmax(dim=1).tolist() == labels.tolist()
        assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4

    @pytest.mark.parametrize("processes", [0, 1])
    def test_the_loader_gives_all_images_in_another_order_each_epoch(
        self, data: Path, processes: int
    ):
        loader = whole_batches(self.open(data, "middle"), 4, seed=3, processes=processes)
        epochs = [torch.cat([labels for _, labels in loader]).tolist() for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == [0] * 4 + [1] * 4 + [2] * 4
        assert epochs[0] != epochs[1]

    def test_a_file_that_is_no_image_is_named(self, data: Path):
        write_imagenet_folders(data, sorted_validation=True)
        path = data / "train" / SYNSETS[0] / f"{SYNSETS[0]}_0.JPEG"
        batches = JpegBatches(open_imagenet(data).train, size=32, part="middle")
        whole = path.read_bytes()
        path.write_bytes(b"no image")
        with pytest.raises(ValueError, match=rf"{path} is no JPEG"):
            batches.__getitems__([0])
        path.write_bytes(whole[:-20])
        with pytest.raises(ValueError, match=rf"{path}: .*truncated"):
            batches.__getitems__([0])


def test_a_part_that_is_decoded_small_shows_what_it_shows_large():
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(256, size=(12, 16, 3), dtype=np.uint8))
    image = coarse.resize((1600, 1200), Image.Resampling.BICUBIC)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=95)
    box = (300.0, 150.0, 1500.0, 1150.0)
    expected = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR, box=box))
    with Image.open(content) as opened:
        found = scaled_part(opened, box, 64)
        assert opened.size == (200, 150)  # an eighth
    assert np.abs(found.astype(int) - expected.astype(int)).mean() < 4
