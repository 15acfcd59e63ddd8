"""The text of a tree of Python files: what is held out, and who trains on what."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
"""Directories left out wherever they stand: test packages and what is not the library itself."""

HELD_OUT_SHARE = 20
"""One file in this many is held out for validation, chosen by the hash of its relative path."""


@dataclass(frozen=True)
class SourceFile:
    """One file: its path relative to the root, and its bytes."""

    path: PurePosixPath
    content: bytes

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(str(self.path).encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class SourceText:
    """All files of a tree, sorted by path, as uint8 tensors in memory."""

    root: Path
    files: tuple[SourceFile, ...]

    def validation(self) -> Tensor:
        """The held-out files; 1-D, uint8."""
        return _join(file for file in self.files if file.held_out)

    def train(self, packages: Iterable[str] | None = None) -> Tensor:
        """The training files of these top-level packages and modules, or of all; 1-D, uint8."""
        chosen = None if packages is None else frozenset(packages)
        return _join(
            file
            for file in self.files
            if not file.held_out and (chosen is None or file.path.parts[0] in chosen)
        )

    def shares(self, num_workers: int) -> list[tuple[str, ...]]:
        """Disjoint top-level packages and modules for each worker, of about equal size.

        The largest goes first, each to the worker that has least so far.
        """
        num_bytes: dict[str, int] = defaultdict(int)
        for file in self.files:
            if not file.held_out:
                num_bytes[file.path.parts[0]] += len(file.content)
        if len(num_bytes) < num_workers:
            raise ValueError(
                f"{self.root} has {len(num_bytes)} top-level packages and modules, too few to "
                f"give {num_workers} workers disjoint ones; use fewer workers"
            )
        shares: list[list[str]] = [[] for _ in range(num_workers)]
        sizes = [0] * num_workers
        for package in sorted(num_bytes, key=lambda package: (-num_bytes[package], package)):
            smallest = min(range(num_workers), key=lambda rank: (sizes[rank], rank))
            shares[smallest].append(package)
            sizes[smallest] += num_bytes[package]
        return [tuple(share) for share in shares]


@cache
def read_source_text(root: Path) -> SourceText:
    """Read every ``*.py`` under root except what ``LEFT_OUT`` names; once per process."""
    paths: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        # Pruned before they are entered: site-packages alone can be larger than the library.
        subdirectories[:] = [name for name in subdirectories if name not in LEFT_OUT]
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    files = tuple(
        SourceFile(PurePosixPath(path.relative_to(root).as_posix()), path.read_bytes())
        for path in sorted(paths)
    )
    if not any(file.held_out for file in files) or all(file.held_out for file in files):
        raise ValueError(
            f"{root} holds {len(files)} Python source files, too few to train on some and hold "
            "others out; name a directory with more (Debian: apt install libpython3-stdlib)"
        )
    return SourceText(root, files)


def _join(files: Iterable[SourceFile]) -> Tensor:
    """The contents one after the other, with a zero byte after each file."""
    content = bytearray()
    for file in files:
        content += file.content
        content.append(0)
    return torch.frombuffer(content, dtype=torch.uint8)
