"""Checks that options of several commands share: numbers, and files read or written."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

# Options of all commands that name a file to write.
OUTPUTS = ("json", "figure")


def check_number(option: str, value: float, *, is_positive: bool = False) -> float:
    """Return ``value``; raise ValueError unless it is finite and positive, or 0 if allowed."""
    if not math.isfinite(value) or value < 0 or (is_positive and value == 0):
        kind = "a positive number" if is_positive else "a number of at least 0"
        raise ValueError(f"{option} is {value:g}; it must be {kind}")
    return value


def read_text(option: str, path: Path, holds: str) -> str:
    """Read the file that ``option`` names; raise ValueError if it holds no text."""
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        reason = "is not UTF-8 text"
    raise ValueError(f"{option} {path} {reason}; name a file with {holds}")


def check_output(option: str, path: Path | None) -> None:
    """Raise ValueError if the file that ``option`` names cannot be written; make nothing."""
    if path is None:
        return
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ValueError(f"{option} {path}: the directory to write it to does not exist")
    if path.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: name a file that can")


def check_outputs(arguments: object) -> None:
    """Check every output file that a command's options name, before its work begins."""
    if dataclasses.is_dataclass(arguments):
        for field in dataclasses.fields(arguments):
            value = getattr(arguments, field.name)
            if field.name in OUTPUTS and isinstance(value, Path):
                check_output(f"--{field.name}", value)
            check_outputs(value)
