import re
import shutil
import subprocess
from pathlib import Path

import pytest
from build_site import build

ROOT = Path(__file__).parents[2]


def test_every_link_leads_somewhere_and_nothing_comes_from_elsewhere(tmp_path):
    for name in ("docs", "examples", "src", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    assert build(tmp_path) == []
    assert len(list((tmp_path / "build" / "site").rglob("*.html"))) >= 15


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "loop.py").write_text("print(1)\n")
    settings = "site_name: small\nsite_dir: build/site\ntheme: {font: false}\n"
    (tmp_path / "mkdocs.yml").write_text(settings)
    return tmp_path


def test_files_of_the_repository_are_brought_and_what_is_wrong_is_said(small):
    (small / "docs" / "index.md").write_text(
        '[loop](../examples/loop.py) <a href="../nowhere.py">a</a> <a href="index.html#none">b</a>'
        '<img src="https://example.org/logo.png">\n'
    )
    assert build(small) == [
        "index.html: ../nowhere.py: leads nowhere",
        "index.html: index.html#none: there is no such anchor",
        "index.html: https://example.org/logo.png: loaded from elsewhere",
    ]
    copy = small / "build" / "site" / "files" / "examples" / "loop.py.txt"
    assert copy.read_text() == "print(1)\n"
    assert "files/examples/loop.py.txt" in (small / "build" / "site" / "index.html").read_text()


def test_a_link_to_a_page_that_is_not_there_ends_the_build(small, capfd):
    (small / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n")
    with pytest.raises(subprocess.CalledProcessError):
        build(small)
    assert "page does not exist" in "".join(capfd.readouterr())


def test_every_page_is_in_the_navigation():
    docs, settings = ROOT / "docs", (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .*: (\S+\.md)$", settings, re.M)
    there = [str(path.relative_to(docs)) for path in docs.rglob("*.md")]
    assert sorted(listed) == sorted(there), "the navigation is in mkdocs.yml"
