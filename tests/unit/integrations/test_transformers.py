"""The callback on one worker: the Trainer's own training, bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from gossipdp import ProgressLR
from gossipdp.integrations.transformers import GossipCallback


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(inputs), labels)}


def train(
    folder: Path, *callbacks: Any, optimizers: Any = (None, None), **arguments: Any
) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    data = [
        {"inputs": torch.randn(4, generator=generator), "labels": torch.tensor(n % 2)}
        for n in range(40)
    ]
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True,
        **{"max_steps": 7, "save_strategy": "no", **arguments},
    )  # fmt: skip
    model = Model()
    trainer = transformers.Trainer(
        model, args, train_dataset=data, callbacks=list(callbacks), optimizers=optimizers
    )
    trainer.train()
    return model


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 3}, {"bf16": True}])
def test_one_worker_is_the_trainer_alone(tmp_path: Path, arguments: dict[str, Any]) -> None:
    alone = train(tmp_path, **arguments).state_dict()
    gossip = GossipCallback()
    with_us = train(tmp_path, gossip, **arguments).state_dict()
    assert all(torch.equal(alone[name], with_us[name]) for name in alone)
    assert not torch.equal(alone["layers.0.weight"], Model().layers[0].weight)
    assert gossip.consolidated is not None
    assert gossip.consolidated.gradient_steps == 7


def test_samples_are_counted_and_end_the_training(tmp_path: Path) -> None:
    gossip = GossipCallback(budget_samples=96)
    assert gossip.progress() == 0.0
    train(tmp_path, gossip, max_steps=1000, gradient_accumulation_steps=2)
    # Batches of 8, an epoch of 5: steps of 16, 16 and 8 samples.
    stats = gossip.model.stats()
    assert (stats.gradient_steps, stats.samples) == (7, 96)
    assert gossip.progress() == 1.0


def test_a_copy_of_the_model_is_not_counted(tmp_path: Path) -> None:
    class Distiller(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            teacher = copy.deepcopy(others["model"])
            teacher(inputs=torch.ones(5, 4), labels=torch.zeros(5, dtype=torch.long))

    gossip = GossipCallback()
    train(tmp_path, gossip, Distiller(), max_steps=2)
    assert gossip.model.stats().samples == 16


def test_training_again_after_an_exception_ends_the_part_before(tmp_path: Path) -> None:
    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            wrappers.append(gossip.model)
            if len(wrappers) == 1:
                raise KeyError("the user's")

    wrappers: list[Any] = []
    gossip = GossipCallback()
    data = [{"inputs": torch.ones(4), "labels": torch.tensor(0)}] * 16
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        max_steps=2,
    )  # fmt: skip
    trainer = transformers.Trainer(Model(), args, train_dataset=data, callbacks=[gossip, Failing()])
    with pytest.raises(KeyError, match="the user's"):
        trainer.train()
    trainer.train()
    with pytest.raises(RuntimeError, match="closed"):
        wrappers[0].consolidate()
    assert wrappers[0].stats().samples == 8
    assert gossip.model.stats().samples == 16


def test_evaluation_is_not_counted(tmp_path: Path) -> None:
    gossip = GossipCallback()
    data = [{"inputs": torch.ones(4), "labels": torch.tensor(0)}] * 16
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        max_steps=2, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    transformers.Trainer(
        Model(), args, train_dataset=data, eval_dataset=data, callbacks=[gossip]
    ).train()
    assert gossip.model.stats().samples == 16


def test_a_schedule_follows_the_whole_run(tmp_path: Path) -> None:
    rates: list[float] = []

    class Recorder(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            rates.append(others["optimizer"].param_groups[0]["lr"])

    # The Trainer steps the optimizer that it is given, over a model of its own here.
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = GossipCallback(budget_samples=64)
    schedule = ProgressLR(optimizer, gossip, {0.5: 0.1})
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        max_steps=100,
    )  # fmt: skip
    data = [{"inputs": torch.ones(4), "labels": torch.tensor(0)}] * 40
    transformers.Trainer(
        model, args, train_dataset=data, optimizers=(optimizer, schedule),
        callbacks=[gossip, Recorder()],
    ).train()  # fmt: skip
    assert rates == pytest.approx([0.1] * 3 + [0.01] * 5)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Trainer.train\(\) makes it"):
        _ = GossipCallback().model
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        train(
            tmp_path, GossipCallback(), load_best_model_at_end=True, metric_for_best_model="loss",
            save_strategy="no",
        )  # fmt: skip
