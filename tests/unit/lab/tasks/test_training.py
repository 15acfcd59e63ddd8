import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gossipdp_lab.tasks import BytesGptOptions, command
from gossipdp_lab.tasks.command import MODEL_FILE, TrainArguments, train
from gossipdp_lab.tasks.text import Gpt


@pytest.fixture
def options(tmp_path: Path) -> BytesGptOptions:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    return BytesGptOptions(
        data=text, output=tmp_path / "output", context=16, width=16, depth=1, heads=2, batch_size=8
    )


@pytest.mark.parametrize(
    "told", [{"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, {"GOSSIPDP_JOIN": "10.0.0.1:1"},
             {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}],
)  # fmt: skip
def test_under_any_launcher_the_command_is_one_worker(options, monkeypatch, told):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    trained: list[object] = []
    monkeypatch.setattr(command, "train", trained.append)
    assert command.run(TrainArguments(recipe=options)) == 0
    assert trained == [options]


def test_windows_of_a_long_text_end_within_it(options, monkeypatch):
    """Beyond 16 million float32 has not every whole number."""
    monkeypatch.setattr(Gpt, "num_validation_windows", 2)
    recipe = Gpt(options)
    recipe.validation = torch.zeros(50_000_000, dtype=torch.uint8)
    assert recipe.evaluate(recipe.make_model()) > 0


def test_an_evaluation_that_fails_does_not_lose_the_model(options, monkeypatch):
    def evaluate(self: Gpt, net: torch.nn.Module) -> float:
        raise OSError("broken image")

    monkeypatch.setattr(Gpt, "evaluate", evaluate)
    with pytest.raises(OSError, match="broken image"):
        train(options)
    assert "position" in torch.load(options.directory / MODEL_FILE, weights_only=True)


def test_a_run_that_goes_on_from_a_checkpoint_ends_bit_for_bit_the_same(options, tmp_path, capsys):
    options = replace(options, json=tmp_path / "results.json", checkpoint_every=7)
    outcome = train(options)
    assert outcome is not None
    assert json.loads((tmp_path / "results.json").read_text())["metric"] == outcome["metric"]
    num_steps = outcome["samples"] / options.batch_size
    assert outcome["slowest_steps"] == outcome["fastest_steps"] == num_steps
    expected = torch.load(options.directory / MODEL_FILE, weights_only=True)
    checkpoints = sorted((options.directory / "checkpoints").rglob("step-*"))
    # That of step 14 comes late, or not at all, if the first is still being written then.
    steps = [int(path.stem.partition("-")[2]) for path in checkpoints]
    assert [step for step in steps if not 14 <= step < 19] == [7, 19]
    for path in checkpoints[1:]:
        path.unlink()
    (options.directory / MODEL_FILE).unlink()
    assert outcome["progress_at_start"] == 0.0
    assert "minutes: since" not in capsys.readouterr().out

    resumed = train(replace(options, resume=True))

    assert resumed is not None
    share = resumed["progress_at_start"]
    assert share == pytest.approx(7 * options.batch_size / outcome["samples"], rel=0.1)
    assert f"since worker 0 began, at {share:.0%} of the run" in capsys.readouterr().out
    assert (resumed["metric"], resumed["samples"]) == (outcome["metric"], outcome["samples"])
    found = torch.load(options.directory / MODEL_FILE, weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
