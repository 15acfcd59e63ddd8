"""exchange.py, in little."""

import json
import sys
from pathlib import Path

import exchange
import pytest


@pytest.mark.processes
def test_a_quick_run_measures_exchanges_and_writes_to_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["exchange.py", "--quick"])
    monkeypatch.chdir(tmp_path)
    exchange.main()
    stored = json.loads(Path("runs/benchmarks/exchange.json").read_text())
    rows = stored["result"]["rows"]
    assert all(row["number"] > 0 and row["wall_ms"] > 0 for row in rows)
    assert {(row["link"], row["wire_format"]) for row in rows} == {
        ("TLS", "full"),
        ("TLS", "lattice8"),
    }
    assert stored["provenance"]["command"] == "python benchmarks/exchange.py --quick"
    assert "50,000" in capsys.readouterr().out
