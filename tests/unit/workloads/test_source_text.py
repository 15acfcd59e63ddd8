from pathlib import Path, PurePosixPath

import pytest

from gossipdp.workloads import PyStdlib
from gossipdp.workloads.source_text import SourceFile, SourceText, read_source_text


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def text_of(sizes: dict[str, int]) -> SourceText:
    files = (SourceFile(PurePosixPath(name), b"x" * size) for name, size in sizes.items())
    return SourceText(Path("/root"), tuple(file for file in files if not file.held_out))


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for index in range(60):
        write(tmp_path, f"kept_{index}.py", "kept")
    write(tmp_path, "json/decoder.py", "kept")
    write(tmp_path, "json/README.txt", "left out")
    for folder in ("test", "json/tests", "idlelib/idle_test", "site-packages/torch"):
        write(tmp_path, f"{folder}/module.py", "left out")
    files = read_source_text(tmp_path).files
    assert len(files) == 61
    assert {file.content for file in files} == {b"kept"}
    assert list(files) == sorted(files, key=lambda file: file.path)


def test_held_out_files_follow_from_the_path_alone() -> None:
    held_out = [
        index
        for index in range(1000)
        if SourceFile(PurePosixPath(f"module_{index}.py"), b"").held_out
    ]
    assert 30 <= len(held_out) <= 70
    assert SourceFile(PurePosixPath(f"module_{held_out[0]}.py"), b"other").held_out


def test_training_and_validation_share_no_file(tmp_path: Path) -> None:
    for index in range(100):
        write(tmp_path, f"module_{index}.py", f"<{index}>")
    text = read_source_text(tmp_path)
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
        read_source_text(tmp_path)


def test_the_running_python_has_text_enough() -> None:
    text = read_source_text(PyStdlib().root)
    assert len(text.train()) > 5_000_000
    assert len(text.validation()) > 50_000
    assert not any("test" in file.path.parts[:-1] for file in text.files)
    sizes = [len(text.train(share)) for share in text.shares(4)]
    assert max(sizes) < 1.01 * min(sizes)
