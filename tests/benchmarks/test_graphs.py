"""The benchmark of graphs: its memory of runs, its tables, and one run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from graphs import CONDITIONS, Run, Runs, cases, tables

RUN = Run("common data", "ring", "a2cid2", 4, 3, 0.064, 0)


def outcome(run: Run, loss: float) -> dict[str, Any]:
    return asdict(run) | {
        "loss": loss,
        "consensus_distance": 1.5,
        "comm_rate": 0.97,
        "messages_per_exchange": 2.0,
        "wall_s": 0.0,
    }


def test_a_run_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    made: list[Run] = []

    def make(run: Run) -> dict[str, Any]:
        made.append(run)
        return outcome(run, 3.0)

    path = tmp_path / "runs" / "graphs.jsonl"
    assert Runs(path, make).find(RUN)["loss"] == 3.0
    assert Runs(path, make).find(RUN) == json.loads(path.read_text())
    assert made == [RUN]


def test_losses_are_compared_with_those_of_the_same_seeds() -> None:
    losses = {("ring", 0): 2.0, ("ring", 1): 3.03, ("complete", 1): 3.0, ("complete", 2): 9.0}
    runs = [
        outcome(
            Run("common data", graph, "a2cid2" if graph == "ring" else "gossip", 8, 3, 0.1, seed),
            loss,
        )
        for (graph, seed), loss in losses.items()
    ]
    (table,) = tables(runs)
    assert table.title == "8 workers, common data, 3 steps, learning rate 0.1"
    ring, complete = table.rows
    assert ring[:5] == ("ring, a2cid2", "2.515", "+1.00%", "+1.00 to +1.00", "2")
    assert complete[:5] == ("complete, gossip", "6.000", "+0.00%", "+0.00 to +0.00", "2")


def test_rows_that_are_not_there_are_refused() -> None:
    assert cases(8, "complete gossip,ring a2cid2") == [("ring", "a2cid2"), ("complete", "gossip")]
    with pytest.raises(ValueError, match="there is no row"):
        cases(8, "ring gosip")


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_runs(condition: str) -> None:
    found = Run(condition, "complete", "gossip", 4, 8, 0.064, 0).make()
    assert 4 < found["loss"] < 9
    assert found["gradient_steps"] == 4 * 8
