"""The examples of the frameworks, on two workers each and with the real packages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from framework_runs import EPOCHS, EXAMPLES

SCRIPT = Path(__file__).parents[1] / "support" / "framework_runs.py"
FRAMEWORKS = ("accelerate_loop", "huggingface_trainer", "lightning_module")
NUM_TEST_IMAGES = 360
# Twelve runs of the plain loop, of other seeds, had 353.1 images right, with a standard deviation
# of 2.4. So five deviations leave 341, and two runs differ by no more than five times 2.4 * sqrt 2.
LEAST_RIGHT, MOST_LOST_IMAGES = 341, 17

# All runs are made by the first test.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[dict[str, Any]]]:
    results = folder / "results.json"
    subprocess.run([sys.executable, SCRIPT, results], check=True, timeout=1200, cwd=folder)
    return json.loads(results.read_text())


def num_right(outcomes: dict[str, list[dict[str, Any]]], name: str) -> int:
    """Test images that worker 0 told apart at the end."""
    return round(NUM_TEST_IMAGES * outcomes[name][0]["accuracy"])


def test_the_loop_under_ddp_and_ours_differ_in_three_lines():
    def code(name: str) -> list[str]:
        text = (EXAMPLES / f"{name}.py").read_text().split('"""\n', 2)[1]
        return [line for line in text.splitlines() if line]

    ddp, ours = code("plain_ddp"), code("plain_gossipdp")
    assert [line for line in ours if line not in ddp] == [
        "from gossipdp import Exchange, GossipDataParallel",
        'model = GossipDataParallel(net, optimizer, exchange=Exchange(pace="strict"))',
        "model.consolidate()",
    ]
    assert len([line for line in ddp if line not in ours]) == 2


@pytest.mark.parametrize(
    ("name", "like"),
    [("plain_gossipdp", "plain_ddp"), *((name, "plain_gossipdp") for name in FRAMEWORKS)],
)
def test_a_loop_reaches_the_accuracy_of_the_plain_one_with_the_same_bits(outcomes, name, like):
    workers = outcomes[name]
    assert num_right(outcomes, "plain_gossipdp") >= LEAST_RIGHT
    assert num_right(outcomes, name) >= num_right(outcomes, like) - MOST_LOST_IMAGES
    assert len({(worker["state"], worker["accuracy"]) for worker in workers}) == 1
    if name in FRAMEWORKS:  # the news of what the others have seen travels for a moment
        samples = sum(worker["samples"] for worker in workers)
        assert EPOCHS * 1437 <= samples < (EPOCHS + 1) * 1437


def test_accumulated_batches_make_one_step_and_worker_0_alone_saves(outcomes, folder):
    workers = outcomes["saved by transformers"]
    assert [(each["steps"], each["samples"]) for each in workers] == [(4, 4 * 2 * 4)] * 2
    assert [worker["is_first"] for worker in workers] == [True, False]
    assert len({worker["state"] for worker in workers}) == 1
    assert [worker["saves"] for worker in workers] == ["steps", "no"]
    saved = sorted(path.name for path in (folder / "saved by transformers").iterdir())
    assert saved == ["checkpoint-2", "checkpoint-4"]


def test_a_framework_that_was_set_up_as_a_run_of_its_own_is_refused(outcomes):
    for messages in outcomes["without single_process"]:
        assert len(messages) == 2
        assert all("within `with single_process():`" in message for message in messages)
