"""The benchmark of graphs: its memory of runs, its tables, and one run."""

import json
from pathlib import Path

from graphs import LEARNING_RATE, find, kept, tables


def test_a_run_that_has_ended_is_not_run_again(tmp_path, monkeypatch):
    path = tmp_path / "runs" / "graphs.jsonl"
    found = find(kept(path), 4, 8, ("complete", "gossip"), 0)
    assert 4 < found["loss"] < 9
    assert found["gradient_steps"] == 4 * 8
    monkeypatch.setattr("support.finished_runs.simulate", None)
    assert find(kept(path), 4, 8, ("complete", "gossip"), 0) == json.loads(path.read_text())


def test_losses_are_compared_with_those_of_the_same_seeds():
    losses = {("ring", 0): 2.0, ("ring", 1): 3.03, ("complete", 1): 3.0, ("complete", 2): 9.0}
    runs = kept(Path("none"))
    for (graph, seed), loss in losses.items():
        setting = {"workers": 8, "condition": "common data", "steps": 3, "learning_rate": 0.1}
        row = {"graph": graph, "method": "a2cid2" if graph == "ring" else "gossip", "seed": seed}
        outcome = {"consensus_distance": 1.5, "comm_rate": 0.97, "messages_per_exchange": 2.0}
        run = setting | row | outcome | {"loss": loss}
        runs.known[runs.key(run)] = run
    (table,) = tables(runs)
    assert table.title == "8 workers, common data, 3 steps, learning rate 0.1"
    ring, complete = table.rows
    assert ring[:5] == ("ring, a2cid2", "2.515", "+1.00%", "+1.00 to +1.00", "2")
    assert complete[:5] == ("complete, gossip", "6.000", "+0.00%", "+0.00 to +0.00", "2")


def test_the_committed_tables_are_those_of_the_committed_runs():
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "graphs.json"
    runs = kept(Path("none"))
    runs.known = {runs.key(run): run for run in json.loads(results.read_text())["result"]["runs"]}
    assert LEARNING_RATE in {run["learning_rate"] for run in runs.known.values()}
    page = results.with_suffix(".md").read_text()
    assert all(table.markdown() in page for table in tables(runs))
