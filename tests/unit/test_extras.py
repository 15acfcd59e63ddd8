"""Extras: each that a page names exists, and all are installed in one way."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
FILES = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]


def test_whoever_names_an_extra_names_one_that_exists():
    named: set[str] = set()
    for path in FILES:
        for names in re.findall(r"gossipdp\[([\w,-]+)\]", path.read_text()):
            for name in names.split(","):
                assert name in EXTRAS or name == "NAME", f"{path}: {name}"
                named.add(name)
    assert {"lightning", "ray"} <= named


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_extras_are_installed_in_the_way_that_serves_clones_and_pypi(path):
    text = path.read_text().replace("pip install '.[lab]'", "")  # of the clone, at first
    assert not re.search(r"install[^\n`]*\s'?\.\[", text), "write 'gossipdp[NAME]'"


def test_each_extra_is_explained_to_those_who_want_it():
    for_users = (ROOT / "docs" / "install.md").read_text()
    for_contributors = (ROOT / "CONTRIBUTING.md").read_text()
    for extra in EXTRAS:
        text = for_contributors if extra in ("dev", "docs", "fuzz") else for_users
        assert re.search(rf"^- `{extra}`: \S", text, re.M), extra
