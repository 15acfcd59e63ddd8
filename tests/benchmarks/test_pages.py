"""The race's figures on the pages are those of its results files."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import race_pages
from race_pages import MARKED, PAGES, SUMMARY, rewritten

ROOT = Path(__file__).parents[2]


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())["result"]


RACE = result("race")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_results(path):
    text = path.read_text("utf-8")
    assert len(MARKED.findall(text)) == text.count("<!-- end -->") > 0
    assert rewritten(text) == text


def test_a_table_is_written_again_and_nothing_else():
    page = "Before 1.\n\n<!-- race: race calm -->\n\n| old |\n\n<!-- end -->\n\nAfter 2."
    head, *lines = rewritten(page).split("\n\n")
    assert (head, lines[0], *lines[2:]) == (
        "Before 1.", "<!-- race: race calm -->", "<!-- end -->", "After 2."
    )  # fmt: skip
    first = lines[1].splitlines()[2]
    ours = RACE["calm"]["gossipdp"]
    assert f"{ours['samples'] / 1e3:.0f} (" in first
    assert f"{ours['loss']:.3f} (" in first


def test_an_empty_table_is_written_and_what_follows_it_stays():
    page = (
        "<!-- race: race calm -->\n\n<!-- end -->\n\n## Then\n\n"
        "<!-- race: tuned -->\n\n<!-- end -->\n"
    )
    again = rewritten(page)
    assert again.count("\n\n<!-- end -->\n") == 2
    assert "## Then" in again
    assert rewritten(again) == again


def test_a_table_has_the_columns_of_which_there_are_figures():
    heads = [race_pages.condition("race", name).splitlines()[0] for name in ("calm", "kills10")]
    assert ["of its own calm" in head for head in heads] == [False, True]
    assert ["restart (s)" in head for head in heads] == [False, True]


def test_the_best_is_bold_in_the_readme():
    lines = race_pages.summary().splitlines()[2:]
    cells = {line.split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in lines}
    for number, (name, best) in enumerate((name, best) for name in SUMMARY for best in (max, min)):
        key = "samples" if best is max else "loss"
        row = best(RACE[name], key=lambda row: RACE[name][row][key])
        bold = [each for each, texts in cells.items() if texts[number].startswith("**")]
        assert bold == [f"| {race_pages.short(row)}"]


def words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def sent(row: dict[str, Any]) -> float:
    return median(run["result"]["sent_bytes"] for run in row["runs"])


def times_ddp(*rows: str) -> list[float]:
    """Return the bytes of rows over DDP's, least first, of all conditions of the README."""
    found = (RACE[name] for name in SUMMARY)
    return sorted(sent(each[row]) / sent(each["ddp"]) for each in found for row in rows)


def test_the_bytes_are_those_of_the_results():
    least, *_, most = times_ddp("gossipdp")
    *_, others = times_ddp("local_sgd_torchft@16", "diloco_torchft@16")
    assert (
        f"gossipdp sent {least:.1f} to {most:.1f} times DDP's bytes, torchft's LocalSGD and DiLoCo "
        f"at most {others:.2f} times."
    ) in words_of("README.md")


def test_the_advice_has_the_figures_of_the_results():
    """Run by run, as in the tables, over torchft's mode that comes nearest."""
    over = [
        min(found["samples_ratio"] for row, found in RACE[name].items() if "torchft" in row)
        for name in ("moving", "kills10", "kills10_moving")
    ]
    assert (
        f"it kept {over[0]:.1f} times the samples of torchft's best mode where the slow machine "
        f"changes, {over[1]:.2f} times where one dies every 10 s, {over[2]:.1f} times with both."
    ) in words_of("docs/comparison.md")


def test_the_picture_is_that_of_the_results():
    shown, written = ROOT / "docs/figures/race.png", ROOT / "benchmarks/results/race.png"
    assert shown.read_bytes() == written.read_bytes()
