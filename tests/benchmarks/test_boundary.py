"""boundary.py: a boundary that is timed carries an exchange, and the figures."""

import boundary
import pytest
import torch
from boundary import BoundaryBenchmark, Training, measure


@pytest.mark.parametrize("name", ["plain", "outer"])
def test_the_boundary_that_is_timed_carries_an_exchange(name: str):
    training = Training([torch.Size([40, 50]), torch.Size([50])], fused=False)
    worker = getattr(training, name)
    (segment,) = worker.state.segments
    pending = []
    whole_boundary = worker.state.boundary

    def look(theta: float) -> int:
        pending.append(segment.pending.clone())
        before = None if segment.outer is None else segment.outer.base.clone()
        done: int = whole_boundary(theta)
        if before is not None:
            assert not torch.equal(segment.outer.base, before)
        return done

    worker.state.boundary = look
    training.step_with_boundary(worker)
    training.step_with_boundary(worker)
    assert len(pending) == 2
    assert all(values.abs().mean() > 0.1 for values in pending)
    assert not segment.pending.any()
    assert (segment.outer is None) == (name == "plain")


def test_the_figures(monkeypatch: pytest.MonkeyPatch):
    # Alone, plain and outer, in turn: each round begins with the next of them.
    seconds = iter([9.0, 9.0, 9.0, 1.2, 1.5, 1.0, 1.6, 1.1, 1.0, 1.1, 1.3, 1.7])
    monkeypatch.setattr(Training, "step", lambda self: next(seconds))
    monkeypatch.setattr(Training, "step_with_boundary", lambda self, worker: next(seconds))
    monkeypatch.setattr(boundary, "gpt_shapes", lambda width, layers: [torch.Size([100])])
    result = measure(BoundaryBenchmark(rounds=3))
    assert result["step_runs_ms"] == pytest.approx([1000.0, 1100.0, 1100.0])
    assert result["both_runs_ms"] == pytest.approx([1200.0, 1000.0, 1300.0])
    assert result["outer_runs_ms"] == pytest.approx([1500.0, 1600.0, 1700.0])
    assert result["ratio"] == pytest.approx(1.2 / 1.1)
    assert result["outer_ratio"] == pytest.approx(1.6 / 1.1)
    with pytest.raises(ValueError, match="--rounds is 0"):
        measure(BoundaryBenchmark(rounds=0))
