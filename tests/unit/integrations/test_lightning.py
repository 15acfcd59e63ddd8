"""Lightning's own training, bit for bit; no line imports it where tests are merely collected."""

import functools
import signal

import pytest
import torch
from torch import nn

from gossipdp import Checkpoints, Monitor
from gossipdp.launcher.environment import Environment
from gossipdp.parallel.checkpoint import saved_steps

pytestmark = pytest.mark.usefixtures("plain_sigterm")


def gossip_strategy(**options):
    from gossipdp.integrations.lightning import GossipStrategy

    return GossipStrategy(**options)


@functools.cache
def module_class():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, before_step=lambda index: None):
            super().__init__()
            torch.manual_seed(3)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
            self.before_step = before_step

        def training_step(self, batch, index):
            self.before_step(index)
            return self.layers(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module


def fit(folder, strategy, module=None, **arguments):
    import lightning

    parts = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "max_epochs": -1, **dict.fromkeys(parts, False), **arguments}
    trainer = lightning.Trainer(strategy=strategy, devices=1, default_root_dir=folder, **options)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    module = module or module_class()()
    trainer.fit(module, torch.utils.data.DataLoader(inputs, batch_size=8))
    return module


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
)
def test_one_worker_is_lightning_alone(tmp_path, arguments):
    alone = fit(tmp_path, "auto", max_steps=7, **arguments).state_dict()
    strategy = gossip_strategy()
    with_us = fit(tmp_path, strategy, max_steps=7, **arguments).state_dict()
    torch.testing.assert_close(with_us, alone, rtol=0, atol=0)
    assert not torch.equal(alone["layers.0.weight"], module_class()().layers[0].weight)
    assert strategy.consolidated.gradient_steps == 7


def test_samples_are_counted_and_end_the_training(tmp_path):
    strategy = gossip_strategy(budget_samples=100)
    assert strategy.progress() == 0.0
    with pytest.raises(RuntimeError, match=r"Trainer.fit\(\) makes it"):
        _ = strategy.gossip
    fit(tmp_path, strategy)
    assert (strategy.gossip.stats().samples, strategy.progress()) == (104, 1.0)


def test_the_budget_ends_a_training_that_steps_its_optimizer_itself(tmp_path):
    """A step's result that is no loss is not logged."""
    losses = []

    class Manual(module_class()):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            outputs = self.layers(batch)
            losses.append(loss := outputs.square().mean())
            self.manual_backward(loss)
            optimizer.step()
            return (loss, {"loss": loss}, outputs)[index]

    strategy = gossip_strategy(budget_samples=20, monitor=Monitor(log_dir=tmp_path / "log"))
    fit(tmp_path, strategy, Manual(), max_epochs=2)
    assert strategy.gossip.stats().samples == 24
    logged = strategy.gossip._worker.monitoring._losses
    assert list(logged) == [loss.item() for loss in losses[:2]]


def test_an_error_in_training_ends_the_part_in_the_run(tmp_path):
    def fail(index):
        if index == 3:
            raise KeyError("the user's")

    strategy = gossip_strategy()
    with pytest.raises(KeyError, match="the user's"):
        fit(tmp_path, strategy, module_class()(fail))
    with pytest.raises(RuntimeError, match="closed"):
        strategy.gossip.consolidate()


@pytest.mark.parametrize("is_users", [False, True])
def test_sigterm_saves_between_two_steps_unless_the_user_handles_it(tmp_path, is_users):
    heard = []
    handler = (lambda number, _: heard.append(number)) if is_users else signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler)
    strategy = gossip_strategy(checkpoints=Checkpoints(tmp_path / "checkpoints"))
    module = module_class()(lambda index: index == 2 and signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, strategy, module)
    if is_users:
        assert heard == [signal.SIGTERM]
    else:
        assert ended.value.code == 128 + signal.SIGTERM
        assert saved_steps(tmp_path / "checkpoints", 0) == [3]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_the_rank_is_the_worker_s(monkeypatch):
    from lightning.pytorch.utilities import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 0)
    own = Environment(3, 4, 1, store_host="127.0.0.1", store_port=29500)
    monkeypatch.setattr(Environment, "read", lambda: own)
    strategy = gossip_strategy()
    assert (strategy.global_rank, strategy.local_rank) == (3, 1)
    assert not strategy.is_global_zero
    assert rank_zero_only.rank == 3
