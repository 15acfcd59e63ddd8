"""The script of docs/your_script.md, every change that it shows, and the examples."""

import gc
import os
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from waiting import wait_until

from gossipdp import GossipDataParallel, WorkerFailedError

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "your_script.md").read_text()
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
SAMPLES = 4 * 1440


def changes() -> dict[str, str]:
    """Return the changes by the headings that they stand under."""
    sections = re.split(r"^## (.*)\n", PAGE, flags=re.M)[1:]
    found = {}
    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        for change in re.findall(r"^```diff\n(.*?)^```", text, re.S | re.M):
            assert heading not in found, heading
            found[heading] = change
    return found


def applied(change: str) -> str:
    """Return the script after a change, whose parts must each fit one place, in this order."""
    done, rest = "", SCRIPT
    for part in re.split(r"^\.\.\.\n", change, flags=re.M):
        lines = part.splitlines(keepends=True)
        assert all(line[0] in " +-\n" for line in lines), part
        before = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
        after = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
        assert SCRIPT.count(before) == 1, f"in how many places of the script is this?\n{before}"
        passed, found, rest = rest.partition(before)
        assert found, f"this comes earlier in the script than the part before it:\n{before}"
        done += passed + after
    return done + rest


def are_adapters(names: list[str]) -> bool:
    """Return whether these name the adapters of the four linear layers of a block, and no more."""
    layers = ("qkv", "out", "up", "down")
    parts = {f"blocks.0.{layer}.{part}.weight" for layer in layers for part in ("up", "down")}
    return set(names) == parts


# By heading: what is looked at in the script's own names when it has ended, and what it must be on
# both workers.
LOOKS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "The script": ("model.stats().samples", lambda a, b: SAMPLES <= a + b < 2 * SAMPLES),
    "Learning-rate schedules": (
        "schedule.factor(0), schedule.get_last_lr()[0]",
        lambda *both: all(first == 1 / 25 and 0 < last < 5e-3 for first, last in both),
    ),
    "Mixed precision: autocast and GradScaler": (
        "scaler.state_dict()['_growth_tracker'], model.stats().gradient_steps",
        lambda *both: all(scaled == steps for scaled, steps in both),
    ),
    "Gradient accumulation": (
        "model.stats().samples / model.stats().gradient_steps",
        lambda a, b: min(a, b) >= 4 * 32,
    ),
    "Gradient clipping": (
        "torch.cat([p.grad.flatten() for p in net.parameters()]).norm().item()",
        lambda a, b: max(a, b) < 1.0001,
    ),
    "A moving average of the weights (EMA)": (
        "model.rank or torch.load('model.pt')['0.weight'].equal(ema.module[0].weight),"
        " 0.0 < (ema.module[0].weight - net[0].weight).norm() < net[0].weight.norm(),"
        " ema.module[1].running_mean.tolist(), ema.module[0].weight.tolist()",
        lambda a, b: a[0] is True and a[1:] == b[1:] and a[1],
    ),
    "torch.compile": ("net._compiled_call_impl is not None", lambda a, b: a and b),
    "Unfreezing later": (
        "net[0].weight.requires_grad, len(optimizer.state)",
        lambda a, b: a == b == (True, 6),
    ),
    "Several optimizers": (
        "len(optimizer.state), last_layer.param_groups[0]['params'][0].grad is None",
        lambda a, b: a == b == (4, True),
    ),
    "A loader with worker processes": ("loader.num_workers", lambda a, b: a == b == 2),
    "Evaluate each epoch on one worker": (
        "(accuracy > 0.8, net.training) if model.rank == 0 else None",
        lambda a, b: (a, b) == ((True, True), None),
    ),
    "Keep the best model": (
        "(best := max(kept.glob('*.pt'))), float(best.stem),"
        " sorted(torch.load(best)) == sorted(net.state_dict())",
        lambda *both: all(accuracy > 0.8 and is_whole for _, accuracy, is_whole in both),
    ),
    "Stop early, all workers together": (
        "model.finished, model.stats().samples",
        lambda a, b: a[0] and b[0] and a[1] + b[1] < 50 * SAMPLES,
    ),
    "Checkpoints, and going on after a crash": (
        "start, model.stats().samples",
        lambda a, b: a[0] + b[0] >= SAMPLES and 3 * SAMPLES / 2 <= a[1] + b[1] < 3 * SAMPLES,
    ),
    "Save for inference": (
        "net.training, net[0].weight.tolist()",
        lambda a, b: a == b and a[0] is False,
    ),
    "TensorBoard": (
        "len(os.listdir(f'tensorboard/worker-{model.rank}'))",
        lambda a, b: a == b == 1,
    ),
    "Weights & Biases": (
        "run.options['name'], run.finish.called, run.log.call_args[0][0]['progress']",
        lambda a, b: a[0] != b[0] and a[1] and b[1] and a[2] > 0 and b[2] > 0,
    ),
    "Watch the run, without either": (
        "'\"loss\"' in Path(f'log/worker-{model.rank}.jsonl').read_text()",
        lambda a, b: a and b,
    ),
    "A slow or shared network": (
        "model.stats()",
        lambda a, b: a.shared_bytes_sent == b.shared_bytes_sent == 0 and a.exchanges > 0,
    ),
    "examples/complete.py": (
        "end.samples, accuracy_of(ema, *valid), options.output.joinpath('best.pt').exists()",
        lambda a, b: a == b and 2 * 1440 <= a[0] < 4 * 1440 and a[1] > 0.3 and a[2],
    ),
    "examples/tied_transformer.py": ("result.world_size", lambda a, b: a == b == 2),
    "examples/lora.py": (
        # The lead alone writes the file, and perhaps after the other one has looked.
        "before, after, sorted(torch.load('adapters.pt')) if model.is_lead else []",
        lambda a, b: a[:2] == b[:2] and a[1] < a[0] and are_adapters(a[2] + b[2]),
    ),
}


def run_programs(programs: dict[str, list[Any]], directory: Path) -> dict[str, dict[str, Any]]:
    """Run all in this process; return what the last run of each leaves, or its traceback."""
    torch.set_num_threads(1)
    # The real package wants an account, and the network.
    wandb: Any = types.SimpleNamespace(init=lambda **given: Mock(options=dict(given)))
    sys.modules["wandb"] = wandb
    seen: dict[str, dict[str, Any]] = {}
    names: dict[str, Any] = {}
    for name, runs in programs.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        os.chdir(directory / name)
        os.environ["GOSSIPDP_LOG_DIR"] = "log" if name.startswith("Watch") else ""
        try:
            for program, sys.argv[1:] in runs:
                names.clear()
                names.update({"__name__": "__main__", "os": os, "Path": Path})
                exec(compile(program, name, "exec"), names)
            seen[name] = {
                "looked": eval(LOOKS[name][0], names),
                "weights": {key: value.clone() for key, value in names["net"].state_dict().items()},
                "exchanges": names["model"].stats().exchanges if "model" in names else 1,
            }
        except Exception:
            seen[name] = {"error": traceback.format_exc()}
        # Here, and not in the next program's gossip thread: a loader's end waits for its processes.
        names.clear()
        gc.collect()
        gc.freeze()  # or each time it looks at all that torch is, a quarter of a program's time
    return seen


@pytest.fixture(scope="module")
def seen(
    workers: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Any]]]:
    """Return the outcomes of all programs, by worker: one start of two workers runs them all."""
    scripts = {"The script": SCRIPT} | {name: applied(each) for name, each in changes().items()}

    def other(name: str, old: str, new: str) -> str:
        assert scripts[name].count(old) == 1
        return scripts[name].replace(old, new)

    # Tracing alone: the real compiler takes seconds.
    name = "torch.compile"
    scripts[name] = other(name, "net.compile()", 'net.compile(backend="eager")')
    # Longer than a worker may be kept from a core; and without the stop far longer than the test.
    for name in ("Evaluate each epoch on one worker", "Keep the best model", "Unfreezing later"):
        scripts[name] = other(name, "(loader, 4)", "(loader, 12)")
    name = "Stop early, all workers together"
    scripts[name] = other(name, "(loader, 4)", "(loader, 400)")
    programs: dict[str, list[Any]] = {name: [(each, [])] for name, each in scripts.items()}
    name = "Checkpoints, and going on after a crash"
    scripts[name] = other(name, "(loader, 4)", "(loader, 6)")
    line = "model.also_checkpoint("
    programs[name].append((other(name, line, f"start = model.stats().samples\n{line}"), []))
    complete, lora = "examples/complete.py", "examples/lora.py"
    text = (ROOT / complete).read_text()
    programs[complete] = [(text, ["--epochs", "1"]), (text, ["--epochs", "2"])]
    scripts[lora] = (ROOT / lora).read_text()
    tied = "examples/tied_transformer.py"
    scripts[tied] = (ROOT / tied).read_text()
    programs[tied] = [(other(tied, "16_000", "6_400"), [])]
    small = other(lora, "= 64, 256, 4, 4, 16, 400_000", "= 32, 32, 4, 1, 2, 4_000")
    make = ["base.pt", "--make", "--steps", "40"]
    programs[lora] = [(small, make), (small, ["base.pt", "--samples", "1600"])]
    directory = tmp_path_factory.mktemp("your-script")
    return workers(run_programs, 2, (programs, directory), timeout_s=280)


@pytest.mark.parametrize("name", LOOKS)
def test_the_change_does_what_it_says(name, seen):
    both = [each[name] for each in seen]
    assert not any("error" in each for each in both), both[0].get("error") or both[1]["error"]
    assert LOOKS[name][1](*(each["looked"] for each in both)), [each["looked"] for each in both]
    first, second = (each["weights"] for each in both)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(value.isfinite().all() for value in first.values())
    assert all(each["exchanges"] for each in both)


def die_in_an_evaluation(script: str, directory: Path) -> None:
    """Run the script; the lead is killed in its evaluation of epoch 1, when others are in 2."""
    os.chdir(directory)
    torch.set_num_threads(1)

    def begin(model: GossipDataParallel, epoch: int) -> None:
        Path(f"worker {model.rank} in epoch {epoch}").touch()
        if epoch == 2:
            wait_until(
                lambda: "lost" in [notice.kind for notice in model.stats().noticed], "worker 0 died"
            )
        lead = 0 if epoch < 2 else 1
        if model.rank != lead:
            wait_until(Path(f"worker {lead} in epoch {epoch}").exists, "the lead begins the epoch")

    def judge(model: GossipDataParallel, epoch: int) -> float:
        """Return the best accuracy for epoch 0."""
        if epoch == 1 and model.rank == 0:
            others = [Path(f"worker {rank} in epoch 2") for rank in (1, 2)]
            wait_until(lambda: all(each.exists() for each in others), "the others go on")
            os.kill(os.getpid(), signal.SIGKILL)
        Path(f"epoch {epoch} evaluated by worker {model.rank}").touch()
        return 0.9 if epoch == 0 else 0.5

    names = {"__name__": "__main__", "begin": begin, "judge": judge}
    exec(compile(script, "Keep the best model", "exec"), names)
    model: Any = names["model"]  # is consolidated
    Path(f"worker {model.rank} leads: {model.is_lead}").touch()


def test_an_evaluation_that_dies_with_the_lead_is_the_only_one_that_is_lost(workers, tmp_path):
    script = applied(changes()["Keep the best model"])
    (in_every_epoch,) = re.findall(r'`(model\.save_averaged\(f"epoch-.*?)`', PAGE)
    for old, new in (
        (r"    for inputs, targets in batches:", r"    begin(model, epoch)\n\g<0>"),
        (r"    if model\.is_lead:", rf"    {in_every_epoch}\n\g<0>"),
        (r"accuracy = .*", r"accuracy = judge(model, epoch)"),
    ):
        script, count = re.subn(old, new, script)
        assert count == 1
    with pytest.raises(WorkerFailedError, match="worker 0 died of signal 9"):
        workers(die_in_an_evaluation, 3, (script, tmp_path))
    assert sorted(path.name for path in tmp_path.glob("epoch * evaluated *")) == [
        "epoch 0 evaluated by worker 0",
        "epoch 2 evaluated by worker 1",
        "epoch 3 evaluated by worker 1",
    ]
    leads = sorted(path.name for path in tmp_path.glob("* leads: *"))
    assert leads == ["worker 1 leads: True", "worker 2 leads: False"]
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["0.9000.pt"]
    saved = sorted(tmp_path.glob("epoch-*.pt"))
    assert [path.name for path in saved] == [f"epoch-{epoch}.pt" for epoch in range(4)]
    assert all(torch.load(path) for path in saved)


def test_every_change_is_looked_at():
    assert ["The script", *changes()] == [name for name in LOOKS if "examples" not in name]
