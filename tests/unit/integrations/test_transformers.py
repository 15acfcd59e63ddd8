"""The Trainer's own training, bit for bit; no line imports it where tests are merely collected."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from gossipdp import GossipDataParallel, Monitor, ProgressLR


def gossip_callback(**options):
    from gossipdp.integrations.transformers import GossipCallback

    return GossipCallback(**options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(inputs), labels)}


def trainer(folder, *callbacks, model=None, optimizers=(None, None), **options):
    import transformers

    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    data = [{"inputs": each, "labels": torch.tensor(n % 2)} for n, each in enumerate(inputs)]
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True,
        **{"max_steps": 7, "save_strategy": "no", **options},
    )  # fmt: skip
    return transformers.Trainer(
        model or Model(), args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks),
        optimizers=optimizers,
    )  # fmt: skip


def train(folder, *callbacks, **options) -> nn.Module:
    model = Model()
    trainer(folder, *callbacks, model=model, **options).train()
    return model


def stepping(step):
    import transformers

    callback = transformers.TrainerCallback()
    callback.on_step_end = lambda args, state, control, **others: step(**others)
    return callback


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 3}, {"bf16": True}])
def test_one_worker_is_the_trainer_alone(tmp_path, arguments):
    alone = train(tmp_path, **arguments).state_dict()
    gossip = gossip_callback()
    with_us = train(tmp_path, gossip, **arguments).state_dict()
    torch.testing.assert_close(with_us, alone, rtol=0, atol=0)
    assert not torch.equal(alone["layers.0.weight"], Model().layers[0].weight)
    assert gossip.consolidated.gradient_steps == 7


def test_samples_are_counted_and_end_the_training(tmp_path):
    gossip = gossip_callback(budget_samples=96, monitor=Monitor(log_dir=tmp_path / "log"))
    assert gossip.progress() == 0.0
    often = {"gradient_accumulation_steps": 2, "logging_steps": 3}
    trained = trainer(tmp_path, gossip, max_steps=1000, **often)
    trained.train()
    # Batches of 8, an epoch of 5: steps of 16, 16 and 8 samples.
    stats = gossip.model.stats()
    assert (stats.gradient_steps, stats.samples) == (7, 96)
    assert gossip.progress() == 1.0
    losses = [each["loss"] for each in trained.state.log_history if "loss" in each]
    assert len(losses) == 2
    assert list(gossip.model._worker.monitoring._losses) == losses


def test_copies_of_the_model_and_evaluations_are_not_counted(tmp_path):
    def distil(model, **others):
        teacher = copy.deepcopy(model)
        teacher(inputs=torch.ones(5, 4), labels=torch.zeros(5, dtype=torch.long))

    gossip = gossip_callback()
    train(tmp_path, gossip, stepping(distil), max_steps=2, eval_strategy="steps", eval_steps=1)
    assert gossip.model.stats().samples == 16


def test_training_again_after_an_exception_ends_the_part_before(tmp_path):
    def fail_once(**others):
        wrappers.append(gossip.model)
        if len(wrappers) == 1:
            raise KeyError("the user's")

    wrappers, gossip = [], gossip_callback()
    trained = trainer(tmp_path, gossip, stepping(fail_once), max_steps=2)
    with pytest.raises(KeyError, match="the user's"):
        trained.train()
    trained.train()
    with pytest.raises(RuntimeError, match="closed"):
        wrappers[0].consolidate()
    assert (wrappers[0].stats().samples, gossip.model.stats().samples) == (8, 16)


def test_a_schedule_follows_the_whole_run(tmp_path):
    # The Trainer steps the optimizer that it is given, over a model of its own here.
    rates, model = [], Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = gossip_callback(budget_samples=64)
    note = stepping(lambda optimizer, **others: rates.append(optimizer.param_groups[0]["lr"]))
    optimizers = optimizer, ProgressLR(optimizer, gossip, {0.5: 0.1})
    trainer(tmp_path, gossip, note, model=model, optimizers=optimizers, max_steps=100).train()
    assert rates == pytest.approx([0.1] * 3 + [0.01] * 5)


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_0_alone_saves(tmp_path, monkeypatch, rank):
    monkeypatch.setattr(GossipDataParallel, "rank", rank)
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trained = trainer(tmp_path, gossip_callback(), **saving)
    trained.train()
    assert trained.state.is_world_process_zero == (rank == 0)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == ["checkpoint-2", "checkpoint-4"] * (rank == 0)


def test_mistakes_are_refused(tmp_path):
    from transformers.training_args import ParallelMode

    with pytest.raises(RuntimeError, match=r"Trainer.train\(\) makes it"):
        _ = gossip_callback().model
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    with pytest.raises(ValueError, match="average: leave it False"):
        train(tmp_path, gossip_callback(), **options)
    several = Mock(parallel_mode=ParallelMode.DISTRIBUTED, world_size=2)
    with pytest.raises(ValueError, match=r"with 2 processes: .* within `with single_process\(\):`"):
        gossip_callback().on_train_begin(several, None, None, model=None, optimizer=None)
