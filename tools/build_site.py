"""Builds the documentation's site into build/site, whole: it opens from disk and needs no network.

    python tools/build_site.py

Zensical builds the pages and ends at a broken link between them. Links to files of the repository,
such as the examples, are then given a copy in the site; after that every link and figure of every
page must lead to something in it, and nothing may be loaded from elsewhere.
"""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
LOADING = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}


class _Page(HTMLParser):
    """The links, files and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if given.get(LOADING.get(tag, "")):
            self.loads.append(given[LOADING[tag]])


def build(root: Path = ROOT) -> list[str]:
    """Build the site of the repository at ``root``; what is wrong with it, a line each.

    Raises:
        subprocess.CalledProcessError: Zensical found something wrong, and has said what.
    """
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(command, cwd=root, check=True)
    site = root / "build" / "site"
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    for page in pages:
        _bring_files(page, site, root)
    parsed = {page: _Page(page.read_text("utf-8")) for page in pages}
    mistakes = []
    for page, found in parsed.items():
        for address in [*found.links, *found.loads]:
            if (mistake := _mistake(address, page, parsed, address in found.loads)) is not None:
                mistakes.append(f"{page.relative_to(site)}: {address}: {mistake}")
    return mistakes


def _bring_files(page: Path, site: Path, root: Path) -> None:
    """Copy into the site what the page links to outside of docs, and link to the copy.

    A copy ends in .txt, so that a browser shows it.
    """

    def to_copy(link: re.Match[str]) -> str:
        source = (root / "docs" / page.relative_to(site).parent / link[1]).resolve()
        if not source.is_file() or root not in source.parents or root / "docs" in source.parents:
            return link[0]
        name = f"{source.relative_to(root)}.txt"
        copy = site / "files" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        up = "../" * len(page.relative_to(site).parent.parts)
        return f'href="{up}files/{name}"'

    text = page.read_text("utf-8")
    page.write_text(re.sub(r'href="?((?:\.\./)+[^"\s>#]+)"?', to_copy, text), "utf-8")


def _mistake(address: str, page: Path, pages: dict[Path, _Page], is_loaded: bool) -> str | None:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return "loaded from elsewhere" if is_loaded and parts.scheme != "data" else None
    there = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
    if not there.is_file():
        return "leads nowhere"
    anchor = unquote(parts.fragment)
    if anchor and there in pages and anchor not in pages[there].anchors:
        return "there is no such anchor"
    return None


def main() -> int:
    """Build, and say what is wrong; 0 where nothing is."""
    try:
        mistakes = build()
    except subprocess.CalledProcessError as error:
        return error.returncode
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    if not mistakes:
        print("the site is build/site/index.html")
    return bool(mistakes)


if __name__ == "__main__":
    sys.exit(main())
