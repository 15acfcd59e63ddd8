from pathlib import Path

import pytest
import torch

from gossipdp_lab.tasks import BytesGptOptions, text
from gossipdp_lab.tasks.text import Gpt, PyStdlib, read_text


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_of_the_library_tests_and_installed_packages_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    for index in range(60):
        write(tmp_path, f"kept_{index}.py", "kept")
    write(tmp_path, "json/decoder.py", "kept")
    write(tmp_path, "json/README.txt", "left out")
    for folder in ("test", "json/tests", "idlelib/idle_test", "site-packages/torch"):
        write(tmp_path, f"{folder}/module.py", "left out")
    train, validation = read_text(None)
    assert len(train) + len(validation) == 61 * len("kept\0")
    assert set(bytes(torch.cat([train, validation]).tolist())) == set(b"kept\0")


def test_the_pieces_of_a_folder_are_its_whole_text(tmp_path):
    write(tmp_path, "a.txt", "a" * 1000)
    write(tmp_path, "b/c.md", "ü" * 500)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"\xff" * 100)
    write(tmp_path, ".git/config", "x" * 1000)
    train, validation = read_text(tmp_path)
    every = torch.cat([train, validation])
    assert len(every) == 2002
    counts = {byte: int((every == byte).sum()) for byte in b"ax\xff\0"}
    assert counts == {ord("a"): 1000, ord("x"): 0, 0xFF: 0, 0: 2}
    # Ten of 200 pieces of 10 bytes, of two and eleven at the odd places.
    assert 95 <= len(validation) <= 110
    assert {ord("a"), "ü".encode()[0]} <= set(validation.tolist())


def test_disjoint_shares_are_complete_and_of_one_size(tmp_path):
    write(tmp_path, "text.txt", "".join(f"line {number}\n" for number in range(4000)))
    gpt = PyStdlib(data=tmp_path, disjoint=True, batch_size=1)
    shares = [
        {bytes(window[0].tolist()) for window in gpt.train_loader(rank, 4, 0)} for rank in range(4)
    ]
    assert len(set.union(*shares)) == sum(map(len, shares))
    assert {len(share) for share in shares} == {len(gpt.train) // 4 // 64}
    with pytest.raises(ValueError, match="less than one batch of 1; use fewer workers"):
        gpt.train_loader(0, 1000, 0)


def test_windows_overlap_by_the_byte_that_is_both_target_and_input(tmp_path):
    write(tmp_path, "text.txt", "".join(chr(97 + index % 26) for index in range(2000)))
    gpt = Gpt(BytesGptOptions(data=tmp_path, context=30, batch_size=1))
    train = bytes(gpt.train.tolist())
    windows = sorted(
        train.find(bytes(window[0].tolist())) % 30 for window in gpt.train_loader(0, 1, 0)
    )
    assert len(windows) == gpt.num_samples == (len(train) - 1) // 30
    assert all(window.shape == (1, 31) for window in gpt.train_loader(0, 1, 0))


def test_too_little_text_is_refused_before_training(tmp_path):
    write(tmp_path, "text.txt", "x" * 19_999)
    with pytest.raises(ValueError, match="bytes are held out, less than one window"):
        Gpt(BytesGptOptions(data=tmp_path, context=1024, batch_size=8))
