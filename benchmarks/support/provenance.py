"""What a result was measured by: command, commit, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
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
    def here(cls, seconds: float) -> Provenance:
        """Of this script on this machine."""
        return cls(
            command=command(),
            version=gossipdp.__version__,
            commit=_commit(),
            hardware=(
                f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python "
                f"{platform.python_version()}, torch {metadata.version('torch')}, "
                f"numba {metadata.version('numba')}"
            ),
            seconds=seconds,
        )


def command() -> str:
    """How this benchmark was called, with the path as seen from the repository."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def _commit() -> str:
    """The commit of this source tree, with ``+`` for changes; outside of one ``unknown``."""
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
