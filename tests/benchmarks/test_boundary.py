"""boundary.py: a boundary that is timed carries an exchange, and the figures."""

import boundary
import pytest
import torch
from boundary import BoundaryBenchmark, Training, measure


def test_the_boundary_that_is_timed_carries_an_exchange():
    training = Training([torch.Size([40, 50]), torch.Size([50])])
    (segment,) = training.state.segments
    pending = []
    whole_boundary = training.state.boundary

    def look(theta: float) -> int:
        pending.append(segment.pending.clone())
        done: int = whole_boundary(theta)
        return done

    training.state.boundary = look
    training.step_with_boundary()
    training.step_with_boundary()
    assert len(pending) == 2
    assert all(values.abs().mean() > 0.1 for values in pending)
    assert not segment.pending.any()


def test_the_figures(monkeypatch: pytest.MonkeyPatch):
    # Alone and with the boundary, in turn: each round begins with the other of them.
    seconds = iter([9.0, 9.0, 1.2, 1.0, 1.1, 1.0, 1.3, 1.1])
    monkeypatch.setattr(Training, "step", lambda self: next(seconds))
    monkeypatch.setattr(Training, "step_with_boundary", lambda self: next(seconds))
    monkeypatch.setattr(boundary, "gpt_shapes", lambda width, layers: [torch.Size([100])])
    result = measure(BoundaryBenchmark(rounds=3))
    assert result["step_runs_ms"] == pytest.approx([1000.0, 1100.0, 1100.0])
    assert result["both_runs_ms"] == pytest.approx([1200.0, 1000.0, 1300.0])
    assert result["ratio"] == pytest.approx(1.2 / 1.1)
    with pytest.raises(ValueError, match="--rounds is 0"):
        measure(BoundaryBenchmark(rounds=0))
