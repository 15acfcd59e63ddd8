import json
from collections.abc import Collection
from typing import Any, get_args, get_type_hints

import pytest
from msgspec.structs import replace

from gossipdp.observe.log import CountsRecord, Record, StartRecord
from gossipdp.parallel.options import METHODS
from gossipdp_lab.demo import DEFAULT_SAMPLES, DemoArguments, training
from gossipdp_lab.report.run_log import RunLog, WorkerLog
from gossipdp_lab.tasks import WORKLOADS


def test_the_names_are_those_of_the_library():
    hints = get_type_hints(DemoArguments)
    names, _ = get_args(hints["workload"])
    assert get_args(names) == tuple(WORKLOADS) == tuple(DEFAULT_SAMPLES)
    assert get_args(hints["method"]) == (*METHODS, "allreduce")


def make_log(num_workers: int, *, killed: Collection[int] = (), late: int = -1) -> RunLog:
    workers = {}
    for rank in range(num_workers):
        counts = {"gradient_steps": 100 + rank, "samples": 3200 + 32 * rank}
        last = CountsRecord(4.0 + rank, **counts, exchanges_initiated=50, exchanges_answered=49)
        records: list[Record] = [StartRecord(rank, num_workers, 1, 0.0, {}), last]
        if rank not in killed:
            values = {training.METRIC: 0.97, training.DIGEST: "cd" if rank == late else "ab"}
            left = replace(last, time_s=6.0, state="left", consensus_distance=0.01, logged=values)
            records.append(left)
        workers[rank] = WorkerLog()
        workers[rank].take(records)
    return RunLog(workers)


def test_the_results_are_those_of_all_workers():
    summary = training.summarize({"test_accuracy": 0.98}, make_log(2), {})
    assert (summary["train_seconds"], summary["samples"]) == (5.0, 6432)
    assert summary["workers"][1]["exchanges"] == 99
    assert summary["achieved_comm_rate"] == 2 * 100 / 201
    assert summary["workers"][1]["samples_per_second"] == 3232 / 5
    assert summary["workers"][1]["metric_before_average"] == 0.97
    json.dumps(summary)


def test_those_that_hold_the_average_are_neither_killed_nor_late():
    killed, late = make_log(3, killed=[0]), make_log(3, late=0)
    assert training.averaged_together(killed) == training.averaged_together(late) == [1, 2]
    assert training.average_digests(late).keys() == {0, 1, 2}
    summary = training.summarize({}, killed, {})
    assert summary["workers"][0]["metric_before_average"] is None
    assert summary["workers"][0]["gradient_steps"] == 100
    assert summary["consensus_distance"] == 0.01
    with pytest.raises(ValueError, match="no worker came to the end"):
        training.averaged_together(make_log(3, killed=range(3)))


def test_the_run_outlasts_its_faults_and_what_they_bring_unless_its_samples_are_given():
    def least_s(faults: str | None, **options: Any) -> float:
        return DemoArguments(faults=faults, **options).least_s

    assert least_s(None) == least_s("slow 4x 2") == 0
    assert least_s("slow 4x 2 at 3s for 4s") > 8
    assert least_s("kill 0 at 5s") > 6
    assert least_s("kill 0 at 5s", restart=True) > least_s("kill 0 at 5s")
    assert least_s("kill every 5s") == least_s("kill 0 at 5s")
    assert least_s("kill 0 at 5s; stop 20s 1 at 4s") > 24
    assert least_s("stop 0.5s 1 at 4s") > 10
    assert least_s("kill 0 at 50s", samples=3200) == 0
    assert least_s("kill 0 at 50s", seconds=9.0) == 9.0


def test_a_worker_that_did_not_come_back_is_named():
    fault = {"rank": 2, "kind": "kill", "at_s": 5.04, "detected_s": {}, "rejoined_s": None}
    assert training.not_back([fault]) == ["worker 2, killed at 5.0 s, did not come back"]
    others = {**fault, "rejoined_s": 1.0}, {**fault, "kind": "stop"}, {**fault, "missed": "no"}
    assert training.not_back(others) == []
