"""Text to train on: which files, in which order, and what is held out."""

from pathlib import Path, PurePosixPath

import pytest
import torch

from gossipdp.tasks.text import Gpt, PyStdlib, Text, TextFile, read_python, read_text


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def text_of(sizes: dict[str, int]) -> Text:
    files = (TextFile(PurePosixPath(name), b"x" * size) for name, size in sizes.items())
    return Text(Path("/root"), tuple(file for file in files if not file.held_out))


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for index in range(60):
        write(tmp_path, f"kept_{index}.py", "kept")
    write(tmp_path, "json/decoder.py", "kept")
    write(tmp_path, "json/README.txt", "left out")
    for folder in ("test", "json/tests", "idlelib/idle_test", "site-packages/torch"):
        write(tmp_path, f"{folder}/module.py", "left out")
    files = read_python(tmp_path).files
    assert len(files) == 61
    assert {file.content for file in files} == {b"kept"}
    assert list(files) == sorted(files, key=lambda file: file.path)


def test_held_out_files_follow_from_the_path_alone() -> None:
    held_out = [
        index
        for index in range(1000)
        if TextFile(PurePosixPath(f"module_{index}.py"), b"").held_out
    ]
    assert 30 <= len(held_out) <= 70
    assert TextFile(PurePosixPath(f"module_{held_out[0]}.py"), b"other").held_out


def test_training_and_validation_share_no_file(tmp_path: Path) -> None:
    for index in range(100):
        write(tmp_path, f"module_{index}.py", f"<{index}>")
    text = read_python(tmp_path)
    train = bytes(text.train().tolist()).split(b"\0")[:-1]
    validation = bytes(text.validation().tolist()).split(b"\0")[:-1]
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == 100


def test_shares_are_disjoint_complete_and_balanced() -> None:
    text = text_of({f"package_{index}/module.py": 100 + index for index in range(41)})
    shares = text.shares(4)
    packages = [package for share in shares for package in share]
    assert sorted(packages) == sorted({file.path.parts[0] for file in text.files})
    sizes = [len(text.train(share)) for share in shares]
    assert sum(sizes) == len(text.train())
    assert max(sizes) <= 1.15 * min(sizes)


def test_too_few_packages_for_the_workers() -> None:
    text = text_of({"a/module.py": 10, "b/module.py": 10})
    with pytest.raises(ValueError, match="too few to give 3 workers disjoint ones"):
        text.shares(3)


def test_a_directory_without_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 0 Python source files"):
        read_python(tmp_path)


def test_the_running_python_has_text_enough() -> None:
    text = read_text(None)
    assert text is read_python(PyStdlib().text.root)
    assert len(text.train()) > 5_000_000
    assert len(text.validation()) > 50_000
    assert not any("test" in file.path.parts[:-1] for file in text.files)
    sizes = [len(text.train(share)) for share in text.shares(4)]
    assert max(sizes) < 1.01 * min(sizes)


def test_the_pieces_of_a_folder_are_its_whole_text(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "a" * 1000)
    write(tmp_path, "b/c.md", "ü" * 500)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"\xff" * 100)
    write(tmp_path, ".git/config", "x" * 1000)
    text = read_text(tmp_path)
    every = torch.cat([text.train(), text.validation()])
    assert len(every) == 2002
    counts = {byte: int((every == byte).sum()) for byte in b"ax\xff\0"}
    assert counts == {ord("a"): 1000, ord("x"): 0, 0xFF: 0, 0: 2}
    # Ten of 200 pieces of 10 bytes, of two and eleven at the odd places.
    assert 95 <= len(text.validation()) <= 110
    assert {ord("a"), "ü".encode()[0]} <= set(text.validation().tolist())


def test_one_file_is_enough(tmp_path: Path) -> None:
    write(tmp_path, "book.txt", "".join(f"line {number}\n" for number in range(1000)))
    assert len(read_text(tmp_path / "book.txt").train()) > 8000


@pytest.mark.parametrize(("content", "error"), [("", ValueError), (None, FileNotFoundError)])
def test_no_text(tmp_path: Path, content: str | None, error: type[Exception]) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match="--data" if content is None else "0 bytes of text"):
        read_text(path)


def test_windows_overlap_by_the_byte_that_is_both_target_and_input(tmp_path: Path) -> None:
    write(tmp_path, "text.txt", "".join(chr(97 + index % 26) for index in range(2000)))
    gpt = Gpt(read_text(tmp_path), context=30, batch_size=1)
    text = bytes(gpt.text.train().tolist())
    windows = sorted(
        text.find(bytes(window[0].tolist())) % 30 for window in gpt.train_loader(0, 1, 0)
    )
    assert len(windows) == gpt.num_samples == (len(text) - 1) // 30
    assert all(window.shape == (1, 31) for window in gpt.train_loader(0, 1, 0))


@pytest.mark.parametrize(
    ("context", "batch_size", "message"),
    [(1024, 8, "bytes are held out, less than one window"), (64, 999, "less than one batch")],
)
def test_too_little_text_is_refused_before_training(
    tmp_path: Path, context: int, batch_size: int, message: str
) -> None:
    write(tmp_path, "text.txt", "x" * 19_999)
    with pytest.raises(ValueError, match=message):
        Gpt(read_text(tmp_path), context=context, batch_size=batch_size)
