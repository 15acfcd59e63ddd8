"""The figures of benchmarks/NOTES.md on the periods of moments are those of the committed runs."""

import re
from pathlib import Path

import pytest
from moment_periods import PERIODS, rows, tables
from quality_simulated import Runs, Setting

ROOT = Path(__file__).parents[2]


def test_a_row_s_moments_travel_every_so_many_gradient_steps() -> None:
    found = rows()
    assert found["gossip, beta_2 0.99, 1 a step, no v"].options["exchange_moments"] == {}
    row = found["gossip, beta_2 0.99, 4 a step, v every 4 steps"]
    assert row.comm_rate == 4
    assert row.options["exchange_moments"] == {"exp_avg_sq": 16}
    assert "0.99" in row.optimizer


def test_rows_are_compared_seed_by_seed_with_all_reduce_of_their_beta(tmp_path: Path) -> None:
    runs, setting = Runs(tmp_path / "none.jsonl"), Setting("common", "mlp", 2, 10)
    losses = {
        "all-reduce, beta_2 0.95": (2.0, 4.0),
        "gossip, beta_2 0.95, 1 a step, v every 1 steps": (2.2, 4.8),
        "gossip, beta_2 0.95, 1 a step, v every 5 steps": (2.5,),
        "gossip, beta_2 0.99, 1 a step, v every 1 steps": (2.2,),  # with nothing beside it
    }
    for name, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            run = {"row": name, "data": "common", "model": "mlp", "workers": 2, "steps": 10}
            run |= {"learning_rate": 0.1, "seed": seed, "loss": loss}
            runs.known[Runs.key(run)] = run
    shown = {line[0]: line[1:] for line in tables(runs, setting)[0].rows}
    assert shown["each step"] == ["+15.0% ± 7.1 (2)", "", ""]
    assert shown["5 steps"] == ["+25.0% (1)", "", ""]


@pytest.mark.parametrize("comm_rate", PERIODS)
def test_the_notes_show_the_measured_figures(comm_rate: int) -> None:
    runs = Runs(ROOT / "benchmarks/results/moment_periods.jsonl")
    (setting,) = runs.settings()
    measured = tables(runs, setting)[list(PERIODS).index(comm_rate)]
    page = (ROOT / "benchmarks/NOTES.md").read_text()
    (shown,) = re.findall(rf"^Comm rate {comm_rate}:\n\n((?:\|.*\n)+)", page, re.M)
    lines = [[each.strip() for each in line.split("|")[1:-1]] for line in shown.splitlines()]
    assert lines[0] == list(measured.head)
    assert lines[2:] == [list(row) for row in measured.rows]
