"""Workers as actors of a Ray of this machine: ``make cluster-test``."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from run_processes import run_python

import gossipdp.integrations.ray as integration
from gossipdp.errors import WorkerFailedError
from gossipdp.integrations.ray import launch
from gossipdp.links.tls import make_tls_files

pytestmark = [
    pytest.mark.processes,
    # Ray starts a process a worker, each of which imports torch: minutes on a busy small machine.
    pytest.mark.timeout(300),
    # Ray's own: sockets and files of its daemons that it leaves to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "ray_digits.py"


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray with room for three workers."""
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def make_train() -> Any:
    """Return a worker's function, which Ray takes by value: no import path leads to tests."""

    def train(marks: Path, mode: str) -> tuple[int, int, int]:
        import torch

        from gossipdp import GossipDataParallel

        if mode == "fails at once" and os.environ["RANK"] == "1":
            raise ValueError("no good")
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = GossipDataParallel(net, optimizer, graph="complete")
        rank, life = model.rank, int(os.environ.get("GOSSIPDP_RESTARTS", "0"))

        def train_until(*names: str, exchanges: int = 0) -> None:
            while (
                not all((marks / name).exists() for name in names)
                or model.stats().exchanges_answered < exchanges
            ):
                optimizer.zero_grad()
                model(torch.ones(8, 4)).square().mean().backward()
                optimizer.step()
                time.sleep(0.01)

        train_until(exchanges=2)
        (marks / f"{rank}.{life}").touch()
        train_until("0.0", "1.0", "2.0")
        time.sleep(0.2)  # until the last of them has told the store that it begins
        if rank == 1 and life == 0 and mode == "dies once":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "loses the meeting" and rank == 1:
            os.kill(int((marks / "meeting").read_text()), signal.SIGKILL)
        if rank == 1 and mode in ("fails", "loses the meeting"):
            (marks / "1.1").touch()
            raise ValueError("no good")
        train_until("1.1")
        done = model.consolidate().world_size
        (marks / f"{rank} ended over {done}").touch()
        return rank, life, done

    return train


@pytest.mark.usefixtures("local_ray")
def test_ray_starts_a_worker_again_that_died(tmp_path):
    results = launch(make_train(), 3, args=(tmp_path, "dies once"), max_restarts=1)
    assert results == [(0, 0, 3), (1, 1, 3), (2, 0, 3)]


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("mode", "said"), [("fails", r":\n(.*\n)*.*ValueError: no good"), ("loses the meeting", "")]
)
def test_a_failure_is_one_workers_and_is_told_at_the_end(tmp_path, monkeypatch, mode, said):
    class Known(integration.Meeting):
        def __init__(self, num_workers: int) -> None:
            super().__init__(num_workers)
            (tmp_path / "meeting").write_text(str(os.getpid()))

    monkeypatch.setattr(integration, "Meeting", Known)
    with pytest.raises(WorkerFailedError, match=f"worker 1 failed{said}"):
        launch(make_train(), 3, args=(tmp_path, mode))
    ended = sorted(path.name for path in tmp_path.glob("* ended over *"))
    assert ended == ["0 ended over 2", "2 ended over 2"]


@pytest.mark.usefixtures("local_ray")
def test_a_failure_before_all_have_begun_ends_all(tmp_path):
    with pytest.raises(WorkerFailedError, match="worker 1 failed"):
        launch(make_train(), 3, args=(tmp_path, "fails at once"))


def test_the_example(tmp_path):
    make_tls_files(tmp_path)
    words = ["--workers", "3", "--samples", "90000", "--tls", str(tmp_path)]
    done = run_python(str(EXAMPLE), *words, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"worker (\d): test accuracy ([\d.]+), achieved comm rate", done.stdout)
    assert [rank for rank, _ in lines] == ["0", "1", "2"]
    assert len({accuracy for _, accuracy in lines}) == 1
    assert float(lines[0][1]) > 0.9
