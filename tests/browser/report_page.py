"""The page of a real run, opened in Chromium: no console message, and a screenshot of each look.

Run by ``make browser-test``. The screenshots stay in runs/browser.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from gossipdp import GossipDataParallel, Monitor
from gossipdp.cli.main import main

CHROMIUM = shutil.which("chromium")
SHOTS = Path(__file__).parents[2] / "runs" / "browser"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
LOOKS = {
    "light": ("1240,3600", ()),
    "dark": ("1240,3600", ("--blink-settings=preferredColorScheme=0",)),
    "narrow": ("500,5200", ()),
}

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]


def _train(directory: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = GossipDataParallel(
        net, optimizer, budget_samples=40_000, monitor=Monitor(log_dir=directory)
    )
    data = [(torch.randn(16, 16), torch.randint(2, (16,))) for _ in range(50)]
    for inputs, labels in model.batches(data):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        model.log(loss=loss)
    model.consolidate()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp("run")
    request.getfixturevalue("workers")(_train, 3, args=(directory,))
    assert main(["report", str(directory)]) == 0
    return directory / "report.html"


def open_in_chromium(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def console(output: str) -> list[str]:
    return re.findall(r"^.*CONSOLE.*$", output, re.M)


@pytest.mark.parametrize("look", LOOKS)
def test_it_opens_without_a_console_message(page, tmp_path, look):
    size, flags = LOOKS[look]
    SHOTS.mkdir(parents=True, exist_ok=True)
    shot = SHOTS / f"report-{look}.png"
    shot.unlink(missing_ok=True)
    done = open_in_chromium(
        page, tmp_path / "profile", f"--window-size={size}", f"--screenshot={shot}", *flags
    )
    assert console(done.stderr) == []
    assert shot.stat().st_size > 50_000


def test_a_broken_page_would_be_noticed(page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace('"use strict";', "nothing.here();"))
    done = open_in_chromium(broken, tmp_path / "profile", "--dump-dom")
    assert "nothing is not defined" in "".join(console(done.stderr))
