"""The pages of a report and of a status port, opened in Chromium; screenshots in runs/browser."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gossipdp import GossipDataParallel, Monitor
from gossipdp.cli.main import main
from gossipdp.observe.server import StatusServer, pages_of
from gossipdp.observe.status import MemberStatus, WorkerStatus

CHROMIUM = shutil.which("chromium")
SHOTS = Path(__file__).parents[2] / "runs" / "browser"
# The page of a job asks for it after it has loaded, within the virtual time.
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
 --disable-background-networking --disable-component-update --hide-scrollbars
 --enable-logging=stderr --virtual-time-budget=5000"""
SIZES = {"light": "1240,3600", "dark": "1240,3600", "narrow": "500,5200"}
HOSTILE = "<img src=x onerror=stolen()>"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]


def _train(directory: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = GossipDataParallel(net, optimizer, budget_samples=40_000, monitor=Monitor(directory))
    data = [(torch.randn(16, 16), torch.randint(2, (16,))) for _ in range(50)]
    for inputs, labels in model.batches(data):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        model.log(loss=loss)
    model.consolidate()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    directory = tmp_path_factory.mktemp("run")
    request.getfixturevalue("workers")(_train, 3, args=(directory,))
    assert main(["report", str(directory)]) == 0
    return (directory / "report.html").as_uri()


@pytest.fixture
def job() -> Iterator[str]:
    about = ("7f", "a2cid2", HOSTILE, 1.0, HOSTILE, 7, "training", 30_000, 40_000)
    members = (MemberStatus(0, 0, "training"), MemberStatus(1, 0, "lost", status_address=HOSTILE))
    server = StatusServer("127.0.0.1", 0)
    server.serve(pages_of(lambda: WorkerStatus(0, *about, world_size=2, members=members)))
    yield f"http://127.0.0.1:{server.address[1]}/"
    server.close()


def open_in_chromium(page: str, profile: Path, *flags: str) -> tuple[list[str], str]:
    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={profile}", *flags, page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return re.findall(r"^.*CONSOLE.*$", done.stderr, re.M), done.stdout


@pytest.mark.parametrize("look", SIZES)
@pytest.mark.parametrize("page", ["report", "job"])
def test_it_opens_without_a_console_message(page, look, tmp_path, request):
    SHOTS.mkdir(parents=True, exist_ok=True)
    shot = SHOTS / f"{page}-{look}.png"
    shot.unlink(missing_ok=True)
    scheme = f"--blink-settings=preferredColorScheme={int(look != 'dark')}"
    flags = (scheme, f"--window-size={SIZES[look]}", f"--screenshot={shot}")
    assert open_in_chromium(request.getfixturevalue(page), tmp_path, *flags)[0] == []
    assert shot.stat().st_size > 50_000


def test_names_in_the_page_of_a_job_are_text(job, tmp_path):
    messages, page = open_in_chromium(job, tmp_path, "--dump-dom")
    assert messages == []
    assert "Worker 1 is lost" in page
    assert page.count("&lt;img src=x onerror=stolen()&gt;") == 3  # graph, host and address


def test_a_broken_page_would_be_noticed(report, tmp_path):
    broken = tmp_path / "broken.html"
    text = Path(report.removeprefix("file://")).read_text()
    broken.write_text(text.replace('"use strict";', "nothing.here();"))
    messages, _ = open_in_chromium(broken.as_uri(), tmp_path, "--dump-dom")
    assert "nothing is not defined" in "".join(messages)
