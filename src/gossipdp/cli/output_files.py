"""Where commands write what they found: known to be possible before the work begins."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(option: str, path: Path | None) -> None:
    """Raise ValueError where the file that ``option`` names cannot be written; makes nothing."""
    if path is None:
        return
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ValueError(f"{option} {path}: the directory to write it to does not exist")
    if path.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: name a file that can")
