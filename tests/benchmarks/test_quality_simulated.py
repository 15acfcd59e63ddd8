"""The simulated benchmark of quality: its search, its memory of runs."""

import math
import re
from pathlib import Path

import pytest
import quality_simulated
from quality_simulated import ROWS, Runs, Setting, paired_difference, result_of, tables
from support.coded_rows import coded_exchanges
from support.finished_runs import MOST_WIDENINGS

from gossipdp_lab.simulate import simulate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("best", [-5, 0, 4])
def test_the_search_ends_where_the_loss_rises_both_ways(best):
    asked: list[float] = []

    def loss_at(rate: float) -> float:
        asked.append(rate)
        exponent = math.log2(rate / 0.01)
        return math.inf if exponent > 4.5 else abs(exponent - best)

    assert quality_simulated.tune(loss_at, 0.01) == pytest.approx(0.01 * 2.0**best)
    assert asked[:2] == [0.01, 0.02], "upwards first: the best rates of gossip are high"
    assert len(set(asked)) == len(asked) <= 1 + MOST_WIDENINGS


def test_coded_exchanges_agree_as_exact_ones_do_and_keep_the_mean():
    row, setting = ROWS["gossipdp, 1 exchange a step"], Setting("common", 4, 60)
    plain = simulate(row.scenario(0.03, 0, setting), row.method)
    with coded_exchanges():
        coded = simulate(row.scenario(0.03, 0, setting), row.method)
    assert plain.digest() == simulate(row.scenario(0.03, 0, setting), row.method).digest()
    middle, last = ([each.records[place] for each in (coded, plain)] for place in (5, 10))
    assert last[0].loss != last[1].loss
    assert last[0].loss == pytest.approx(last[1].loss, rel=0.01)
    ratio = middle[0].consensus_distance / middle[1].consensus_distance
    assert ratio == pytest.approx(1.0, abs=0.1)
    assert coded.column("drift").max() < 1e-4


@pytest.mark.parametrize(
    ("theirs", "expected"), [([2.0, 2.0], "+1.00% ± 0.00% (2 seeds)"), ([2.0], "too few seeds")]
)
def test_paired_differences_are_over_seeds_that_both_have(theirs, expected):
    ours = [run_of(0.1, seed, 2.02) for seed in range(2)]
    others = [run_of(0.1, seed, loss) for seed, loss in enumerate(theirs)]
    assert paired_difference(ours, [*others, run_of(0.2, 0, 9.0)]) == expected


Figures = dict[str, object]
ALIKE: Figures = {"data": "common", "workers": 2, "steps": 10, "gradient_steps": 15}


def run_of(rate: float, seed: int, loss: float | None, row: str = "gossip, H = 8") -> Figures:
    own = {"row": row, "learning_rate": rate, "seed": seed, "loss": loss, "models_per_step": 1.0}
    return ALIKE | own


def test_runs_are_kept_and_compared_over_the_seeds_that_both_rows_have(tmp_path):
    path = tmp_path / "runs.jsonl"
    setting = Setting("common", 2, 10)
    first = Runs(path).find_row("gossip, H = 8", setting, 0.01, 0)
    # A worker of an asynchronous row is caught in the middle of its first step.
    assert first["gradient_steps"] == pytest.approx(2 * 10, abs=2)
    assert Runs(path).find_row("gossip, H = 8", setting, 0.01, 0) == first
    assert len(path.read_text().splitlines()) == 1

    runs = Runs(tmp_path / "others.jsonl")
    for run in (
        run_of(0.1, 0, 2.0),
        run_of(0.2, 0, None),
        run_of(0.05, 0, 2.5),
        run_of(0.1, 1, 4.0),
        run_of(0.3, 0, 1.6, "all-reduce"),
    ):
        runs.known[runs.key(run)] = run
    assert [run["seed"] for run in result_of(runs, "gossip, H = 8", setting)] == [0, 1]
    (table,) = tables(runs, setting)
    # The one seed that both have: 2.0 against 1.6.
    assert list(table.rows[1][:5]) == ["gossip, H = 8", "3.000", "+25.0%", "1.414", "2"]
    assert table.rows[1][-1] == "1.000"


def shown_in_the_notes() -> dict[Setting, list[tuple[str, ...]]]:
    """Return the rows of the tables, by the setting that stands above each table."""
    parts = re.findall(
        r"^(Common|Disjoint) data, (\d+) workers, ([\d,]+) steps.*:\n\n((?:\|.*\n)+)",
        (ROOT / "benchmarks/NOTES.md").read_text(),
        re.M,
    )
    shown: dict[Setting, list[tuple[str, ...]]] = {}
    for data, workers, steps, table in parts:
        setting = Setting(data.lower(), int(workers), int(steps.replace(",", "")))
        lines = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()[2:]]
        shown.setdefault(setting, []).extend(map(tuple, lines))
    return shown


def test_the_notes_show_the_measured_figures():
    runs = Runs(ROOT / "benchmarks/results/quality_simulated.jsonl")
    notes = shown_in_the_notes()
    assert sorted(notes, key=str) == sorted(runs.settings(), key=str)
    for setting, lines in notes.items():
        measured = [
            (name, f"{mean} ± {spread}" if spread else mean, above, *rest)
            for name, mean, above, spread, *rest in tables(runs, setting)[0].rows
        ]
        assert sorted(lines) == sorted(measured)
