"""Any folder of text: which files, in which order, and what is held out."""

from pathlib import Path

import pytest
import torch

from gossipdp.recipes.bytes_gpt import Windows
from gossipdp.recipes.text_data import read_text
from gossipdp.workloads import PyStdlib


def test_the_pieces_are_the_whole_text(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("a" * 1000)
    (tmp_path / "b" / "c.md").write_text("ü" * 500)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"\xff" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x" * 1000)
    text = read_text(tmp_path)
    every = torch.cat([text.train, text.validation])
    assert len(every) == 2002
    counts = {byte: int((every == byte).sum()) for byte in b"ax\xff\0"}
    assert counts == {ord("a"): 1000, ord("x"): 0, 0xFF: 0, 0: 2}
    # Ten of 200 pieces of 10 bytes, of two and eleven at the odd places.
    assert 95 <= len(text.validation) <= 110
    assert {ord("a"), "ü".encode()[0]} <= set(text.validation.tolist())


def test_one_file_is_enough(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert len(read_text(path).train) > 8000


def test_the_standard_library_is_split_as_in_the_demo():
    stdlib = PyStdlib()
    text = read_text(None)
    assert len(text.train) > 1_000_000
    order = stdlib.train_loader(0, 1, 0)
    assert len(order) == len(Windows(text.train, stdlib.context)) // stdlib.batch_size


@pytest.mark.parametrize(("content", "error"), [("", ValueError), (None, FileNotFoundError)])
def test_no_text(tmp_path: Path, content: str | None, error: type[Exception]):
    path = tmp_path / "text"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match="--data" if content is None else "0 bytes of text"):
        read_text(path)


def test_windows_overlap_by_the_byte_that_is_both_target_and_input():
    windows = Windows(torch.arange(10, dtype=torch.uint8), context=3)
    assert len(windows) == 3
    assert windows.__getitems__([2, 0]).tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]
    assert len(Windows(torch.arange(3, dtype=torch.uint8), context=3)) == 0
