"""ImageNet (ILSVRC 2012) from its original archives, or from the folders that they unpack to."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gossipdp.recipes.image_store import ArchiveStore, FolderStore, ImageStore, tar_members

TRAIN_ARCHIVE, VALIDATION_ARCHIVE = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT_ARCHIVE, DEVKIT_FOLDER = "ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12"
GROUND_TRUTH, SYNSETS = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the training images' three channels, as shares of the largest value."""

HOW_TO_GET_IT = (
    "ImageNet is not downloaded for you: register at https://image-net.org, get the archives of "
    f"ILSVRC 2012, {TRAIN_ARCHIVE} (138 GB), {VALIDATION_ARCHIVE} (6 GB) and {DEVKIT_ARCHIVE}, and "
    "put them as they are into a folder that you name with --data; folders train/WNID/*.JPEG and "
    "val/WNID/*.JPEG serve as well, and so does val/*.JPEG with the devkit"
)

_SYNSET = re.compile(r"n\d{8}")
_VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


@dataclass(frozen=True)
class ImageSet:
    """Image files and the class of each; labels: (count,), int64."""

    store: ImageStore
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class ImageNetFiles:
    """synsets: the names of the classes (WNIDs) in ascending order: a label is a place in it."""

    synsets: tuple[str, ...]
    train: ImageSet
    validation: ImageSet


def open_imagenet(path: Path) -> ImageNetFiles:
    """Find training and validation images, and which image is of which class.

    The table of contents of the training archive is read once and kept in the user's cache folder.

    Raises:
        FileNotFoundError: they are not in ``path``; the message says how to get them.
        ValueError: an archive or a file of the devkit is not what it should be.
    """
    train_folder, train_archive = path / "train", path / TRAIN_ARCHIVE
    if train_folder.is_dir():
        synsets, train = _class_folders(train_folder)
    elif train_archive.is_file():
        synsets, train = _train_archive(train_archive)
    else:
        raise FileNotFoundError(_missing(path, f"neither train nor {TRAIN_ARCHIVE}"))
    return ImageNetFiles(synsets, train, _validation(path, synsets))


def _missing(path: Path, what: str) -> str:
    where = path.absolute()
    problem = f"{where} holds {what}" if path.is_dir() else f"there is no folder {where}"
    return f"{problem}. {HOW_TO_GET_IT}"


def _class_folders(root: Path) -> tuple[tuple[str, ...], ImageSet]:
    """root/WNID/*.JPEG."""
    synsets = sorted(name for name in os.listdir(root) if _SYNSET.fullmatch(name))
    paths: list[bytes] = []
    labels: list[int] = []
    for label, synset in enumerate(synsets):
        names = sorted(name for name in os.listdir(root / synset) if name.endswith(".JPEG"))
        paths += [os.fsencode(f"{synset}/{name}") for name in names]
        labels += [label] * len(names)
    if not paths:
        raise ValueError(f"{root} holds no images as WNID/NAME.JPEG, such as n01440764/x.JPEG")
    return tuple(synsets), ImageSet(FolderStore(root, paths), np.array(labels, np.int64))


def _train_archive(archive: Path) -> tuple[tuple[str, ...], ImageSet]:
    """An archive of archives, one for each class: WNID.tar."""
    cache = _cache_file(archive)
    try:
        with cache.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            synsets, places, labels = saved["synsets"], saved["places"], saved["labels"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        with archive.open("rb") as file:
            synsets, places, labels = _contents(archive, file)
        _keep(cache, synsets=synsets, places=places, labels=labels)
    return tuple(map(str, synsets)), ImageSet(ArchiveStore(archive, places), labels)


def _contents(
    archive: Path, file: BinaryIO
) -> tuple[NDArray[np.str_], NDArray[np.int64], NDArray[np.int64]]:
    try:
        classes = sorted(tar_members(file, 0, archive.stat().st_size))
        synsets = [name.removesuffix(".tar") for name, _, _ in classes]
        if not classes or not all(map(_SYNSET.fullmatch, synsets)):
            raise ValueError("it must hold WNID.tar for each class, such as n01440764.tar")
        places: list[tuple[int, int]] = []
        labels: list[int] = []
        for label, (_, start, size) in enumerate(classes):
            images = sorted(tar_members(file, start, size))
            places += [(start, size) for _, start, size in images]
            labels += [label] * len(images)
    except ValueError as error:
        raise ValueError(f"{archive} is not the archive of ILSVRC 2012: {error}") from error
    return np.array(synsets), np.array(places, np.int64), np.array(labels, np.int64)


def _cache_file(archive: Path) -> Path:
    facts = archive.stat()
    key = f"{archive.absolute()} {facts.st_size} {facts.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "gossipdp", f"imagenet-{digest}.npz")


def _keep(cache: Path, **arrays: NDArray[np.generic]) -> None:
    """Write whole or not at all; where it cannot be written, the next run reads the archive."""
    own = cache.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        try:
            with own.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            own.replace(cache)
        finally:
            own.unlink(missing_ok=True)


def _validation(path: Path, synsets: tuple[str, ...]) -> ImageSet:
    folder, archive = path / "val", path / VALIDATION_ARCHIVE
    if folder.is_dir():
        if any(map(_SYNSET.fullmatch, os.listdir(folder))):
            own_synsets, images = _class_folders(folder)
            if not set(own_synsets) <= set(synsets):
                raise ValueError(f"{folder} holds classes that the training images do not have")
            labels = np.array([synsets.index(name) for name in own_synsets], np.int64)
            return ImageSet(images.store, labels[images.labels])
        names = sorted(name for name in os.listdir(folder) if _VALIDATION_IMAGE.fullmatch(name))
        store: ImageStore = FolderStore(folder, [os.fsencode(name) for name in names])
    elif archive.is_file():
        with archive.open("rb") as file:
            members = sorted(
                (Path(name).name, start, size)
                for name, start, size in tar_members(file, 0, archive.stat().st_size)
            )
        members = [member for member in members if _VALIDATION_IMAGE.fullmatch(member[0])]
        names = [name for name, _, _ in members]
        places = np.array([member[1:] for member in members], np.int64).reshape(-1, 2)
        store = ArchiveStore(archive, places)
    else:
        raise FileNotFoundError(_missing(path, f"neither val nor {VALIDATION_ARCHIVE}"))
    if not names:
        raise ValueError(f"{folder if folder.is_dir() else archive} holds no validation images")
    return ImageSet(store, _ground_truth(path, names, synsets))


def _ground_truth(path: Path, names: list[str], synsets: tuple[str, ...]) -> NDArray[np.int64]:
    """The class of each validation image, by its number, from the devkit."""
    truth_file, synset_file = _devkit(path)
    by_number = [int(line) for line in truth_file.split()]
    of_challenge = _synsets_of_challenge(synset_file)
    label_of = {synset: label for label, synset in enumerate(synsets)}
    labels = []
    for name in names:
        match = _VALIDATION_IMAGE.fullmatch(name)
        assert match is not None
        number = int(match[1])
        if not 1 <= number <= len(by_number):
            raise ValueError(
                f"the devkit's ground truth has {len(by_number)} lines, none of {name}"
            )
        synset = of_challenge.get(by_number[number - 1])
        if synset not in label_of:
            raise ValueError(f"{name} is of class {synset}, of which there is no training image")
        labels.append(label_of[synset])
    return np.array(labels, np.int64)


def _devkit(path: Path) -> tuple[bytes, bytes]:
    """The ground truth of the validation images, and the table of classes, a MATLAB file."""
    folder, archive = path / DEVKIT_FOLDER, path / DEVKIT_ARCHIVE
    if folder.is_dir():
        return (folder / GROUND_TRUTH).read_bytes(), (folder / SYNSETS).read_bytes()
    if not archive.is_file():
        what = f"neither {DEVKIT_ARCHIVE} nor {DEVKIT_FOLDER}, which say what val shows"
        raise FileNotFoundError(_missing(path, what))
    contents: dict[str, bytes] = {}
    with tarfile.open(archive, "r:*") as files:
        for wanted in (GROUND_TRUTH, SYNSETS):
            name = f"{DEVKIT_FOLDER}/{wanted}"
            try:
                file = files.extractfile(name)
            except KeyError:
                file = None
            if file is None:
                raise ValueError(f"{archive} has no {name}; get it again")
            contents[wanted] = file.read()
    return contents[GROUND_TRUTH], contents[SYNSETS]


def _synsets_of_challenge(content: bytes) -> dict[int, str]:
    """The WNID of each of the challenge's own numbers of classes, 1 to 1000."""
    from scipy.io import loadmat

    file: Any = io.BytesIO(content)  # scipy's stubs know paths only
    table = loadmat(file, squeeze_me=True)["synsets"]
    return {
        int(number): str(synset)
        for number, synset in zip(
            np.atleast_1d(table["ILSVRC2012_ID"]), np.atleast_1d(table["WNID"]), strict=True
        )
    }
