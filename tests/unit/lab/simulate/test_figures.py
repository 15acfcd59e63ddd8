"""The pictures of simulated runs hold what they say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gossipdp_lab.simulate import figures as module
from gossipdp_lab.simulate.figures import draw_timeline
from gossipdp_lab.simulate.scenario import ConstantTime, Link, LinkModel, Scenario, SlowedTime
from gossipdp_lab.simulate.study import simulate
from gossipdp_lab.simulate.trace import Trace


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is drawn."""
    drawn: list[Figure] = []
    make = module.new_figure

    def remember(*size: float) -> Figure:
        drawn.append(make(*size))
        return drawn[-1]

    monkeypatch.setattr(module, "new_figure", remember)
    return drawn


def timeline_of(method: str, **changes: Any) -> Trace:
    scenario = Scenario(
        num_workers=40,
        num_steps=12,
        num_records=1,
        fidelity="links",
        links=LinkModel(Link(bytes_per_s=25_600.0)),
        keep_timeline=True,
        **changes,
    )
    return simulate(scenario, method)


def test_timeline(figures: list[Figure], tmp_path: Path) -> None:
    slowed = SlowedTime(ConstantTime(0.1), {1: 3.0})
    traces = [timeline_of(method, compute_time=slowed) for method in ("gossip", "allreduce")]
    draw_timeline(traces, tmp_path / "timeline.png", title="a title")
    (figure,) = figures
    assert figure.get_suptitle() == "a title; 18 of them are shown"
    above, below = figure.axes
    assert above.get_title(loc="left") == "gossip, asynchronous: computing all the time"
    assert below.get_title(loc="left").startswith("allreduce, synchronous: ")
    ranks = [label.get_text() for label in above.get_yticklabels()]
    assert ranks == [*map(str, range(18))]
    assert above.get_xlim() == pytest.approx((0.0, 1.0))
    for axes in figure.axes:
        # Computing, exchanging, waiting: one collection of bars for each activity and worker.
        assert len(axes.collections) == 3 * 18
        assert all(
            box.x0 >= -1e-9 and box.x1 <= 1.0 + 1e-9
            for bars in axes.collections
            for path in bars.get_paths()
            for box in [path.get_extents()]
        )
    computing_of_the_slow = above.collections[1].get_paths()
    computing_of_another = above.collections[0].get_paths()
    assert len(computing_of_the_slow) < len(computing_of_another) / 2
    ideal = simulate(Scenario(num_workers=4, num_steps=5, keep_timeline=True), "gossip")
    draw_timeline([ideal], tmp_path / "timeline.png", title="a title")
    assert figures[1].axes[0].get_title(loc="left").endswith("no time at fidelity ideal")
    with pytest.raises(ValueError, match="keep_timeline=True"):
        draw_timeline([replace(ideal, intervals=[])], tmp_path / "timeline.png", title="a title")
