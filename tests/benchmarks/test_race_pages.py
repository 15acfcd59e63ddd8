"""The race's figures on the pages are those of its results files."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import race_pages
from race_pages import MARKED, PAGES, REST, SUMMARY, rewritten
from support.conditions import RACE_CONDITIONS

ROOT = Path(__file__).parents[2]


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())["result"]


RACE, MORE = result("race"), result("race_more")


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
    page = "<!-- race: race calm -->\n\n<!-- end -->\n\n## Then\n\n<!-- race: tuned -->\n\n<!-- end -->\n"
    again = rewritten(page)
    assert again.count("\n\n<!-- end -->\n") == 2
    assert "## Then" in again
    assert rewritten(again) == again


def test_a_table_has_the_columns_of_which_there_are_figures():
    heads = [race_pages.condition("race", name).splitlines()[0] for name in ("calm", "kills10")]
    assert ["of its own calm" in head for head in heads] == [False, True]
    assert ["s lost a fault" in head for head in heads] == [False, True]
    assert "gossipdp's over" not in race_pages.condition("race_spares", "kills10")


def test_conditions_exist():
    assert {*SUMMARY, *(name for _, name in REST)} <= RACE_CONDITIONS.keys()


def test_the_best_is_bold_in_the_readme():
    lines = race_pages.summary().splitlines()[2:]
    cells = {line.split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in lines}
    for number, (name, best) in enumerate((name, best) for name in SUMMARY for best in (max, min)):
        key = "samples" if best is max else "loss"
        row = best(RACE[name], key=lambda row: RACE[name][row][key])
        bold = [each for each, texts in cells.items() if texts[number].startswith("**")]
        assert bold == [f"| {race_pages.short(row)}"]


def listed(texts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def kept(found: dict[str, Any], condition: str, *rows: str) -> str:
    """Return thousands of samples of these rows under a condition, as a sentence has them."""
    return listed([f"{found[condition][row]['samples'] / 1e3:.0f}" for row in rows])


def words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def test_the_race_page_s_sentences_are_those_of_the_results():
    text = words_of("docs/race.md")
    own, spares, both = result("race_own"), result("race_spares"), ("local_sgd@16", "diloco@16")
    most = max(own[name][row]["samples"] for name in own if name != "calm" for row in both)
    assert (
        f"kept {kept(own, 'calm', *both)} thousand in the calm, at most {most / 1e3:.0f} with "
        f"faults; Decent-DP {kept(own, 'calm', 'decent_dp')}, and "
        f"{kept(own, 'moving', 'decent_dp')} where the slow worker changes (one run"
    ) in text
    with_spare = " and ".join(kept(spares, name, "local_sgd_torchft@16") for name in spares)
    said = f"With the same spare, torchft's LocalSGD keeps {with_spare}"
    assert said in words_of("README.md")
    rows = ("local_sgd_torchft@4", "diloco_torchft@4")
    losses = listed([f"{own['calm'][row]['loss']:.3f}" for row in rows])
    assert (
        f"and DiLoCo kept {kept(own, 'calm', *rows)} thousand samples in the calm, with "
        f"losses of {losses} (one run)"
    ) in text


def test_the_race_page_s_sentences_on_rarer_deaths_and_on_eight_workers_are_those_of_the_results():
    text, rows = words_of("docs/race.md"), ("gossipdp", "local_sgd_torchft@16", "ddp")
    kills = [[RACE[f"kills{s}"][row]["share_of_calm"] for s in (10, 30, 120)] for row in rows]
    ours, local_sgd, ddp = (listed([f"{share:.0%}" for share in each]) for each in kills)
    assert f"gossipdp keeps {ours} of its calm, torchft's LocalSGD {local_sgd}, DDP {ddp}." in text
    eight = result("race_8")
    ours, local_sgd, ddp = (listed([kept(eight, name, row) for name in SUMMARY]) for row in rows)
    said = f"gossipdp kept {ours} thousand samples, torchft's LocalSGD {local_sgd}, DDP {ddp}."
    assert said in text


def sent(row: dict[str, Any]) -> float:
    return median(run["result"]["sent_bytes"] for run in row["runs"])


def times_ddp(
    results: dict[str, Any], figure: Callable[[dict[str, Any]], float], *rows: str
) -> tuple[float, float]:
    """Return a figure of rows over that of DDP, least and most of all conditions."""
    times = [
        figure(found[row]) / figure(found["ddp"])
        for found in results.values()
        for row in found.keys() & set(rows)
    ]
    return min(times), max(times)


def test_the_bytes_are_those_of_the_results():
    text, shown = words_of("docs/race.md"), {name: RACE[name] for name in SUMMARY}
    least, most = times_ddp(MORE, sent, "gossipdp")
    assert f"gossipdp sent {least:.1f} to {most:.1f} times DDP's bytes in all." in text
    of_hooks = kept(MORE, "bad_link", "ddp_bf16", "ddp_powersgd")
    assert f"bfloat16 and PowerSGD, kept {of_hooks} thousand." in text
    least, most = times_ddp(shown, sent, "gossipdp")
    least_kept, most_kept = times_ddp(shown, lambda row: float(row["bytes"]), "gossipdp")
    _, others = times_ddp(shown, sent, "local_sgd_torchft@16", "diloco_torchft@16")
    assert (
        f"gossipdp sent {least:.1f} to {most:.1f} times DDP's bytes in all ({least_kept:.1f} to "
        f"{most_kept:.1f} for each sample kept), LocalSGD and DiLoCo at most {others:.2f} times."
    ) in words_of("README.md")


def test_the_readme_s_sentence_on_today_s_defaults_is_that_of_the_results():
    calm = result("race_defaults")["calm"]
    shares = [sent(calm["gossipdp"]) / sent(calm[rival]) for rival in ("ddp", "ddp_bf16")]
    over = calm["gossipdp"]["loss"] / calm["ddp"]["loss"] - 1
    assert (
        f"it sent {shares[0]:.2f} times DDP's in the calm, {shares[1]:.2f} times those of DDP's "
        f"bf16 hook, and its loss ended {over:.1%} above DDP's"
    ) in words_of("README.md")


def test_the_picture_is_that_of_the_results():
    shown, written = ROOT / "docs/figures/race.png", ROOT / "benchmarks/results/race.png"
    assert shown.read_bytes() == written.read_bytes()
