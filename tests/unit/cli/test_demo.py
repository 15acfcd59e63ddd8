import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from gossipdp.cli.demo import (
    DemoArguments,
    MethodName,
    WorkloadName,
    parse_slow_worker,
    prepare,
    run,
    summarize,
)
from gossipdp.cli.demo_worker import DemoTask, WorkerResult
from gossipdp.parallel.options import METHODS
from gossipdp.workloads import WORKLOADS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "mnist"}, "no workload 'mnist'; choose one of digits, pystdlib"),
        ({"method": "magic"}, "no method 'magic'; choose one of a2cid2, gossip, allreduce, none"),
        ({"graph": "circle"}, "circle"),
        ({"graph": "hypercube", "workers": 6}, "hypercube"),
        ({"workers": 0}, "--workers is 0"),
        ({"comm_rate": 0.0}, r"--comm-rate is 0\.0"),
        ({"comm_rate": float("nan")}, "--comm-rate is nan"),
        ({"samples": 0}, "--samples is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"slow_worker": "2"}, "write RANK:FACTOR, such as 2:4"),
        ({"slow_worker": "4:2"}, "no rank 4 among 4 workers; choose 0 to 3"),
        ({"slow_worker": "1:0.5"}, "factor must be at least 1"),
        ({"json": Path("/no/such/directory/results.json")}, r"the directory .* does not exist"),
        ({"workers": 64, "disjoint": True}, "less than one batch of 32"),
    ],
)
def test_bad_input_is_refused_before_any_process_starts(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("gossipdp.runtime.launcher.launch", fail)
    with pytest.raises(ValueError, match=message):
        run(replace(DemoArguments(), **changes))


def test_the_task_follows_from_the_arguments(tmp_path: Path) -> None:
    workload, task = prepare(DemoArguments(slow_worker="2:4", output=tmp_path, samples=64))
    assert workload.name == task.workload == "digits"
    assert task.slow_worker == (2, 4.0)
    assert task.samples == 64
    assert task.directory == tmp_path
    assert task.configuration["batch_size"] == workload.batch_size
    assert prepare(DemoArguments())[1].samples == workload.default_budget_samples


def test_the_names_are_those_of_the_library() -> None:
    assert get_args(WorkloadName) == tuple(WORKLOADS)
    assert get_args(MethodName) == METHODS


def test_each_configuration_has_its_own_directory() -> None:
    first = prepare(DemoArguments())[1].directory
    other = prepare(DemoArguments(method="gossip"))[1].directory
    assert first.parent == other.parent == Path.cwd() / "runs"
    assert first != other


@pytest.mark.parametrize(
    ("text", "expected"), [(None, None), ("2:4", (2, 4.0)), ("0:1.5", (0, 1.5)), ("3:1", (3, 1.0))]
)
def test_slow_worker(text: str | None, expected: tuple[int, float] | None) -> None:
    assert parse_slow_worker(text, num_workers=4) == expected


@pytest.mark.parametrize("text", ["", "2:", ":4", "-1:4", "a:4", "2:-4", "2:nan", "2:4:6"])
def test_slow_worker_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="write RANK:FACTOR"):
        parse_slow_worker(text, num_workers=4)


def make_results(task: DemoTask) -> list[WorkerResult]:
    return [
        WorkerResult(
            rank=rank,
            metric_before_average=0.97,
            metric_of_average=0.98 if rank == 0 else None,
            gradient_steps=100 + rank,
            samples=3200 + 32 * rank,
            train_seconds=4.0 + rank,
            exchanges_initiated=50,
            exchanges_answered=49,
            waited_seconds=0.0,
            consensus_distance=0.01,
        )
        for rank in range(task.configuration["workers"])
    ]


def test_the_results_have_the_documented_keys() -> None:
    workload, task = prepare(DemoArguments(workers=2))
    summary = summarize(workload, task, make_results(task))
    assert set(summary) == {
        "test_accuracy",
        "train_seconds",
        "samples",
        "achieved_comm_rate",
        "consensus_distance",
        "workers",
        "configuration",
    }
    assert [set(worker) for worker in summary["workers"]] == [
        {
            "rank",
            "metric_before_average",
            "gradient_steps",
            "exchanges",
            "waited_seconds",
            "samples_per_second",
        }
    ] * 2
    assert summary["train_seconds"] == 5.0
    assert summary["samples"] == 6432
    assert summary["achieved_comm_rate"] == 2 * 100 / 201
    assert summary["workers"][1]["samples_per_second"] == 3232 / 5
    json.dumps(summary)


def test_the_results_say_how_a_worker_was_slowed() -> None:
    workload, task = prepare(DemoArguments(workload="pystdlib", slow_worker="2:4"))
    summary = summarize(workload, task, make_results(task))
    assert summary["slow_worker"] == {"rank": 2, "factor": 4.0, "by": "waiting"}
    assert "validation_bits_per_byte" in summary


def test_the_arguments_are_read_without_importing_torch() -> None:
    code = "import sys, gossipdp.cli.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
