"""The strategy on one worker: Lightning's own training, bit for bit; and whose rank it has."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from gossipdp import Checkpoints, Monitor
from gossipdp.integrations.lightning import GossipStrategy
from gossipdp.launcher.environment import Environment
from gossipdp.parallel.checkpoint import saved_by
from gossipdp.parallel.termination import Termination


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(folder: Path, strategy: Any, module: nn.Module | None = None, **arguments: Any) -> Any:
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": -1, **arguments},
    )
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    module = module or Module()
    trainer.fit(module, torch.utils.data.DataLoader(inputs, batch_size=8))
    return module


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
    ],
)
def test_one_worker_is_lightning_alone(tmp_path: Path, arguments: dict[str, Any]) -> None:
    alone = fit(tmp_path, "auto", max_steps=7, **arguments).state_dict()
    strategy = GossipStrategy()
    with_us = fit(tmp_path, strategy, max_steps=7, **arguments).state_dict()
    assert all(torch.equal(alone[name], with_us[name]) for name in alone)
    assert not torch.equal(alone["layers.0.weight"], Module().layers[0].weight)
    assert strategy.consolidated is not None
    assert strategy.consolidated.gradient_steps == 7


def test_samples_are_counted_and_end_the_training(tmp_path: Path) -> None:
    strategy = GossipStrategy(budget_samples=100)
    assert strategy.progress() == 0.0
    fit(tmp_path, strategy)
    assert strategy.gossip.stats().samples == 104
    assert strategy.progress() == 1.0


class Manual(Module):
    """Steps the optimizer itself, below Lightning, and returns what is no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        outputs = self.layers(batch)
        self.manual_backward(outputs.square().mean())
        optimizer.step()
        return outputs


def test_the_budget_ends_a_training_that_steps_its_optimizer_itself(tmp_path: Path) -> None:
    strategy = GossipStrategy(budget_samples=20, monitor=Monitor(log_dir=tmp_path / "log"))
    fit(tmp_path, strategy, Manual(), max_epochs=2)
    assert strategy.gossip.stats().samples == 24
    assert strategy.consolidated is not None  # a step's result that is no loss is not logged


def test_an_error_in_training_ends_the_part_in_the_run(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if index == 3:
                raise KeyError("the user's")
            return super().training_step(batch, index)

    strategy = GossipStrategy()
    with pytest.raises(KeyError, match="the user's"):
        fit(tmp_path, strategy, Failing())
    with pytest.raises(RuntimeError, match="closed"):
        strategy.gossip.consolidate()


class Terminated(Module):
    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == 2:
            signal.raise_signal(signal.SIGTERM)
        return super().training_step(batch, index)


@pytest.fixture
def sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM is as it comes, and waited for on a busy machine too."""
    monkeypatch.setattr(Termination, "LONGEST_WAIT_S", 60.0)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_sigterm_saves_between_two_steps_and_ends_the_worker(tmp_path: Path) -> None:
    strategy = GossipStrategy(checkpoints=Checkpoints(tmp_path / "checkpoints"))
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, strategy, Terminated())
    assert ended.value.code == 128 + signal.SIGTERM
    assert [saved.facts.step for saved in saved_by(tmp_path / "checkpoints", 0)] == [3]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("sigterm")
def test_a_user_s_handler_of_sigterm_is_left_alone(tmp_path: Path) -> None:
    def handle(number: int, frame: Any) -> None:
        heard.append(number)

    heard: list[int] = []
    signal.signal(signal.SIGTERM, handle)
    strategy = GossipStrategy(checkpoints=Checkpoints(tmp_path / "checkpoints"))
    with pytest.raises(SystemExit):
        fit(tmp_path, strategy, Terminated())
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == handle


@pytest.mark.usefixtures("sigterm")
def test_without_checkpoints_sigterm_is_as_it_comes_while_training(tmp_path: Path) -> None:
    class Looking(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            handlers.append(signal.getsignal(signal.SIGTERM))
            return super().training_step(batch, index)

    handlers: list[Any] = []
    fit(tmp_path, GossipStrategy(), Looking(), max_steps=2)
    assert handlers == [signal.SIG_DFL] * 2


def test_the_rank_is_the_worker_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    own = Environment(3, 4, 1, store_host="127.0.0.1", store_port=29500)
    monkeypatch.setattr(Environment, "read", lambda: own)
    strategy = GossipStrategy()
    assert (strategy.global_rank, strategy.local_rank) == (3, 1)
    assert not strategy.is_global_zero
    assert rank_zero_only.rank == 3


def test_there_is_no_model_before_training() -> None:
    with pytest.raises(RuntimeError, match=r"Trainer.fit\(\) makes it"):
        _ = GossipStrategy().gossip
