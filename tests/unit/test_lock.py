"""constraints.txt, and the check that nothing else is installed."""

import re
import tomllib
from pathlib import Path

from check_locked import LOCK, find_unlocked, read_lock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_lock_holds_names_and_versions_alone():
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line)] == []
    assert list(read_lock(LOCK.read_text())) == sorted({line.split("==")[0] for line in lines})
    assert len(read_lock(LOCK.read_text())) == len(lines)


def test_the_lock_has_a_version_that_fits_for_each_package_asked_for():
    lock = read_lock(LOCK.read_text())
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        name = canonicalize_name(requirement.name)
        if name != "gossipdp":
            assert requirement.specifier.contains(lock[name]), requirement


def test_a_package_that_is_not_locked_or_has_another_version_is_named():
    lock = read_lock("# two\ntorch==2.13.0\ntyping-extensions==4.16.0\n")
    installed = {"torch": "2.13.0+cpu", "Typing_Extensions": "4.16.0", "pip": "1", "gossipdp": "0"}
    assert find_unlocked(installed, lock) == []
    assert find_unlocked({**installed, "torch": "2.14.0", "evil": "1.0"}, lock) == [
        "evil 1.0: constraints.txt has no such package",
        "torch 2.14.0: constraints.txt has 2.13.0",
    ]
