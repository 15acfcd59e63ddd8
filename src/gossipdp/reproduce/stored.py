"""A result as it is kept beside its figure, with what it was measured by."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import msgspec

import gossipdp


class Provenance(msgspec.Struct, frozen=True):
    """Where a result comes from."""

    command: str
    version: str
    commit: str
    hardware: str
    seconds: float
    """How long it took to measure."""

    @classmethod
    def here(cls, command: str, seconds: float) -> Provenance:
        """Of this program on this machine."""
        import torch

        numba = _numba_version()
        return cls(
            command=command,
            version=gossipdp.__version__,
            commit=_commit(),
            hardware=(
                f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python "
                f"{platform.python_version()}, torch {torch.__version__}, "
                + (f"numba {numba}" if numba else "no numba")
            ),
            seconds=seconds,
        )


class Stored(msgspec.Struct, frozen=True):
    """One section's result, to be decoded as that section's own type."""

    section: str
    quick: bool
    provenance: Provenance
    result: msgspec.Raw

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Stored | None:
        """Read it back; None where nothing was stored.

        Raises:
            ValueError: the file is not such a result.
        """
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{path} is not a stored result ({error}): delete it, or measure it again"
            ) from error


def _commit() -> str:
    """The commit of this source tree, with ``+`` for changes; of an installed package unknown."""
    source = Path(gossipdp.__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(source), *words],
                capture_output=True, text=True, check=False, timeout=10,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"
    changed = git("status", "--porcelain", "--", str(source))
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def _numba_version() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("numba")
    except metadata.PackageNotFoundError:
        return None
