"""exchange.py: its arguments and its figures."""

import json
import sys
from pathlib import Path

import exchange
import pytest
import torch
from exchange import CONTENDERS, ExchangeBenchmark, measure
from support.exchange_worker import Gloo, values

from support import report


def test_speed_is_per_direction_over_the_slower_ends_wall_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timings(num_values: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
        assert (num_values, num_rounds) == (1_000_000, 3)
        return {name: [(0.002, 0.001), (0.001, 0.003), (0.004, 0.002)] for name in CONTENDERS}

    monkeypatch.setattr(exchange, "timings", timings)
    result = measure(ExchangeBenchmark(megabytes=4.0, rounds=3))
    for name in CONTENDERS:
        assert result[f"{name}_gbps"] == pytest.approx(2.0)
    row = result["rows"][0]
    assert row["gbps"] == pytest.approx([2.0, 4.0, 1.0])
    assert row["median_cpu_ms"] == pytest.approx(2.0)


def test_what_a_round_did_not_bring_is_found() -> None:
    transfer = Gloo(0, 1000, at_once=False)
    transfer.prepare(1)
    assert torch.equal(transfer.outgoing, values(0, 1, 1000))
    transfer.incoming.copy_(values(1, 1, 1000))
    transfer.verify(1)
    for stale in (values(1, 0, 1000), values(0, 1, 1000)):
        transfer.incoming.copy_(stale)
        with pytest.raises(AssertionError, match="not what was sent"):
            transfer.verify(1)


@pytest.mark.processes
def test_every_way_brings_what_it_should_and_the_figures_go_where_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "exchange.json"
    words = ["exchange.py", "--megabytes", "3", "--rounds", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    committed = (report.RESULTS / "exchange.json").read_bytes()
    exchange.main()
    result = json.loads(path.read_text())
    assert all(result[f"{name}_gbps"] > 0 for name in CONTENDERS)
    assert [row["name"] for row in result["rows"]] == list(CONTENDERS)
    assert result["provenance"]["command"] == f"python benchmarks/{' '.join(words)}"
    assert (report.RESULTS / "exchange.json").read_bytes() == committed
    assert "a TCP link through TLS" in capsys.readouterr().out
