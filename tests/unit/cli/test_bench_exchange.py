"""``gossipdp bench exchange``: its arguments and its figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossipdp.cli import bench_exchange
from gossipdp.cli.bench_exchange import CONTENDERS, ExchangeBenchmark, run
from gossipdp.cli.bench_exchange_worker import Gloo, GlooUpdate, values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"megabytes": 0.5}, "--megabytes is 0.5"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"json": Path("/no/such/directory/results.json")}, r"the directory .* does not exist"),
        ({"json": Path("/")}, "--json / cannot be written"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(replace(ExchangeBenchmark(), **changes))


def test_speed_is_per_direction_over_the_slower_ends_wall_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def timings(num_values: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
        assert (num_values, num_rounds) == (1_000_000, 3)
        return {name: [(0.002, 0.001), (0.001, 0.003), (0.004, 0.002)] for name in CONTENDERS}

    monkeypatch.setattr(bench_exchange, "_timings", timings)
    path = tmp_path / "exchange.json"
    assert run(ExchangeBenchmark(megabytes=4.0, rounds=3, json=path)) == 0
    result = json.loads(path.read_text())
    for name in CONTENDERS:
        assert result[f"{name}_gbps"] == pytest.approx(2.0)
    row = result["rows"][0]
    assert row["gbps"] == pytest.approx([2.0, 4.0, 1.0])
    assert row["median_cpu_ms"] == pytest.approx(2.0)
    assert "whole exchange over shared memory" in capsys.readouterr().out


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
    update = GlooUpdate(0, 1000)
    update.prepare(1)
    with pytest.raises(AssertionError, match="not the mean"):
        update.verify(1)


@pytest.mark.processes
def test_every_way_brings_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "exchange.json"
    assert run(ExchangeBenchmark(megabytes=3.0, rounds=1, json=path)) == 0
    result = json.loads(path.read_text())
    assert all(result[f"{name}_gbps"] > 0 for name in CONTENDERS)
    assert [row["name"] for row in result["rows"]] == list(CONTENDERS)
