"""The race's figures on the pages are those of its results file."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from quality_rows import RowName
from race_conditions import CONDITIONS

ROOT = Path(__file__).parents[2]
RACE: dict[str, Any] = json.loads((ROOT / "benchmarks/results/race.json").read_text())["result"]
ROWS = ("gossipdp", "ddp", "ddp_torchft", "local_sgd_torchft@16", "diloco_torchft@16")
TEXTS = {
    "calm": "nothing happens",
    "moving": "every 10 s another worker is 4 times slower",
    "kills10": "every 10 s a worker is killed",
    "kills10_moving": "both",
}


def headline(condition: str) -> str:
    """Return a line of the README's table: samples kept and final loss, the best ones bold."""
    found = [RACE[condition][row] for row in ROWS]
    most, least = max(row["samples"] for row in found), min(row["loss"] for row in found)
    cells = []
    for row in found:
        samples, loss = f"{row['samples'] / 1e3:,.0f}", f"{row['loss']:.2f}"
        samples = f"**{samples}**" if row["samples"] == most else samples
        cells.append(f"{samples} / {f'**{loss}**' if row['loss'] == least else loss}")
    return f"| {TEXTS[condition]} | {' | '.join(cells)} |"


def details(condition: str, row: str) -> str:
    """Return a line of the performance page: medians, and the least and greatest loss."""
    found = RACE[condition][row]
    losses = [run["result"]["loss"] for run in found["runs"]]
    lost = f"{found['lost_s']:.1f}" if found["lost_s"] is not None else "–"
    cells = [
        RowName.parse(row).label,
        f"{found['samples']:,.0f}",
        f"{found['share_of_calm']:.0%}",
        f"{found['loss']:.3f} ({min(losses):.3f}–{max(losses):.3f})",
        lost,
        f"{found['bytes']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def test_the_readme_s_table_is_that_of_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    for condition in TEXTS:
        assert condition in CONDITIONS
        assert headline(condition) in text


@pytest.mark.parametrize("condition", TEXTS)
def test_the_performance_page_s_table_is_that_of_the_results(condition: str) -> None:
    text = (ROOT / "docs/performance.md").read_text()
    for row in RACE[condition]:
        assert details(condition, row) in text


def test_the_performance_page_s_sentences_are_those_of_the_results() -> None:
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in (ROOT / "benchmarks/results/race_present.jsonl").read_text().splitlines():
        run = json.loads(line)
        runs.setdefault(run["settings"]["condition"], []).append(run["result"])
    samples, losses = (
        [statistics.median(run[name] for run in runs[condition]) for condition in TEXTS]
        for name in ("samples", "loss")
    )
    kept = [f"{number / 1e3:.0f}" for number in samples]
    shown = ", ".join(f"{loss:.3f}" for loss in losses)
    assert f"kept {', '.join(kept[:-1])} and {kept[-1]} thousand samples ({shown})" in text
    path = ROOT / "benchmarks/results/race_stops_vanish.json"
    later = json.loads(path.read_text())["result"]
    for condition in ("stops", "vanish"):
        rows = [later[condition][row] for row in ("gossipdp", "ddp", "ddp_torchft")]
        first, second, third = (f"{row['samples'] / 1e3:.0f}" for row in rows)
        assert f" {first}, {second} and {third} " in text
        assert ", ".join(f"{row['loss']:.3f}" for row in rows) in text


def test_the_picture_is_that_of_the_results() -> None:
    shown, written = (ROOT / "docs/figures/race.png", ROOT / "benchmarks/results/race.png")
    assert shown.read_bytes() == written.read_bytes()
