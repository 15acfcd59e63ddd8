"""The race's figures on the pages are those of its results file."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.conditions import RACE_CONDITIONS

ROOT = Path(__file__).parents[2]


def result(name: str) -> dict[str, Any]:
    """Return the result of a report of the race."""
    path = ROOT / "benchmarks/results" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text())["result"]
    return found


RACE, MORE = result("race"), result("race_more")
NAMES = {
    "gossipdp": "gossipdp",
    "ddp": "DDP",
    "ddp_torchft": "torchft DDP",
    "local_sgd_torchft@16": "torchft LocalSGD",
    "diloco_torchft@16": "torchft DiLoCo",
}
ROWS = tuple(NAMES)
TEXTS = {
    "calm": "nothing happens",
    "moving": "every 10 s another worker is 4 times slower",
    "kills10": "every 10 s a worker is killed",
    "kills10_moving": "both",
}


MORE_TEXTS = {
    "slow": "one worker 4 times slower",
    "jitter": "step times vary (lognormal, 0.3)",
    "stops": "five stops of 2 to 8 s",
    "kills30": "a kill every 30 s",
    "kills120": "a kill every 120 s, 300 s of training",
    "vanish": "a host vanishes every 30 s",
    "bad_link": "one at 100 Mbit/s, others at 1 Gbit/s",
}


def figures(found: dict[str, Any], row: str, digits: int) -> list[str]:
    """Return thousands of samples kept and final loss, bold where they are the best of all rows."""
    best = {"samples": max, "loss": min}
    texts = (f"{found[row]['samples'] / 1e3:,.0f}", f"{found[row]['loss']:.{digits}f}")
    return [
        f"**{text}**"
        if found[row][key] == best[key](each[key] for each in found.values())
        else text
        for key, text in zip(best, texts, strict=True)
    ]


def lines(found: dict[str, Any], text: str, digits: int) -> list[str]:
    """Return a condition's lines by row: thousands of samples kept, and final loss."""
    cells = [figures(found, row, digits) if row in found else ("", "") for row in ROWS]
    return [f"| {text} | {' | '.join(each)} |" for each in zip(*cells, strict=True)]


def details(condition: str) -> str:
    """Return a line of the page: share of the calm, seconds lost a fault, bytes."""
    cells = []
    for row in ROWS:
        found = RACE[condition][row]
        lost = f"{found['lost_s']:.1f}" if found["lost_s"] is not None else "–"
        cells.append(f"{found['share_of_calm']:.0%}, {lost}, {found['bytes']:.1f}")
    return f"| {TEXTS[condition]} | {' | '.join(cells)} |"


def test_the_readme_s_table_is_that_of_the_results():
    text = (ROOT / "README.md").read_text()
    for row in ROWS:
        cells = [cell for condition in TEXTS for cell in figures(RACE[condition], row, 2)]
        assert f"| {NAMES[row]} | {' | '.join(cells)} |" in text


@pytest.mark.parametrize("condition", TEXTS)
def test_the_race_page_s_tables_are_those_of_the_results(condition):
    assert condition in RACE_CONDITIONS
    text = (ROOT / "docs/race.md").read_text()
    assert all(line in text for line in lines(RACE[condition], TEXTS[condition], 3))
    assert details(condition) in text


def listed(texts: list[str]) -> str:
    """Return texts as a sentence lists them."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def kept(found: dict[str, Any], condition: str, *rows: str) -> str:
    """Return thousands of samples of these rows under a condition, as a sentence has them."""
    return listed([f"{found[condition][row]['samples'] / 1e3:.0f}" for row in rows])


def test_the_race_page_s_sentences_are_those_of_the_results():
    text = " ".join((ROOT / "docs/race.md").read_text().split())
    own, spares, both = result("race_own"), result("race_spares"), ("local_sgd@16", "diloco@16")
    most = max(own[name][row]["samples"] for name in own if name != "calm" for row in both)
    assert (
        f"kept {kept(own, 'calm', *both)} thousand in the calm, at most {most / 1e3:.0f} with "
        f"faults; Decent-DP {kept(own, 'calm', 'decent_dp')}, and "
        f"{kept(own, 'moving', 'decent_dp')} where the slow worker changes (one run"
    ) in text
    torchft = ROWS[2:]
    for name in spares:
        head = f"| {TEXTS[name]}, torchft with spares (one run) | | |"
        samples = [f"{spares[name][row]['samples'] / 1e3:,.0f}" for row in torchft]
        losses = [f"{spares[name][row]['loss']:.3f}" for row in torchft]
        assert all(f"{head} {' | '.join(cells)} |" in text for cells in (samples, losses))
    readme = " ".join((ROOT / "README.md").read_text().split())
    with_spare = [kept(spares, name, "local_sgd_torchft@16") for name in spares]
    assert f"With the same spare, torchft's LocalSGD keeps {' and '.join(with_spare)}" in readme
    assert rarer_deaths() in text
    assert coarser_and_finer() in text
    assert eight_workers() in text


def rarer_deaths() -> str:
    """Return the sentence on kill periods."""
    shares = [
        listed([f"{RACE[f'kills{s}'][row]['share_of_calm']:.0%}" for s in (10, 30, 120)])
        for row in ("gossipdp", "local_sgd_torchft@16", "ddp")
    ]
    return (
        f"gossipdp keeps {shares[0]} of its calm, torchft's LocalSGD {shares[1]}, DDP {shares[2]}."
    )


def coarser_and_finer() -> str:
    """Return the sentence on averages of every 4 steps."""
    rows = ("local_sgd_torchft@4", "diloco_torchft@4")
    own = result("race_own")
    losses = listed([f"{own['calm'][row]['loss']:.3f}" for row in rows])
    return (
        f"and DiLoCo kept {kept(own, 'calm', *rows)} thousand samples in the calm, with "
        f"losses of {losses} (one run)"
    )


def eight_workers() -> str:
    """Return the sentence on eight workers."""
    eight = result("race_8")
    samples = [
        listed([f"{eight[name][row]['samples'] / 1e3:.0f}" for name in TEXTS])
        for row in ("gossipdp", "local_sgd_torchft@16", "ddp")
    ]
    return (
        f"gossipdp kept {samples[0]} thousand samples, torchft's LocalSGD {samples[1]}, DDP "
        f"{samples[2]}."
    )


def sent(row: dict[str, Any]) -> float:
    """Return the bytes that a row sent in a run."""
    return median(run["result"]["sent_bytes"] for run in row["runs"])


def times_ddp(
    results: dict[str, Any], figure: Callable[[dict[str, Any]], float], *rows: str
) -> tuple[float, float]:
    """Return a figure of rows over that of DDP, least and most of all conditions."""
    times = [
        figure(found[row]) / figure(found["ddp"])
        for found in results.values()
        for row in rows
        if row in found
    ]
    return min(times), max(times)


def headline_bytes() -> str:
    """Return the README's sentence on bytes."""
    shown = {name: RACE[name] for name in TEXTS}
    least, most = times_ddp(shown, sent, "gossipdp")
    least_kept, most_kept = times_ddp(shown, lambda row: float(row["bytes"]), "gossipdp")
    _, others = times_ddp(shown, sent, *ROWS[3:])
    return (
        f"gossipdp sent {least:.1f} to {most:.1f} times DDP's bytes in all ({least_kept:.1f} to "
        f"{most_kept:.1f} for each sample kept), LocalSGD and DiLoCo at most {others:.2f} times."
    )


def test_the_bytes_are_those_of_the_results():
    text = " ".join((ROOT / "docs/race.md").read_text().split())
    least, most = times_ddp(MORE, sent, "gossipdp")
    assert f"gossipdp sent {least:.1f} to {most:.1f} times DDP's bytes in all." in text
    of_hooks = kept(MORE, "bad_link", "ddp_bf16", "ddp_powersgd")
    assert f"bfloat16 and PowerSGD, kept {of_hooks} thousand." in text
    assert headline_bytes() in " ".join((ROOT / "README.md").read_text().split())


def test_the_defaults_table_is_that_of_the_results():
    found, text = result("race_defaults"), (ROOT / "docs/race.md").read_text()
    for row, name in (("gossipdp", "gossipdp"), ("ddp", "DDP"), ("ddp_bf16", "DDP, bf16 hook")):
        cells = [
            f"{each['samples'] / 1e3:.0f} | {each['loss']:.3f} | {each['bytes']:.1f}"
            for each in (found[condition][row] for condition in ("calm", "bad_link"))
        ]
        assert f"| {name} | {' | '.join(cells)} |" in text
    calm, readme = found["calm"], " ".join((ROOT / "README.md").read_text().split())
    shares = [sent(calm["gossipdp"]) / sent(calm[rival]) for rival in ("ddp", "ddp_bf16")]
    over = calm["gossipdp"]["loss"] / calm["ddp"]["loss"] - 1
    assert (
        f"it sent {shares[0]:.2f} times DDP's in the calm, {shares[1]:.2f} times those of DDP's "
        f"bf16 hook, and its loss ended {over:.1%} above DDP's"
    ) in readme


@pytest.mark.parametrize("condition", MORE_TEXTS)
def test_the_race_page_s_other_tables_are_that_of_the_results(condition):
    assert condition in RACE_CONDITIONS
    shown = lines(RACE.get(condition) or MORE[condition], MORE_TEXTS[condition], 3)
    text = (ROOT / "docs/race.md").read_text()
    assert all(line in text for line in shown)


def test_the_picture_is_that_of_the_results():
    shown, written = (ROOT / "docs/figures/race.png", ROOT / "benchmarks/results/race.png")
    assert shown.read_bytes() == written.read_bytes()
