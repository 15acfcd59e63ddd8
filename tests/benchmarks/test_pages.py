"""The figures on the pages are those of the results files.

pages.py writes the tables between marks; page_phrases.py has the figures beside them.
"""

import re

import pages
import pytest
from page_phrases import PHRASES, RACE, UNMEASURED
from pages import MARKED, PAGES, ROOT, SUMMARY, TABLES, rewritten


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_results(path):
    text = path.read_text("utf-8")
    assert len(MARKED.findall(text)) == text.count("<!-- end -->")
    assert rewritten(text) == text


def test_every_table_is_on_a_page():
    shown = {name for path in PAGES for name, _ in MARKED.findall(path.read_text("utf-8"))}
    assert set(TABLES) <= shown


def test_a_table_is_written_again_and_nothing_else():
    page = "Before 1.\n\n<!-- table: race calm -->\n\n| old |\n\n<!-- end -->\n\nAfter 2."
    head, *lines = rewritten(page).split("\n\n")
    assert (head, lines[0], *lines[2:]) == (
        "Before 1.", "<!-- table: race calm -->", "<!-- end -->", "After 2."
    )  # fmt: skip
    first = lines[1].splitlines()[2]
    ours = RACE["calm"]["gossipdp"]
    assert f"{ours['samples'] / 1e3:.0f} (" in first
    assert f"{ours['loss']:.3f} (" in first


def test_an_empty_table_is_written_and_what_follows_it_stays():
    page = (
        "<!-- table: race calm -->\n\n<!-- end -->\n\n## Then\n\n"
        "<!-- table: tuned -->\n\n<!-- end -->\n"
    )
    again = rewritten(page)
    assert again.count("\n\n<!-- end -->\n") == 2
    assert "## Then" in again
    assert rewritten(again) == again


def test_a_table_has_the_columns_of_which_there_are_figures():
    heads = [pages.condition("race", name).splitlines()[0] for name in ("calm", "kills10")]
    assert ["of its own calm" in head for head in heads] == [False, True]
    assert ["restart (s)" in head for head in heads] == [False, True]


def test_the_best_is_bold_in_the_readme():
    lines = pages.summary().splitlines()[2:]
    cells = {line.split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in lines}
    for number, (name, best) in enumerate((name, best) for name in SUMMARY for best in (max, min)):
        key = "samples" if best is max else "loss"
        row = best(RACE[name], key=lambda row: RACE[name][row][key])
        bold = [each for each, texts in cells.items() if texts[number].startswith("**")]
        assert bold == [f"| {pages.short(row)}"]


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
