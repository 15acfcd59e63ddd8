import os
import signal
from pathlib import Path

import pytest
from small_run import SmallRun
from waiting import wait_until

from gossipdp import Network
from gossipdp.parallel.stats import Stats

pytestmark = pytest.mark.processes

SILENCE_S = 1.0


def stop_for_a_while(directory: Path) -> tuple[Stats, list[int], list[list[float]]]:
    """Rank 1 stops itself; rank 0 lets it go on once it is lost to the others."""
    run = SmallRun(0.005, network=Network(timeout_s=SILENCE_S, start_timeout_s=60.0))

    def exchange() -> None:
        before = run.model.stats().exchanges
        wait_until(lambda: run.model.stats().exchanges > before, "an exchange", run.step)

    (directory / f"pid-{run.rank}").write_text(str(os.getpid()))
    if run.rank == 1:
        exchange()
        os.kill(os.getpid(), signal.SIGSTOP)
        exchange()
    else:
        wait_until(lambda: "lost" in run.noticed(), "worker 1 is lost", run.step)
        if run.rank == 0:
            exchange()
            os.kill(int((directory / "pid-1").read_text()), signal.SIGCONT)
        wait_until(lambda: "answered" in run.noticed(), "worker 1 answers again", run.step)
    assert run.model.consolidate().world_size == 3
    restarts = [member.restarts for member in run.model._worker.view()]
    return run.model.stats(), restarts, [value.tolist() for value in run.net.parameters()]


def test_a_stopped_worker_is_noticed_and_takes_part_again_when_it_goes_on(workers, tmp_path):
    ends = workers(stop_for_a_while, 3, (tmp_path,))
    for rank, (stats, restarts, values) in enumerate(ends):
        assert values == ends[0][2]
        assert restarts == [0, 0, 0], "no other life began"
        of_it = [notice for notice in stats.noticed if notice.rank == 1]
        if rank == 1:
            # It says of itself, once, that it was stopped, and loses none of the others.
            stops = [notice.silent_s for notice in of_it]
            assert {notice.kind for notice in of_it} == {"stopped"}
            assert len(set(stops)) == len(stops)
            assert min(stops) >= SILENCE_S
            assert not {"lost", "restarted"} & {notice.kind for notice in stats.noticed}
        else:
            # Its silence and its loss may be seen as one.
            kinds = [notice.kind for notice in of_it if notice.kind != "silent"]
            assert kinds == ["lost", "answered"]
            assert of_it[-1].silent_s >= 0.9 * SILENCE_S
