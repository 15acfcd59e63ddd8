"""Small archives in the original formats of CIFAR-10 and of ImageNet, of images made up here."""

import io
import struct
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

SYNSETS = ("n01440764", "n01443537", "n02105855")


# CIFAR-10. The files are pickles of protocol 2 that Python 2's cPickle wrote: texts are `str`, so
# bytes, which Python 3 does not write so. Hence a writer of our own, in that one's words.


def python2_pickle(value: Any) -> bytes:
    """What ``cPickle.dumps(value, 2)`` gives, but for the memo, which nothing refers to."""
    return b"\x80\x02" + _words(value) + b"."


def _words(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        kind = b"cnumpy\ndtype\n" + _words(value.dtype.str[1:].encode()) + b"K\x00K\x01\x87R"
        kind += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        shape = _words(value.shape)
        return empty + b"(K\x01" + shape + kind + b"\x89" + _words(value.tobytes()) + b"tb"
    if isinstance(value, bytes):
        if len(value) < 256:
            return b"U" + bytes([len(value)]) + value
        return b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, int):
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_words, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_words, value)) + b"e"
    assert isinstance(value, dict)
    return b"}(" + b"".join(_words(key) + _words(each) for key, each in value.items()) + b"u"


def cifar10_files(images_per_file: int, seed: int = 0) -> dict[str, bytes]:
    """The files of the folder: noise on a patch whose place and colour tell the class."""
    random = np.random.default_rng(seed)
    files = {}
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for name in names:
        labels = [int(label) for label in random.integers(10, size=images_per_file)]
        images = random.integers(100, size=(images_per_file, 3, 32, 32), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row = 6 * (label // 3)
            image[label % 3, row : row + 10, 8:24] += 150
        files[name] = python2_pickle(
            {
                b"batch_label": name.encode(),
                b"labels": labels,
                b"data": images.reshape(images_per_file, -1),
                b"filenames": [b"x.png"] * images_per_file,
            }
        )
    files["batches.meta"] = python2_pickle(
        {b"num_cases_per_batch": images_per_file, b"label_names": [b"airplane"], b"num_vis": 3072}
    )
    files["readme.html"] = b"<html></html>"
    return files


def write_cifar10_archive(folder: Path, images_per_file: int = 8) -> Path:
    """cifar-10-python.tar.gz."""
    path = folder / "cifar-10-python.tar.gz"
    files = cifar10_files(images_per_file)
    with tarfile.open(path, "w:gz") as archive:
        _add_all(archive, [(f"cifar-10-batches-py/{name}", files[name]) for name in files])
    return path


def write_cifar10_folder(folder: Path, images_per_file: int = 8) -> Path:
    """cifar-10-batches-py."""
    path = folder / "cifar-10-batches-py"
    path.mkdir()
    for name, content in cifar10_files(images_per_file).items():
        (path / name).write_bytes(content)
    return path


# ImageNet: three classes with a colour each. The challenge numbers them in another order.


def jpeg(label: int, number: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    """An image of class ``label``; its size depends on ``number``."""
    size = (60 + 7 * (number % 5), 48 + 5 * (number % 7))
    colour = [40, 40, 40]
    colour[label] = 200
    image = Image.new("RGB", size, (colour[0], colour[1], colour[2])).convert(mode)
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


def train_images(per_class: int) -> Iterable[tuple[str, list[tuple[str, bytes]]]]:
    """(WNID, [(name, content)]); among them a PNG by content and a grey image."""
    for label, synset in enumerate(SYNSETS):
        yield (
            synset,
            [
                (
                    f"{synset}_{number}.JPEG",
                    jpeg(
                        label,
                        number,
                        kind="PNG" if (label, number) == (2, 1) else "JPEG",
                        mode="CMYK" if (label, number) == (1, 1) else "RGB",
                    ),
                )
                for number in range(per_class)
            ],
        )


VALIDATION_LABELS = (2, 0, 1, 1, 0)
CHALLENGE_NUMBERS = {SYNSETS[0]: 3, SYNSETS[1]: 1, SYNSETS[2]: 2}


def validation_images() -> list[tuple[str, bytes]]:
    """ILSVRC2012_val_00000001.JPEG and so on."""
    return [
        (f"ILSVRC2012_val_{number:08d}.JPEG", jpeg(label, number))
        for number, label in enumerate(VALIDATION_LABELS, start=1)
    ]


def write_imagenet_archives(folder: Path, per_class: int = 4) -> None:
    """The three archives of ILSVRC 2012."""
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w") as outer:
        for synset, images in train_images(per_class):
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w") as inner:
                _add_all(inner, images)
            _add_all(outer, [(f"{synset}.tar", content.getvalue())])
    with tarfile.open(folder / "ILSVRC2012_img_val.tar", "w") as archive:
        _add_all(archive, validation_images())
    with tarfile.open(folder / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        truth, table = devkit()
        root = "ILSVRC2012_devkit_t12/data"
        _add_all(
            archive,
            [
                (f"{root}/ILSVRC2012_validation_ground_truth.txt", truth),
                (f"{root}/meta.mat", table),
            ],
        )


def devkit() -> tuple[bytes, bytes]:
    """The ground truth in the challenge's numbers, and the MATLAB table of its classes."""
    numbers = [CHALLENGE_NUMBERS[SYNSETS[label]] for label in VALIDATION_LABELS]
    # A fourth entry is no class of the challenge but a group of classes.
    entries = sorted((number, synset) for synset, number in CHALLENGE_NUMBERS.items())
    entries.append((len(SYNSETS) + 1, "n00001740"))
    table = np.array(
        [
            (float(number), synset, f"words of {synset}", 0.0 if number <= len(SYNSETS) else 3.0)
            for number, synset in entries
        ],
        dtype=[
            ("ILSVRC2012_ID", object),
            ("WNID", object),
            ("words", object),
            ("num_children", object),
        ],
    )
    content = io.BytesIO()
    savemat(content, {"synsets": table.reshape(-1, 1)})
    return "".join(f"{number}\n" for number in numbers).encode(), content.getvalue()


def write_imagenet_folders(folder: Path, per_class: int = 4, *, sorted_validation: bool) -> None:
    """train/WNID and val, sorted into WNID, or flat beside the unpacked devkit."""
    for synset, images in train_images(per_class):
        _write_all(folder / "train" / synset, images)
    if sorted_validation:
        for label, image in zip(VALIDATION_LABELS, validation_images(), strict=True):
            _write_all(folder / "val" / SYNSETS[label], [image])
        return
    _write_all(folder / "val", validation_images())
    truth, table = devkit()
    _write_all(
        folder / "ILSVRC2012_devkit_t12" / "data",
        [("ILSVRC2012_validation_ground_truth.txt", truth), ("meta.mat", table)],
    )


def _write_all(folder: Path, files: Sequence[tuple[str, bytes]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files:
        (folder / name).write_bytes(content)


def _add_all(archive: tarfile.TarFile, files: Sequence[tuple[str, bytes]]) -> None:
    for name, content in files:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
