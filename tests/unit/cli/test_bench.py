"""``gossipdp bench``: each benchmark is found, with options of its own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from gossipdp.cli import bench_update
from gossipdp.cli.bench import BENCHMARKS
from gossipdp.cli.main import main


def test_every_benchmark_follows_the_convention() -> None:
    for name in BENCHMARKS:
        module = importlib.import_module(f"gossipdp.cli.bench_{name}")
        assert callable(module.run)
        assert getattr(module, f"{name.capitalize()}Benchmark").__doc__


def test_a_benchmark_is_run_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(bench_update, "run", lambda benchmark: seen.append(benchmark) or 0)
    monkeypatch.setenv("GOSSIPDP_LOG", "warning")
    assert main(["bench", "update", "--runs", "3", "--log-level", "warning"]) == 0
    assert seen == [bench_update.UpdateBenchmark(runs=3)]


@pytest.mark.parametrize(
    "words", [["bench"], ["bench", "speed"], ["bench", "update", "--workers", "3"]]
)
def test_a_benchmark_must_be_named_and_has_no_option_of_another(words: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
