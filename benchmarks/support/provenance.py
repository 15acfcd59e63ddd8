"""The provenance of a result: command, commit, hardware."""

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
    """The origin of a result."""

    command: str
    version: str
    commit: str
    """See :func:`commit_here`."""
    hardware: str
    seconds: float
    """Duration of the measurement."""

    @classmethod
    def here(cls, seconds: float) -> Provenance:
        """Return the provenance of this script on this machine."""
        return cls(
            command=" ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            version=gossipdp.__version__,
            commit=commit_here(),
            hardware=(
                f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python "
                f"{platform.python_version()}, torch {metadata.version('torch')}, "
                f"numba {metadata.version('numba')}"
            ),
            seconds=seconds,
        )

    @property
    def code(self) -> str:
        """By what code it was measured, in words."""
        changed = ", with changes that were not committed" if self.commit.endswith("+") else ""
        return f"commit {self.commit.removesuffix('+')}{changed}"


def commit_here() -> str:
    """Return the commit of the source tree that this runs from; see :func:`commit_of`."""
    return commit_of(Path(gossipdp.__file__).parents[2])


def commit_of(tree: Path) -> str:
    """Return the commit of a source tree, with ``+`` if ``src`` or ``benchmarks`` changed since.

    ``unknown`` where the package is not part of one.
    """

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(tree), *words],
                capture_output=True, text=True, check=False, timeout=10,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "src/gossipdp/__init__.py") is None:
        return "unknown"
    measuring = ("src", "benchmarks", ":(exclude)benchmarks/results")
    changed = git("status", "--porcelain", "--", *measuring)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")
