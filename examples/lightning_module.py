"""Handwritten digits under the Trainer of Lightning.

    gossipdp run -n 4 examples/lightning_module.py
    torchrun --nproc-per-node 4 examples/lightning_module.py

Each worker goes through all the data, in an order of its own.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Exchange
from gossipdp.integrations import single_process
from gossipdp.integrations.lightning import GossipStrategy

digits = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
labels = torch.tensor(digits.target)[order]
train = TensorDataset(images[:1437], labels[:1437])


class Classifier(lightning.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2),
            nn.Flatten(),
            nn.Linear(32 * 3 * 3, 10),
        )

    def training_step(self, batch, batch_index):
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return the optimizer, which the strategy wraps."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


with single_process() as worker:
    lightning.seed_everything(worker.seed)
    strategy = GossipStrategy(budget_samples=20 * 1437, exchange=Exchange(pace="strict"))
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", max_epochs=-1, **quiet)
module = Classifier()
trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))

module.eval()
accuracy = (module.net(images[1437:]).argmax(dim=1) == labels[1437:]).float().mean().item()
print(f"worker {strategy.global_rank}: accuracy {accuracy:.4f}")
