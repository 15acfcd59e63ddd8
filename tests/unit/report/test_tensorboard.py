import importlib.util
from pathlib import Path

import pytest

from gossipdp.observe.log import RunLog
from gossipdp.report.tensorboard import tensorboard_is_installed, write_tensorboard


def test_it_says_whether_tensorboard_is_installed(
    run_log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not tensorboard_is_installed()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gossipdp\[tensorboard\]'"):
        write_tensorboard(run_log, tmp_path)


def test_the_scalars_of_each_worker_are_read_back(run_log: RunLog, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_tensorboard(run_log, tmp_path)
    for rank, worker in run_log.workers.items():
        events = accumulator.EventAccumulator(str(tmp_path / f"worker-{rank}")).Reload()
        losses = events.Scalars("train/loss")
        assert [event.step for event in losses] == [step.gradient_steps for step in worker.steps]
        assert losses[-1].value == pytest.approx(worker.steps[-1].loss)
        assert losses[-1].wall_time == pytest.approx(
            worker.start.started_at + worker.steps[-1].time_s
        )
        assert events.Scalars("exchanges/completed")[-1].value == 2 * 5 * 59
        assert len(events.Scalars("exchanges/edge_distance")) == len(worker.steps) - 1
        # By sockets and by shared memory.
        assert events.Scalars("exchanges/megabytes_sent")[-1].value == pytest.approx(
            59 * (1000 + 5000) / 1e6
        )
        assert events.Scalars("exchanges/consensus_distance")[0].value == pytest.approx(0.002)
    pictures = accumulator.EventAccumulator(str(tmp_path / "run")).Reload()
    assert sorted(pictures.Tags()["images"]) == ["run/exchanges", "run/graph"]
    assert pictures.Images("run/graph")[0].width == 550


def test_a_second_call_replaces_the_files_of_the_first(run_log: RunLog, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_tensorboard(run_log, tmp_path)
    write_tensorboard(RunLog({rank: run_log.workers[rank] for rank in range(3)}), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "worker-2")).Reload()
    assert len(events.Scalars("train/loss")) == len(run_log.workers[2].steps)
    assert not list((tmp_path / "worker-3").iterdir())
