"""Check that each installed package has the version that constraints.txt gives it.

    python tools/check_locked.py

Prints every package that has not, and then exits with 1.
"""

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

LOCK = Path(__file__).parents[1] / "constraints.txt"
NOT_LOCKED = {"gossipdp", "pip", "setuptools"}  # itself, and what a new virtual environment holds


def read_lock(text: str) -> dict[str, str]:
    """Return the version of each package."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line)


def find_unlocked(installed: Mapping[str, str], lock: Mapping[str, str]) -> list[str]:
    """Return a line for each installed package that the lock lacks or has in another version.

    A build of that version, such as torch 2.13.0+cpu, is that version.
    """
    lines = []
    for name, version in sorted(installed.items()):
        name = canonicalize_name(name)
        if name in NOT_LOCKED or lock.get(name) == Version(version).public:
            continue
        lines.append(f"{name} {version}: constraints.txt has {lock.get(name, 'no such package')}")
    return lines


def main() -> int:
    """Check this interpreter's packages; return the exit status."""
    installed = {each.name: each.version for each in metadata.distributions()}
    unlocked = find_unlocked(installed, read_lock(LOCK.read_text()))
    for line in unlocked:
        print(line)
    if unlocked:
        print("Run `make lock` and install again, or uninstall them.")
    return int(bool(unlocked))


if __name__ == "__main__":
    sys.exit(main())
