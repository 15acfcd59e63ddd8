"""exchange.py: its arguments and its figures."""

import json
import sys
from pathlib import Path

import exchange
import pytest
import torch
from exchange import CONTENDERS, Gloo, row_of, values


def test_speed_is_per_direction_over_the_slower_ends_wall_time():
    ends = [
        [(0.001, 0.009), (0.001, 0.003), (0.004, 0.002)],
        [(0.002, 0.001), (0.0005, 0.009), (0.001, 0.009)],
    ]
    row = row_of("tcp", 1_000_000, *ends)
    assert row["gbps"] == pytest.approx([2.0, 4.0, 1.0])
    assert row["median_gbps"] == pytest.approx(2.0)
    assert row["median_cpu_ms"] == pytest.approx(2.0)


def test_what_a_round_did_not_bring_is_found():
    transfer = Gloo(0, 1000)
    transfer.prepare(1)
    assert torch.equal(transfer.outgoing, values(0, 1, 1000))
    transfer.incoming.copy_(values(1, 1, 1000))
    transfer.verify(1)
    for stale in (values(1, 0, 1000), values(0, 1, 1000)):
        transfer.incoming.copy_(stale)
        with pytest.raises(AssertionError, match="not what was sent"):
            transfer.verify(1)


@pytest.mark.processes
def test_every_way_brings_what_it_should_and_a_quick_run_writes_to_runs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["exchange.py", "--quick", "--rounds", "1"])
    monkeypatch.chdir(tmp_path)
    exchange.main()
    stored = json.loads(Path("runs/benchmarks/exchange.json").read_text())
    assert all(row["median_gbps"] > 0 for row in stored["result"]["rows"])
    assert [row["name"] for row in stored["result"]["rows"]] == list(CONTENDERS)
    assert all(row["number"] > 0 for row in stored["result"]["whole"])
    assert stored["provenance"]["command"] == "python benchmarks/exchange.py --quick --rounds 1"
    assert "a TCP link through TLS" in capsys.readouterr().out
