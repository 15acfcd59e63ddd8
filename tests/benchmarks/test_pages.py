"""The figures on the pages are those of the results files.

pages.py writes the tables between marks; page_phrases.py has the figures beside them.
"""

import re

import pytest
from page_phrases import PHRASES, UNMEASURED
from pages import MARKED, PAGES, ROOT, TABLES, condition, rewritten, tuned


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_results(path):
    text = path.read_text("utf-8")
    assert len(MARKED.findall(text)) == text.count("<!-- end -->")
    assert rewritten(text) == text


def test_every_table_is_on_a_page():
    shown = {name for path in PAGES for name, _ in MARKED.findall(path.read_text("utf-8"))}
    assert set(TABLES) <= shown


def test_each_table_is_written_again_and_nothing_else():
    page = (
        "Before 1.\n\n<!-- table: race calm -->\n\n| old |\n\n<!-- end -->\n\n"
        "Between 2.\n\n<!-- table: tuned -->\n\n<!-- end -->\n\nAfter 3."
    )
    assert rewritten(page) == (
        f"Before 1.\n\n<!-- table: race calm -->\n\n{condition('race', 'calm')}\n\n<!-- end -->\n\n"
        f"Between 2.\n\n<!-- table: tuned -->\n\n{tuned()}\n\n<!-- end -->\n\nAfter 3."
    )


def test_the_picture_is_that_of_the_results():
    shown, written = ROOT / "docs/figures/race.png", ROOT / "benchmarks/results/race.png"
    assert shown.read_bytes() == written.read_bytes()


def words_of(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PHRASES)
def test_a_page_says_what_was_measured(page):
    text = words_of((ROOT / page).read_text("utf-8"))
    assert [phrase for phrase in PHRASES[page] if phrase not in text] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_percentage_of_a_page_is_left_out(path):
    """Tables and code apart; reproduce.py writes the whole of its page."""
    text = MARKED.sub("", path.read_text("utf-8"))
    text = words_of(re.sub(r"^```.*?^```|^ {4}.*?$", "", text, flags=re.MULTILINE | re.DOTALL))
    for phrase in (*PHRASES.get(str(path.relative_to(ROOT)), ()), *UNMEASURED):
        text = text.replace(phrase, "")
    assert path.name == "reproduction.md" or re.findall(r".{,40}\d%", text) == []
