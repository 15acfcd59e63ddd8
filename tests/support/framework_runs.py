"""Runs the examples of the frameworks on two workers each, and writes what came of it as JSON.

    python tests/support/framework_runs.py results.json

A process of its own: its fork server imports the frameworks, which takes ten seconds of CPU time.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gossipdp.launcher.local import launch, start_fork_server

EXAMPLES = Path(__file__).parents[2] / "examples"
# What is the wrapper in each; plain_ddp has none.
WRAPPERS = {
    "plain_ddp": None,
    "plain_gossipdp": "model",
    "accelerate_loop": "model",
    "huggingface_trainer": "gossip.model",
    "lightning_module": "strategy.gossip",
}
FRAMEWORKS = ("accelerate", "transformers.trainer", "lightning.pytorch")
# Of the twenty epochs of the examples, so that a run ends soon.
EPOCHS = 8


def run_example(name: str, wrapper: str | None) -> dict[str, Any]:
    path = EXAMPLES / f"{name}.py"
    text = path.read_text()
    shorter = text.replace("20 * 1437", f"{EPOCHS} * 1437").replace("range(20)", f"range({EPOCHS})")
    assert shorter != text
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(shorter, path, "exec"), names)
    found = SimpleNamespace(**names)
    if wrapper is None:
        return {"accuracy": found.accuracy}
    return {"accuracy": found.accuracy, **counts_of(attrgetter(wrapper)(found))}


def save_under_transformers(folder: str) -> dict[str, Any]:
    """Train with accumulation; the workers share an output directory."""
    import torch
    from transformers import Trainer, TrainingArguments

    from gossipdp.integrations import single_process
    from gossipdp.integrations.transformers import GossipCallback

    steps = {"max_steps": 4, "save_steps": 2, "logging_steps": 2, "gradient_accumulation_steps": 2}
    options = {"per_device_train_batch_size": 4, "report_to": "none", "disable_tqdm": True}
    with single_process() as worker:
        args = TrainingArguments(folder, use_cpu=True, seed=worker.seed, **steps, **options)
    model, data = scaled(torch.nn.Linear(2, 1)), [{"inputs": torch.ones(2)}] * 64
    trainer = Trainer(model, args, train_dataset=data, callbacks=[gossip := GossipCallback()])
    trainer.train()
    is_first = trainer.state.is_world_process_zero
    return {"saves": args.save_strategy.value, "is_first": is_first, **counts_of(gossip.model)}


def counts_of(model: Any) -> dict[str, Any]:
    hashed = hashlib.sha256()
    for value in model.module.state_dict().values():
        hashed.update(value.detach().contiguous().numpy().tobytes())
    stats = model.stats()
    return {"steps": stats.gradient_steps, "samples": stats.samples, "state": hashed.hexdigest()}


def scaled(linear: Any) -> Any:
    """Make a module whose forward pass takes ``inputs`` and returns a loss."""
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.linear(inputs).square().mean()}

    return Scaled()


def forget_the_single_process() -> list[str]:
    """Return the errors of frameworks that were set up as a part of the run."""
    import torch
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    from gossipdp.integrations.accelerate import gossip_data_parallel
    from gossipdp.integrations.transformers import GossipCallback

    def under_accelerate() -> None:
        linear = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        gossip_data_parallel(Accelerator(cpu=True), linear, optimizer)

    def under_transformers() -> None:
        args = TrainingArguments("none", use_cpu=True, report_to="none", max_steps=1)
        data = [{"inputs": torch.ones(2)}] * 8
        model = scaled(torch.nn.Linear(2, 1))
        Trainer(model, args, train_dataset=data, callbacks=[GossipCallback()]).train()

    messages = []
    for wrap in (under_accelerate, under_transformers):
        try:
            wrap()
        except ValueError as error:
            messages.append(str(error))
    return messages


def main(results: Path) -> None:
    start_fork_server(also=FRAMEWORKS)
    outcomes: dict[str, Any] = {}

    def run(name: str, function: Callable[..., Any], *args: Any) -> None:
        outcomes[name] = launch(function, 2, args, timeout_s=600)

    for name, wrapper in WRAPPERS.items():
        run(name, run_example, name, wrapper)
    folder = results.parent / "saved by transformers"
    folder.mkdir()
    run(folder.name, save_under_transformers, str(folder))
    run("without single_process", forget_the_single_process)
    results.write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
