"""CIFAR-10 is read from its original formats, and nothing else that a pickle may hold is done."""

import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipe_archives import (
    cifar10_files,
    python2_pickle,
    write_cifar10_archive,
    write_cifar10_folder,
)

from gossipdp.recipes.cifar10_data import read_cifar10
from gossipdp.recipes.python2_arrays import read_python2_pickle


def test_archive_and_folder_give_the_same_images(tmp_path: Path):
    archive, folder = tmp_path / "archive", tmp_path / "folder"
    archive.mkdir()
    folder.mkdir()
    packed, unpacked = write_cifar10_archive(archive), write_cifar10_folder(folder)
    read = [read_cifar10(path) for path in (archive, packed, folder, unpacked)]
    for images in read:
        assert len(images.train) == 40
        assert len(images.test) == 8
        assert torch.equal(images.train.images, read[0].train.images)
        assert torch.equal(images.test.labels, read[0].test.labels)


def test_pixels_and_labels_are_in_their_places(tmp_path: Path):
    write_cifar10_folder(tmp_path)
    images = read_cifar10(tmp_path)
    content = pickle.loads(cifar10_files(8)["data_batch_2"], encoding="bytes")
    expected = torch.from_numpy(content[b"data"].copy()).view(8, 3, 32, 32)
    assert images.train.images.dtype == torch.uint8
    assert torch.equal(images.train.images[8:16], expected)
    assert images.train.labels[8:16].tolist() == content[b"labels"]


@pytest.mark.parametrize("there", [True, False])
def test_what_is_missing_and_how_to_get_it(tmp_path: Path, there: bool):
    path = tmp_path if there else tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError, match=r"cs\.toronto\.edu.*--data") as error:
        read_cifar10(path)
    assert str(path) in str(error.value)


def test_a_folder_without_a_batch(tmp_path: Path):
    (write_cifar10_folder(tmp_path) / "data_batch_3").unlink()
    with pytest.raises(ValueError, match="has no data_batch_3; get the original"):
        read_cifar10(tmp_path)


def test_a_cut_archive(tmp_path: Path):
    path = write_cifar10_archive(tmp_path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"cannot be read .*; get it again|has no test_batch"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({b"data": np.zeros((8, 1024), np.uint8)}, "no rows of 3,072 bytes"),
        ({b"data": [1, 2]}, "no rows of 3,072 bytes"),
        ({b"labels": [1] * 7}, "no label of 0 to 9 for each image"),
        ({b"labels": [10] * 8}, "no label of 0 to 9 for each image"),
    ],
)
def test_what_is_not_cifar10(tmp_path: Path, changes: dict[bytes, Any], message: str):
    folder = write_cifar10_folder(tmp_path)
    content = {b"data": np.zeros((8, 3072), np.uint8), b"labels": [1] * 8, **changes}
    (folder / "data_batch_4").write_bytes(python2_pickle(content))
    with pytest.raises(ValueError, match=rf"data_batch_4 has {message}"):
        read_cifar10(tmp_path)


class TestPickles:
    def test_what_cifar10_holds(self):
        array = np.arange(6, dtype=np.uint8).reshape(2, 3)
        value = {b"data": array, b"labels": [3, 70000], b"batch_label": b"one", b"none": (1, 2)}
        read = read_python2_pickle(python2_pickle(value))
        assert np.array_equal(read.pop(b"data"), array)
        assert read == {b"labels": [3, 70000], b"batch_label": b"one", b"none": (1, 2)}

    def test_the_writer_of_these_tests_writes_pickles(self):
        array = np.arange(300, dtype=np.uint8).reshape(3, 100)
        read = pickle.loads(python2_pickle([array, b"text"]), encoding="bytes")
        assert np.array_equal(read[0], array)
        assert read[1] == b"text"

    def test_arrays_as_python_3_and_numpy_2_write_them(self):
        array = np.arange(12, dtype=np.uint8).reshape(3, 4)
        assert np.array_equal(read_python2_pickle(pickle.dumps(array, 3)), array)

    @pytest.mark.parametrize("protocol", range(2, 6))
    def test_nothing_else_is_called(self, protocol: int, tmp_path: Path):
        class Trap:
            def __reduce__(self) -> tuple[Any, tuple[str]]:
                return __import__("os").mkdir, (str(tmp_path / "sprung"),)

        content = pickle.dumps({"data": Trap()}, protocol)
        with pytest.raises(ValueError, match=r"wants to call posix\.mkdir"):
            read_python2_pickle(content)
        assert not (tmp_path / "sprung").exists()

    @pytest.mark.parametrize(
        ("name", "array"),
        [("floats", np.zeros(3)), ("objects", np.array([{}, []], dtype=object))],
    )
    def test_only_arrays_of_bytes(self, name: str, array: Any):
        with pytest.raises(ValueError, match=r"array|wants to call"):
            read_python2_pickle(pickle.dumps(array, 3))

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"no pickle",
            b"\x80\x02cnumpy\nndarray\n.",
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.",  # never filled
            b"\x80\x02cnumpy\ndtype\n)R.",
            b"\x80\x02cbuiltins\neval\nU\x011\x85R.",
            b"\x80\x02U\x02idQ.",  # refers to what lies outside
            b"\x80\x02]q\x00h\x00a.",  # a list that holds itself
            python2_pickle(np.zeros(8, np.uint8)).replace(b"K\x08t", b"K\x09t"),
            python2_pickle(np.zeros(8, np.uint8)).replace(b"\x89", b"\x88"),  # Fortran's order
        ],
    )
    def test_damaged_or_foreign_pickles(self, content: bytes):
        with pytest.raises(ValueError, match=r"pickle|shape"):
            read_python2_pickle(content)


def test_an_archive_that_only_seems_to_be_one(tmp_path: Path):
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match="has no data_batch_1"):
        read_cifar10(tmp_path)
