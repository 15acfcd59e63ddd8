import io
from contextlib import closing
from pathlib import Path

from rich.console import Console

from gossipdp.observe.log import ExchangeRecord, RunLogWriter, worker_file
from gossipdp.report.live import LiveView


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


EXCHANGES = ExchangeRecord(0.0, 2, 4, 0, {1: 6}, 0.1, 0.0, 0.0, 0, 0)


def log_steps(directory: Path, clock: Clock, num_steps: int) -> None:
    for rank in range(2):
        writer = RunLogWriter(worker_file(directory, rank), interval_s=0.0, clock=clock)
        with closing(writer) as log:
            log.start(rank=rank, num_workers=2, configuration={})
            steps = num_steps + rank
            log.record(gradient_steps=steps, samples=8 * steps, loss=0.5, exchanges=EXCHANGES)


def make_view(directory: Path, clock: Clock, *, terminal: bool) -> tuple[LiveView, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    return LiveView(
        directory, num_workers=2, budget_samples=100, console=console, clock=clock
    ), output


def test_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    clock = Clock()
    view, output = make_view(tmp_path, clock, terminal=False)
    with view:
        view.poll()
        log_steps(tmp_path, clock, 3)
        clock.now = 4.0
        view.poll()
        assert output.getvalue() == ""
        clock.now = 5.5
        view.poll()
    line = output.getvalue().splitlines()[0]
    assert "training:  56%" in line
    assert "loss 0.5000" in line
    assert "steps 3 to 4, 6 exchanges" in line


def test_a_table_and_a_bar_in_a_terminal(tmp_path: Path) -> None:
    clock = Clock()
    view, output = make_view(tmp_path, clock, terminal=True)
    with view:
        log_steps(tmp_path, clock, 3)
        clock.now = 1.0
        view.poll()
    text = output.getvalue()
    for expected in (
        "starting 2 workers",
        "samples/s",
        "0.5000",
        "56 of 100 samples",
        "56%",
        "training",
    ):
        assert expected in text


def test_the_phase_after_the_last_sample(tmp_path: Path) -> None:
    clock = Clock()
    view, output = make_view(tmp_path, clock, terminal=False)
    with view:
        log_steps(tmp_path, clock, 7)
        clock.now = 6.0
        view.poll()
    assert "evaluating and averaging: 100%" in output.getvalue()


def test_the_dead_and_the_silent_are_shown(tmp_path: Path) -> None:
    clock = Clock()
    view, output = make_view(tmp_path, clock, terminal=False)
    log_steps(tmp_path, clock, 1)
    writer = RunLogWriter(worker_file(tmp_path, 0), clock=clock, goes_on=True)
    with closing(writer) as log, view:
        clock.now = 5.0
        log.notice(1, "stopped", 1.0)
        view.poll()
        assert output.getvalue().endswith(", worker 1 is silent\n")
        for what, state in (("dead", "dead"), ("rejoined", "training"), ("dead", "dead")):
            log.notice(1, what, 2.0)
            view.poll()
            assert view.workers[1].state == state
        clock.now = 10.0
        view.poll()
    assert output.getvalue().endswith(", worker 1 is dead\n")
